"""Handwritten digits of 8×8 pixels, which ship with this package."""

from pathlib import Path

import numpy as np

from amptrain.config import DataConfig
from amptrain.data.datasets import ArrayImages, Dataset

USAGE = "digits"
DIGITS = Path(__file__).parents[1] / "datafiles" / "digits.npz"
DIGITS_TEST = 360
"""Size of the test set of digits: the images whose index times 7919 (a prime) modulo their number
is below it."""


def open(argument: str, config: DataConfig, seed: int) -> Dataset:
    """`argument` is empty."""
    with np.load(DIGITS) as arrays:
        images, labels = arrays["images"], arrays["labels"]
    test = np.arange(len(images)) * 7919 % len(images) < DIGITS_TEST
    return Dataset(
        name="digits",
        classes=tuple(str(digit) for digit in range(10)),
        train=ArrayImages(images[~test], labels[~test], seed, int(config.augment), flips=False),
        validation=ArrayImages(images[test], labels[test], seed, 0, flips=False),
        shape=(1, 8, 8),
        mean=(4.88,),
        std=(6.02,),
        in_memory=True,
        pixel_max=16.0,
        crop=1.0,
    )
