"""Noise, made on the device: for the speed of everything but loading."""

from amptrain.config import DataConfig
from amptrain.data.datasets import Dataset, FakeImages
from amptrain.errors import ConfigError

USAGE = "fake:N (N images of noise, for speed)"


def check(argument: str) -> None:
    """Raise ConfigError unless it is a number of images."""
    if not (argument.isdecimal() and int(argument) > 0):
        raise ConfigError(f"--data is 'fake:{argument}'; N needs to be a number above 0.")


def open(argument: str, config: DataConfig, seed: int) -> Dataset:
    """`argument` is the number of images."""
    size = config.size
    return Dataset(
        name=config.data,
        classes=tuple(str(label) for label in range(1000)),
        train=FakeImages(int(argument)),
        validation=FakeImages(max(1, int(argument) // 10)),
        shape=(3, size, size),
        mean=(127.5,) * 3,
        std=(64.0,) * 3,
        in_memory=True,
    )
