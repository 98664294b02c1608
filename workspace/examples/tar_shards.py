"""Images in tar shards, as WebDataset writes them, as a data set of one's own.

    SHARDS=/data/shards amptrain train --data tar_shards.py:shards --model resnet18

A shard `train-….tar` or `val-….tar` holds for each image `KEY.jpg` (or another ending) and
`KEY.cls`, the number of its class; `classes.txt` beside the shards has their names, one a line. The
headers are read once, after which every image can be read by its number. So a step is made of the
same images for any number of workers and processes, and a run continues bit for bit, which a stream
of shards with a shuffle buffer does not.
"""

import io
import os
import tarfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image

MOST_OPEN = 128
"""Shards that a process keeps open."""


class Shards:
    """The images of tar files, as (image, class)."""

    def __init__(self, paths: list[Path], classes: list[str]) -> None:
        """Raises ValueError for an image without its class."""
        self.paths, self.classes = [os.fspath(path) for path in paths], classes
        found = [
            (number, start, size, label)
            for number, path in enumerate(paths)
            for start, size, label in images_of(path)
        ]
        # Arrays, as loader workers copy a list piece by piece (pytorch#13246).
        self.places = np.array(found, dtype=np.int64).reshape(-1, 4)
        self.targets = self.places[:, 3]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        number, start, size, label = self.places[index].tolist()
        # Handles of its own in each process, and a read that moves no position: loader workers,
        # ranks and threads do not disturb each other.
        descriptor = opened(self.paths[number], os.getpid()).fileno()
        return Image.open(io.BytesIO(os.pread(descriptor, size, start))), label


@lru_cache(MOST_OPEN)
def opened(path: str, process: int) -> io.FileIO:
    """The shard, opened by the process of this id."""
    return io.FileIO(path)


def images_of(shard: Path) -> Iterator[tuple[int, int, int]]:
    """(offset, size in bytes, class) of each image, in the order of the shard."""
    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, int] = {}
    with tarfile.open(shard, "r:") as archive:
        for member in archive:
            folder, slash, name = member.name.rpartition("/")
            key, _, ending = name.partition(".")
            key = f"{folder}{slash}{key}"
            if ending == "cls":
                file = archive.extractfile(member)
                assert file is not None
                labels[key] = int(file.read())
            elif f".{ending}".lower() in Image.registered_extensions():
                images[key] = (member.offset_data, member.size)
    for key, (start, size) in images.items():
        if key not in labels:
            raise ValueError(f"{shard} has the image {key}, and no {key}.cls with its class.")
        yield start, size, labels[key]


def shards() -> tuple[Shards, Shards, list[str]]:
    """What `--data tar_shards.py:shards` takes."""
    folder = Path(os.environ.get("SHARDS", "shards"))
    classes = (folder / "classes.txt").read_text(encoding="utf-8").splitlines()
    train, val = (sorted(folder.glob(f"{part}-*.tar")) for part in ("train", "val"))
    return Shards(train, classes), Shards(val, classes), classes
