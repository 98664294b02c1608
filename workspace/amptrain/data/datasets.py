"""What all data sets have in common: images that are read by (epoch, index), and the `Dataset` that
holds them. The kinds are in `sources/`, one file each."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.utils.data
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from amptrain.config import DataConfig
from amptrain.data.augment import Augment, is_wanted
from amptrain.data.contents import contents_of
from amptrain.data.decode import (
    READ_ERRORS,
    Reading,
    broken_text,
    crop_resize,
    retried,
    upright_size,
)
from amptrain.data.files import FileList
from amptrain.data.sources import module_of, split
from amptrain.data.transforms import (
    Pixels,
    center_box,
    flip,
    random_resized_box,
    sample_rng,
    shift,
)
from amptrain.errors import ConfigError
from amptrain.words import counted

VALIDATION = -1
"""The epoch of images that are to be read as they are."""
MAX_BROKEN_IN_A_ROW = 100
"""After so many images that cannot be read, none is looked for in place of the first."""
VAL_FRACTION = 0.2
"""Held out for validation where nothing else is said."""
MICRO_F1 = "micro-F1"
"""The measure for images of several labels."""
IMAGENET_MEAN = (123.675, 116.28, 103.53)
IMAGENET_STD = (58.395, 57.12, 57.375)

Key = tuple[int, int]
"""(epoch, index). The epoch travels with the index: what is set on a data set later never reaches
its workers."""


class Sample(NamedTuple):
    """One image."""

    image: Tensor
    """uint8, (channels, height, width): a quarter of the bytes of FP32 on the way to the device."""
    label: int
    """The class, or -1 for an image that could not be read."""
    broken: tuple[str, ...] = ()
    """A sentence for each image that could not be read."""


class Images(torch.utils.data.Dataset[Sample]):
    """Images that are read by (epoch, index); `index` is from 0 to len() - 1."""

    augment: Augment | None = None
    """What changes them in training; None where nothing does."""
    labels: NDArray[np.integer] | None = None
    """The class of each; None where it is not known without reading the image."""
    reading: Reading | None = None
    """How they are read from files; None where they are no files."""

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, key: Key) -> Sample:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """What there is to learn from."""

    name: str
    classes: tuple[str, ...]
    train: Images
    validation: Images
    shape: tuple[int, int, int]
    """(channels, height, width)."""
    mean: tuple[float, ...]
    """Of each channel, in pixel values."""
    std: tuple[float, ...]
    in_memory: bool
    """Whether reading an image takes next to no time."""
    pixel_max: float = 255.0
    """The pixel value of white."""
    crop: float = 224 / 256
    """Part of the shorter side that is seen in validation."""
    messages: tuple[str, ...] = ()
    """Sentences on what was found."""
    contents: dict[str, Any] | None = None
    """Plain types that change when the data does, see data/contents.py; None where it cannot."""
    label_sets: NDArray[np.bool_] | None = None
    """For images of several labels, or none: (sets, classes), which classes are in each set of
    labels that there is. A Sample's label, and Images.labels, then are rows of this."""

    @property
    def label_count(self) -> int:
        """Labels are from 0 to one below this."""
        return len(self.classes if self.label_sets is None else self.label_sets)

    @property
    def measure(self) -> str:
        """What a validation counts, see validate.py."""
        return "accuracy" if self.label_sets is None else MICRO_F1


def open_dataset(config: DataConfig, seed: int) -> Dataset:
    """The data set that `config` names. Raises ConfigError for what is missing or wrong in it."""
    kind, argument = split(config.data)
    dataset: Dataset = module_of(kind).open(argument, config, seed)
    if is_wanted(config) and dataset.train.augment is None:
        raise ConfigError(
            f"--augment {config.augment}, --random-erasing and --color-jitter change images of 8 "
            f"bits, and {dataset.name} gives none: noise, or what transforms of your own made of "
            "them. Put the augmentation there, and leave these flags out."
        )
    reading = reading_of(config)
    if dataset.train.reading is None and reading != Reading():
        raise ConfigError(
            "--background, --white-level and --no-exif-orientation say how image files are read, "
            f"and {dataset.name} gives arrays or tensors. Leave these flags out."
        )
    return dataset


def reading_of(config: DataConfig) -> Reading:
    """How `config` has image files read."""
    return Reading(config.exif_orientation, config.background, config.white_level)


class ArrayImages(Images):
    """Images held in memory."""

    labels: NDArray[np.integer]

    def __init__(
        self,
        images: Pixels,
        labels: NDArray[np.integer],
        seed: int,
        augment: Augment | None = None,
        max_shift: int = 0,
        flips: bool = False,
    ) -> None:
        self.images, self.labels = images, labels
        self.seed, self.augment, self.max_shift, self.flips = seed, augment, max_shift, flips

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: Key) -> Sample:
        epoch, index = key
        image, label = self.images[index], int(self.labels[index])
        if epoch != VALIDATION and self.augment is not None:
            rng = sample_rng(self.seed, epoch, index)
            if self.augment.moves:
                image = shift(image, self.max_shift, rng)
                image = flip(image, rng) if self.flips else image
            image = self.augment(image, rng)
        return Sample(torch.from_numpy(np.ascontiguousarray(image)), label)


