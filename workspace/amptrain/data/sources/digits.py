"""Handwritten digits of 8×8 pixels, which ship with this package."""

from pathlib import Path

import numpy as np

from amptrain.config import DataConfig
from amptrain.data.augment import Augment
from amptrain.data.datasets import ArrayImages, Dataset

MEAN, WHITE = (4.88,), 16.0
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
    augment = Augment(config, mean=MEAN, pixel_max=WHITE)
    return Dataset(
        name="digits",
        classes=tuple(str(digit) for digit in range(10)),
        train=ArrayImages(images[~test], labels[~test], seed, augment, max_shift=1),
        validation=ArrayImages(images[test], labels[test], seed),
        shape=(1, 8, 8),
        mean=MEAN,
        std=(6.02,),
        in_memory=True,
        pixel_max=WHITE,
        crop=1.0,
    )
