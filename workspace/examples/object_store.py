"""Images in tar shards in an object store (S3, Google Cloud Storage, HTTP), by fsspec.

    pip install s3fs
    python object_store.py s3://bucket/shards            # once: writes index.json beside the shards
    SHARDS=s3://bucket/shards amptrain train --data object_store.py:shards --model resnet18

The shards are those of tar_shards.py. The index says where in its shard each image lies, so that an
image is one request for a range of bytes, and a run starts with one request in place of one for
each header. A step is made of the same images for any number of workers and processes, and a run
continues bit for bit. `SHARDS` is any URL of fsspec, a folder too; credentials and the address
(`AWS_ENDPOINT_URL`) are taken from where the store's own library looks for them.
"""

import io
import json
import os
import sys
import tarfile
from functools import lru_cache
from typing import Any

import fsspec  # type: ignore[import-untyped]
import numpy as np
from PIL import Image


@lru_cache(1)
def store(url: str, process: int) -> tuple[Any, str]:
    """The file system of `url` and the path there, opened by the process of this id: connections
    are not shared with a parent."""
    files, path = fsspec.core.url_to_fs(url)
    return files, path


class Shards:
    """The images of one part, as (image, class)."""

    def __init__(self, url: str, index: dict[str, list[list[int]]]) -> None:
        """`index` has (offset, size in bytes, class) of each image, by the name of its shard."""
        self.url, self.names = url, sorted(index)
        # Arrays, as loader workers copy a list piece by piece (pytorch#13246).
        self.places = np.array(
            [(number, *place) for number, name in enumerate(self.names) for place in index[name]],
            dtype=np.int64,
        ).reshape(-1, 4)
        self.targets = self.places[:, 3]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        number, start, size, label = self.places[index].tolist()
        return Image.open(io.BytesIO(self._read(self.names[number], start, size))), label

    def _read(self, name: str, start: int, size: int) -> bytes:
        """Raises OSError where the store does not give all of it. Failed requests s3fs repeats by
        itself."""
        files, folder = store(self.url, os.getpid())
        data: bytes = files.cat_file(f"{folder}/{name}", start=start, end=start + size)
        if len(data) != size:
            raise OSError(
                f"{self.url}/{name} gave {len(data)} bytes from {start} on in place of {size}. If "
                "the shards changed, write index.json anew."
            )
        return data


def places_in(file: Any, name: str) -> list[list[int]]:
    """(offset, size in bytes, class) of each image of an open shard. Raises ValueError for an image
    without its class."""
    images: dict[str, list[int]] = {}
    labels: dict[str, int] = {}
    with tarfile.open(fileobj=file, mode="r:") as archive:
        for member in archive:
            folder, slash, rest = member.name.rpartition("/")
            key, _, ending = rest.partition(".")
            key = f"{folder}{slash}{key}"
            if ending == "cls":
                content = archive.extractfile(member)
                assert content is not None
                labels[key] = int(content.read())
            elif f".{ending}".lower() in Image.registered_extensions():
                images[key] = [member.offset_data, member.size]
    for key in images:
        if key not in labels:
            raise ValueError(f"{name} has the image {key}, and no {key}.cls with its class.")
    return [[*place, labels[key]] for key, place in images.items()]


def write_index(url: str) -> None:
    """Read all headers, and write `index.json` beside the shards."""
    files, folder = store(url, os.getpid())
    index: dict[str, dict[str, list[list[int]]]] = {}
    for part in ("train", "val"):
        index[part] = {}
        for path in sorted(files.glob(f"{folder}/{part}-*.tar")):
            name = path.rpartition("/")[2]
            with files.open(path, "rb") as file:
                index[part][name] = places_in(file, name)
    files.pipe_file(f"{folder}/index.json", json.dumps(index).encode())


def shards() -> tuple[Shards, Shards, list[str]]:
    """What `--data object_store.py:shards` takes."""
    url = os.environ["SHARDS"]
    files, folder = store(url, os.getpid())
    index = json.loads(files.cat_file(f"{folder}/index.json"))
    classes = files.cat_file(f"{folder}/classes.txt").decode().splitlines()
    return Shards(url, index["train"]), Shards(url, index["val"]), classes


if __name__ == "__main__":
    write_index(sys.argv[1])