class FileImages(Images):
    """Image files, read as RGB squares of `size` pixels."""

    reading: Reading

    def __init__(
        self,
        files: FileList,
        size: int,
        seed: int,
        augment: Augment | None = None,
        reading: Reading | None = None,
    ) -> None:
        self.files, self.size, self.seed, self.augment = files, size, seed, augment
        self.reading = reading or Reading()
        self.labels = files.labels

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, key: Key) -> Sample:
        """The image at `index`; for a broken one in training, the next that can be read, so that a
        step stays whole."""
        epoch, index = key
        broken: list[str] = []
        while True:
            path = self.files.path(index)
            try:
                image = retried(partial(self._read, path, epoch, index))
                return Sample(image, int(self.files.labels[index]), tuple(broken))
            except READ_ERRORS as error:
                broken.append(broken_text(path, error))
            index = (index + 1) % len(self)
            if epoch == VALIDATION or len(broken) == min(MAX_BROKEN_IN_A_ROW, len(self)):
                nothing = torch.zeros(3, self.size, self.size, dtype=torch.uint8)
                return Sample(nothing, -1, tuple(broken))

    def _read(self, path: str, epoch: int, index: int) -> Tensor:
        with Image.open(path) as file:
            pixels = square_of(
                file,
                self.size,
                None if epoch == VALIDATION else self.augment,
                sample_rng(self.seed, epoch, index),
                self.reading,
            )
        return torch.from_numpy(np.ascontiguousarray(pixels))


def square_of(
    image: Image.Image,
    size: int,
    augment: Augment | None,
    rng: np.random.Generator,
    reading: Reading,
) -> Pixels:
    """The middle of `image`, or a random part of it, as a square of `size` pixels, augmented."""
    width, height = upright_size(image, reading)
    moves = augment is not None and augment.moves
    box = random_resized_box(width, height, rng) if moves else center_box(width, height)
    pixels: Pixels = np.asarray(crop_resize(image, box, size, reading)).transpose(2, 0, 1)
    pixels = flip(pixels, rng) if moves else pixels
    return pixels if augment is None else augment(pixels, rng)


class FakeImages(Images):
    """Only a length: the loader makes such images on the device."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length


def hold_out(
    labels: NDArray[np.integer], fraction: float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(training, validation) indices, each in ascending order, with `fraction` of every class in
    the second.

    A class of two or more has at least one in each; a class of one is for training alone. A pure
    function of the arguments.
    """
    held = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        of_class = np.flatnonzero(labels == label)
        count = min(max(1, round(len(of_class) * fraction)), len(of_class) - 1)
        rng = np.random.Generator(np.random.Philox(key=[seed, int(label)], counter=[0, 0, 2, 0]))
        held[rng.permutation(of_class)[:count]] = True
    return np.flatnonzero(~held), np.flatnonzero(held)


def class_counts(
    labels: NDArray[np.integer], classes: Sequence[str], label_sets: NDArray[np.bool_] | None
) -> NDArray[np.int64]:
    """Images of each class, (classes,)."""
    if label_sets is None:
        return np.bincount(labels, minlength=len(classes))
    of_set = np.bincount(labels, minlength=len(label_sets))
    return np.array([of_set[column].sum() for column in label_sets.T], dtype=np.int64)


def count_text(
    part: str, images: int, counts: NDArray[np.int64], classes: Sequence[str], each: str = ""
) -> str:
    """The sentence on how many images each class has."""
    there = counted(int(np.count_nonzero(counts)), "class")
    start = f"{part}: {counted(images, 'image')} of {there}{each}"
    if len(classes) <= 12:
        of_each = ", ".join(f"{name} {n}" for name, n in zip(classes, counts, strict=True))
        return f"{start} ({of_each})"
    few, many = int(counts.argmin()), int(counts.argmax())
    return f"{start} (from {counts[few]} of {classes[few]} to {counts[many]} of {classes[many]})"


def file_dataset(
    config: DataConfig,
    seed: int,
    classes: Sequence[str],
    train: FileList,
    validation: FileList,
    messages: Sequence[str],
    label_sets: NDArray[np.bool_] | None = None,
) -> Dataset:
    """The data set of these image files, whose labels are rows of `label_sets` where that is given.
    `messages` follow the counts. Raises ConfigError if there is nothing to learn, or nothing to
    validate with."""
    if len(classes) < 2:
        raise ConfigError(
            f"{config.data} has one class only, {', '.join(classes)}: there is nothing to tell "
            "apart. A class for what is none of it, such as other, would do."
        )
    if len(validation) == 0:
        raise ConfigError(
            f"{config.data} has no image to validate with: every class has one image, or those for "
            "validation are missing."
        )
    parts = {"Training": train.labels, "Validation": validation.labels}
    counts = {part: class_counts(of_part, classes, label_sets) for part, of_part in parts.items()}
    each = "" if label_sets is None else ", several or none to an image"
    told = [
        f"{count_text(part, len(of_part), counts[part], classes, each)}."
        for part, of_part in parts.items()
    ]
    unseen = np.flatnonzero(counts["Training"] == 0)
    if len(unseen):
        names = ", ".join(classes[label] for label in unseen[:8])
        told.append(f"Without an image to train on: {counted(len(unseen), 'class')} ({names}).")
    without = np.flatnonzero((counts["Training"] > 0) & (counts["Validation"] == 0))
    if len(without):
        names = ", ".join(classes[label] for label in without[:8])
        told.append(
            f"Without an image for validation: {counted(len(without), 'class')} ({names}"
            f"{', …' if len(without) > 8 else ''}). Its accuracy says nothing of them."
        )
    size, reading = config.size, reading_of(config)
    return Dataset(
        name=config.data,
        classes=tuple(classes),
        train=FileImages(train, size, seed, Augment(config, mean=IMAGENET_MEAN), reading),
        validation=FileImages(validation, size, seed, reading=reading),
        shape=(3, size, size),
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        in_memory=False,
        messages=(*told, *messages),
        contents=contents_of(classes, train, validation, label_sets),
        label_sets=label_sets,
    )
