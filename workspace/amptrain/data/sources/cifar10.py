"""CIFAR-10, from the files that torchvision writes."""

import pickle

import numpy as np

from amptrain.config import DataConfig
from amptrain.data.augment import Augment
from amptrain.data.datasets import ArrayImages, Dataset
from amptrain.data.transforms import Pixels
from amptrain.errors import ConfigError

MEAN = (125.3, 123.0, 113.9)
USAGE = "cifar10"


def open(argument: str, config: DataConfig, seed: int) -> Dataset:
    """`argument` is empty. Raises ConfigError for a file that is missing or damaged."""
    folder = config.data_dir.expanduser() / "cifar-10-batches-py"

    def read(name: str) -> tuple[Pixels, list[int]]:
        try:
            with (folder / name).open("rb") as file:
                content = _PlainUnpickler(file, encoding="latin1").load()
            return np.asarray(content["data"], dtype=np.uint8).reshape(-1, 3, 32, 32), list(
                content["labels"]
            )
        except FileNotFoundError:
            raise ConfigError(
                f"{folder / name} is missing; cifar10 needs the folder cifar-10-batches-py with "
                "the Python version of "
                "CIFAR-10 in --data-dir. torchvision.datasets.CIFAR10(root, download=True) makes "
                "it."
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
    augment = Augment(config, mean=MEAN)
    return Dataset(
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
        train=ArrayImages(images, labels, seed, augment, max_shift=4, flips=True),
        validation=ArrayImages(test_images, np.array(test_labels), seed),
        shape=(3, 32, 32),
        mean=MEAN,
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
