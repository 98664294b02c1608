"""The data sets: each opens as a `Task`, whose images are read by (epoch, index)."""

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from amptrain.config import DataConfig
from amptrain.data.transforms import (
    Pixels,
    center_crop,
    flip,
    random_resized_crop,
    sample_rng,
    shift,
)
from amptrain.errors import ConfigError

DIGITS = Path(__file__).parent / "datafiles" / "digits.npz"
DIGITS_TEST = 360
"""Size of the test set of digits: the images whose index times 7919 (a prime) modulo their number
is below it."""
VALIDATION = -1
"""The epoch of images that are to be read as they are."""
IMAGE_ENDINGS = {".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"}

Key = tuple[int, int]
"""(epoch, index). The epoch travels with the index: what is set on a data set later never reaches
its workers."""


class Sample(NamedTuple):
    """One image."""

    image: Tensor
    """uint8, (channels, height, width): a quarter of the bytes of FP32 on the way to the device."""
    label: int
    broken: tuple[str, ...] = ()
    """A sentence for each image that could not be read."""


class Images(Dataset[Sample]):
    """Images that are read by (epoch, index); `index` is from 0 to len() - 1."""

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, key: Key) -> Sample:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Task:
    """What there is to learn."""

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


class ArrayImages(Images):
    """Images held in memory."""

    def __init__(
        self, images: Pixels, labels: NDArray[np.integer], seed: int, most_shift: int, flips: bool
    ) -> None:
        self.images, self.labels = images, labels
        self.seed, self.most_shift, self.flips = seed, most_shift, flips

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: Key) -> Sample:
        epoch, index = key
        image = self.images[index]
        if epoch != VALIDATION and self.most_shift:
            rng = sample_rng(self.seed, epoch, index)
            image = shift(image, self.most_shift, rng)
            image = flip(image, rng) if self.flips else image
        return Sample(torch.from_numpy(np.ascontiguousarray(image)), int(self.labels[index]))


class FolderImages(Images):
    """Images in one folder for each class, read as RGB squares of `size` pixels."""

    def __init__(
        self, folder: Path, classes: tuple[str, ...], size: int, seed: int, augment: bool
    ) -> None:
        self.size, self.seed, self.augment = size, seed, augment
        self.files: list[tuple[Path, int]] = []
        for label, name in enumerate(classes):
            files = sorted(
                path for path in (folder / name).rglob("*") if path.suffix.lower() in IMAGE_ENDINGS
            )
            if not files:
                raise ConfigError(
                    f"The class {folder / name} has no image; it needs at least one file that ends in "
                    f"{', '.join(sorted(IMAGE_ENDINGS))}. Add images or remove the folder."
                )
            self.files += [(path, label) for path in files]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, key: Key) -> Sample:
        """The image at `index`; for a broken one in training, the next that can be read, so that a
        step stays whole."""
        epoch, index = key
        broken: list[str] = []
        while True:
            path, label = self.files[index]
            try:
                return Sample(self._read(path, epoch, index), label, tuple(broken))
            except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
                broken.append(f"{path}: {error}")
            index = (index + 1) % len(self)
            if epoch == VALIDATION or len(broken) == len(self):
                return Sample(
                    torch.zeros(0, self.size, self.size, dtype=torch.uint8), -1, tuple(broken)
                )

    def _read(self, path: Path, epoch: int, index: int) -> Tensor:
        with Image.open(path) as file:
            image = file.convert("RGB")
        if epoch == VALIDATION or not self.augment:
            image, pixels = center_crop(image, self.size), None
        else:
            rng = sample_rng(self.seed, epoch, index)
            image = random_resized_crop(image, self.size, rng)
            pixels = flip(np.asarray(image).transpose(2, 0, 1), rng)
        pixels = np.asarray(image).transpose(2, 0, 1) if pixels is None else pixels
        return torch.from_numpy(np.ascontiguousarray(pixels))


