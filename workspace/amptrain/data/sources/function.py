"""Data of one's own: a function that returns map-style data sets of torch.

    def pets():
        return Pets("train"), Pets("val")          # or with the names: ..., ["cat", "dog"]

Each item is (image, label), or has both by name as those of Hugging Face do: pixel_values or image,
labels or label. A PIL image, or uint8 pixels as an array (height, width, channels) or a
tensor (channels, height, width), is cropped and flipped as files are; a float tensor is taken as it
is, as one's own transforms made it. Whatever draws random numbers in `__getitem__`, from torch,
NumPy or Python, draws those of (seed, epoch, index): a run that continues draws the same.
"""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from amptrain.config import DataConfig
from amptrain.data.augment import Augment
from amptrain.data.datasets import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    VALIDATION,
    Dataset,
    Images,
    Key,
    Sample,
    reading_of,
    square_of,
)
from amptrain.data.decode import Reading
from amptrain.data.transforms import sample_rng
from amptrain.errors import ConfigError
from amptrain.own import call_own
from amptrain.words import counted

IMAGE, LABEL = ("pixel_values", "image", "img"), ("labels", "label", "target")
"""Names of an item's two values, in transformers, datasets and torchvision."""
USAGE = "module:function or file.py:function (returns data sets of your own)"


class OwnImages(Images):
    """The items of a map-style data set, by (epoch, index)."""

    def __init__(
        self, items: Any, size: int, seed: int, reading: Reading, augment: Augment | None = None
    ) -> None:
        self.items, self.size, self.seed, self.augment = items, size, seed, augment
        self.reading = reading
        targets = getattr(items, "targets", None)  # torchvision's word for the labels of all items
        self.labels = None if targets is None else np.asarray(targets, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, key: Key) -> Sample:
        """The item; raises what the data set raises, and ConfigError for what is no image with its
        class."""
        epoch, index = key
        with seeded(self.seed, epoch, index):
            image, label = _pair(self.items[index], index)
        _require_one_image(image, index)
        return Sample(self._tensor(image, epoch, index), _class_number(label, index))

    def _tensor(self, image: Any, epoch: int, index: int) -> Tensor:
        if isinstance(image, Tensor) and image.is_floating_point():
            return image.float()
        if isinstance(image, Tensor):
            image = image.permute(1, 2, 0).numpy()
        if isinstance(image, np.ndarray):
            image = Image.fromarray(image.squeeze())
        rng = sample_rng(self.seed, epoch, index)
        augment = None if epoch == VALIDATION else self.augment
        pixels = square_of(image, self.size, augment, rng, self.reading or Reading())
        return torch.from_numpy(np.ascontiguousarray(pixels))


def _pair(item: Any, index: int) -> tuple[Any, Any]:
    """(image, label) of an item: by name, where it has names that are known, else its first two
    values. Raises ConfigError."""
    named = item._asdict() if hasattr(item, "_asdict") else item  # of a namedtuple
    if isinstance(named, Mapping):
        found = [next((name for name in names if name in named), None) for names in (IMAGE, LABEL)]
        if None not in found:
            return named[found[0]], named[found[1]]
    if isinstance(item, tuple | list) and len(item) >= 2:
        return item[0], item[1]
    what = type(item).__name__
    if isinstance(named, Mapping):
        what += f" with {', '.join(map(str, named))}"
    raise ConfigError(
        f"Item {index} of your data set is a {what}; it needs to be (image, label), or to have "
        f"both by name: {' or '.join(IMAGE)}, {' or '.join(LABEL)}."
    )


def _require_one_image(image: Any, index: int) -> None:
    """Raise ConfigError for what is not one image."""
    if isinstance(image, Image.Image):
        return
    if not isinstance(image, Tensor | np.ndarray):
        what, fits = type(image).__name__, False
    elif isinstance(image, Tensor) and image.is_floating_point():
        what, fits = f"float tensor of shape {tuple(image.shape)}", image.ndim == 3
    else:
        what = f"{image.dtype} {type(image).__name__} of shape {tuple(image.shape)}"
        fits = str(image.dtype).endswith("uint8") and image.ndim in {2, 3}
    if not fits:
        raise ConfigError(
            f"Item {index} of your data set has a {what} as its image; it needs one image: a PIL "
            "image, uint8 pixels as an array (height, width, channels) or a tensor (channels, "
            "height, width), or a float tensor (channels, height, width)."
        )


def _class_number(label: Any, index: int) -> int:
    """`label` as an int. Raises ConfigError for what is no single number."""
    try:
        return int(label)
    except (TypeError, ValueError, RuntimeError):  # of a list, a text, a tensor of several
        raise ConfigError(
            f"Item {index} of your data set has the label {label!r}; it needs to be the number of "
            "its class; of a one-hot label that is label.argmax(). For several labels an image use "
            "--data table:FILE."
        ) from None


@contextmanager
def seeded(seed: int, epoch: int, index: int) -> Iterator[None]:
    """The global generators as a function of (seed, epoch, index), and afterwards as before."""
    words = sample_rng(seed, epoch, index).integers(0, 2**32, 3)
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    numpy_state = np.random.get_state()
    torch.default_generator.manual_seed(int(words[0]))
    random.seed(int(words[1]))
    np.random.seed(int(words[2]))
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def open(argument: str, config: DataConfig, seed: int) -> Dataset:
    """`argument` is module:function or file.py:function. Raises ConfigError with what the function
    lacks."""
    made = call_own(argument, "--data")
    if isinstance(made, Dataset):
        return made
    if not isinstance(made, tuple) or len(made) not in {2, 3}:
        raise ConfigError(
            f"{argument} returned {type(made).__name__}; it needs to return (training, validation)"
            " or (training, validation, names of the classes)."
        )
    train, validation = made[:2]
    for part in (train, validation):
        if not (hasattr(part, "__len__") and hasattr(part, "__getitem__")) or len(part) == 0:
            raise ConfigError(
                f"{argument} returned a {type(part).__name__} without len() and [index], or an "
                "empty one; the order of a step needs both."
            )
    classes = made[2] if len(made) == 3 else getattr(train, "classes", None)
    if classes is None:
        raise ConfigError(
            f"{argument} does not say which classes there are: return their names as a third value,"
            " or give the data set an attribute `classes`."
        )
    size, reading = config.size, reading_of(config)
    images = OwnImages(train, size, seed, reading, Augment(config, mean=IMAGENET_MEAN))
    first = images[(VALIDATION, 0)].image
    own = first.is_floating_point()
    if own:
        images.augment = images.reading = None
    channels = first.shape[0]
    names = [str(name) for name in classes]
    return Dataset(
        name=config.data,
        classes=tuple(names),
        train=images,
        validation=OwnImages(validation, size, seed, reading),
        shape=(channels, first.shape[1], first.shape[2]),
        mean=(0.0,) * channels if own else IMAGENET_MEAN,
        std=(1.0,) * channels if own else IMAGENET_STD,
        in_memory=False,
        messages=(
            f"{argument}: {counted(len(train), 'image')} to train on, {len(validation)} to "
            f"validate with, {counted(len(names), 'class')}.",
        ),
        contents={
            "classes": names,
            "train": {"all": [len(train), "", ""]},
            "validation": {"all": [len(validation), "", ""]},
        },
    )
