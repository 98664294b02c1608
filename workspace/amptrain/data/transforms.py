"""Random changes of training images. Each is a pure function of an image and a generator made for
that image alone."""

import math

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Box = tuple[float, float, float, float]
"""(left, top, right, bottom) in pixels."""
Pixels = NDArray[np.uint8]
"""uint8, (channels, height, width)."""


def sample_rng(seed: int, epoch: int, index: int) -> np.random.Generator:
    """The random numbers of image `index` in epoch `epoch`.

    A counter-based generator: the same in whichever worker, after whatever came before, so a
    resumed run augments exactly as the run that was never stopped. Worker seeds differ with the
    number of workers (pytorch#7209).
    """
    return np.random.Generator(np.random.Philox(key=[seed, epoch], counter=[0, 0, 0, index]))


def shift(image: Pixels, max_shift: int, rng: np.random.Generator) -> Pixels:
    """Move the image by up to `max_shift` pixels each way, filling with zeros."""
    channels, height, width = image.shape
    y, x = rng.integers(0, 2 * max_shift + 1, 2)
    padded = np.zeros(
        (channels, height + 2 * max_shift, width + 2 * max_shift), image.dtype
    )  # np.pad takes 20 times as long
    padded[:, max_shift : max_shift + height, max_shift : max_shift + width] = image
    return padded[:, y : y + height, x : x + width]


def flip(image: Pixels, rng: np.random.Generator) -> Pixels:
    """Left for right, every other time."""
    return image[:, :, ::-1] if rng.random() < 0.5 else image


def random_resized_box(width: int, height: int, rng: np.random.Generator) -> Box:
    """A random part of 8 % to 100 % of the area, its sides at 3:4 to 4:3.

    The distribution is that of Inception (Szegedy et al., arXiv:1409.4842, section 6).
    """
    for _ in range(10):
        area = width * height * rng.uniform(0.08, 1.0)
        ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            x, y = int(rng.integers(0, width - w + 1)), int(rng.integers(0, height - h + 1))
            return x, y, x + w, y + h
    return center_box(width, height, zoom=1.0)


def center_box(width: int, height: int, zoom: float = 256 / 224) -> Box:
    """The middle square, of the shorter side divided by `zoom`."""
    side = min(width, height) / zoom
    x, y = (width - side) / 2, (height - side) / 2
    return x, y, x + side, y + side


def random_resized_crop(image: Image.Image, size: int, rng: np.random.Generator) -> Image.Image:
    """`random_resized_box` of `image` as a square of `size` pixels."""
    box = random_resized_box(*image.size, rng)
    return image.resize((size, size), Image.Resampling.BILINEAR, box=box)


def center_crop(image: Image.Image, size: int) -> Image.Image:
    """`center_box` of `image` as a square of `size` pixels."""
    box = center_box(*image.size)
    return image.resize((size, size), Image.Resampling.BILINEAR, box=box)