class FakeImages(Images):
    """Only a length: the loader makes such images on the device."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length


def open_task(config: DataConfig, seed: int) -> Task:
    """The data set that `config` names. Raises ConfigError with the path that is missing or
    wrong."""
    kind, _, rest = config.data.partition(":")
    match kind:
        case "digits":
            return _digits(config, seed)
        case "cifar10":
            return _cifar10(config, seed)
        case "imagefolder":
            return _imagefolder(Path(rest), config, seed)
        case _:
            size = config.image_size
            return Task(
                name=config.data,
                classes=tuple(str(label) for label in range(1000)),
                train=FakeImages(int(rest)),
                validation=FakeImages(max(1, int(rest) // 10)),
                shape=(3, size, size),
                mean=(127.5,) * 3,
                std=(64.0,) * 3,
                in_memory=True,
            )


def _digits(config: DataConfig, seed: int) -> Task:
    with np.load(DIGITS) as arrays:
        images, labels = arrays["images"], arrays["labels"]
    test = np.arange(len(images)) * 7919 % len(images) < DIGITS_TEST
    return Task(
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


def _cifar10(config: DataConfig, seed: int) -> Task:
    folder = config.data_dir / "cifar-10-batches-py"

    def read(name: str) -> tuple[Pixels, list[int]]:
        try:
            with (folder / name).open("rb") as file:
                content = _PlainUnpickler(file, encoding="latin1").load()
            return np.asarray(content["data"], dtype=np.uint8).reshape(-1, 3, 32, 32), list(
                content["labels"]
            )
        except FileNotFoundError:
            raise ConfigError(
                f"{folder / name} is missing; cifar10 needs the folder cifar-10-batches-py with the Python version of "
                "CIFAR-10 in --data-dir. torchvision.datasets.CIFAR10(root, download=True) makes it."
            ) from None
        except (
            OSError,
            pickle.UnpicklingError,
            EOFError,
            KeyError,
            TypeError,
            ValueError,
        ) as error:
            raise ConfigError(
                f"{folder / name} is not a file of CIFAR-10: {error}. Fetch it again."
            ) from None

    parts = [read(f"data_batch_{number}") for number in range(1, 6)]
    test_images, test_labels = read("test_batch")
    images = np.concatenate([part[0] for part in parts])
    labels = np.array([label for part in parts for label in part[1]])
    return Task(
        name="cifar10",
        classes=(
            "airplane",
            "automobile",
            "bird",
            "cat",
            "deer",
            "dog",
            "frog",
            "horse",
            "ship",
            "truck",
        ),
        train=ArrayImages(images, labels, seed, 4 * config.augment, flips=True),
        validation=ArrayImages(test_images, np.array(test_labels), seed, 0, flips=False),
        shape=(3, 32, 32),
        mean=(125.3, 123.0, 113.9),
        std=(63.0, 62.1, 66.7),
        in_memory=False,
        crop=1.0,
    )


class _PlainUnpickler(pickle.Unpickler):
    """Reads what CIFAR-10's files hold, arrays and plain types, and runs nothing else."""

    def find_class(self, module: str, name: str) -> object:
        array_parts = {"_reconstruct", "scalar", "ndarray", "dtype"}
        if (module.partition(".")[0] == "numpy" and name in array_parts) or (module, name) == (
            "_codecs",
            "encode",
        ):
            return super().find_class(module.replace("numpy.core", "numpy._core"), name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no file of CIFAR-10 does")


def _imagefolder(root: Path, config: DataConfig, seed: int) -> Task:
    classes: dict[str, tuple[str, ...]] = {}
    for part in ("train", "val"):
        folder = root / part
        if not folder.is_dir():
            raise ConfigError(
                f"The folder {folder} is missing; imagefolder needs train/CLASS/ and val/CLASS/ in {root}."
            )
        classes[part] = tuple(sorted(path.name for path in folder.iterdir() if path.is_dir()))
    only = sorted(set(classes["train"]) ^ set(classes["val"]))
    if only or not classes["train"]:
        what = f"have different classes: {', '.join(only)}" if only else "have no class folders"
        raise ConfigError(
            f"{root / 'train'} and {root / 'val'} {what}. Each class needs one folder in both."
        )
    names, size = classes["train"], config.image_size
    return Task(
        name=config.data,
        classes=names,
        train=FolderImages(root / "train", names, size, seed, config.augment),
        validation=FolderImages(root / "val", names, size, seed, augment=False),
        shape=(3, size, size),
        mean=(123.675, 116.28, 103.53),
        std=(58.395, 57.12, 57.375),
        in_memory=False,
    )
