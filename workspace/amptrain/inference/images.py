"""Image files as a model sees them: read, cut and scaled as in validation."""

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from amptrain.data.decode import READ_ERRORS, crop_resize, upright_size
from amptrain.data.scan import image_endings, is_hidden
from amptrain.data.transforms import center_box
from amptrain.errors import ConfigError
from amptrain.inference.model_file import ModelInfo

UNREADABLE = READ_ERRORS


def check_places(places: Iterable[str]) -> None:
    """Raises ConfigError for a place on the command line that is not there."""
    for place in places:
        if place != "-" and not Path(place).expanduser().exists():
            raise ConfigError(f"There is no file and no folder {place}.")


def files_of(places: Iterable[str]) -> Iterator[Path]:
    """The image files that `places` mean: files, folders with all that is below, `-` for a list on
    stdin, one path a line. What is not there, and a folder without images, come as they are:
    read_image tells."""
    for place in places:
        if place == "-":
            yield from files_of(line for line in map(str.rstrip, sys.stdin) if line)
            continue
        path = Path(place).expanduser()
        yield from (path.is_dir() and _below(path)) or [path]


def _below(folder: Path) -> list[Path]:
    """Images below a folder, links followed, hidden ones left out; a folder once."""
    found, seen = [], set()
    for place, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        folders[:] = sorted(name for name in folders if not is_hidden(name) and real not in seen)
        if real not in seen:
            found += [
                Path(place, name)
                for name in sorted(names)
                if not is_hidden(name) and Path(name).suffix.lower() in image_endings()
            ]
        seen.add(real)
    return found


def read_image(path: Path, info: ModelInfo) -> Tensor:
    """The image as float32, (channels, height, width), normalised.

    Raises what is in UNREADABLE.
    """
    if not path.exists():
        raise FileNotFoundError("there is no such file")
    if path.is_dir():
        raise IsADirectoryError("there is no image in this folder")
    with Image.open(path) as file:
        box = center_box(*upright_size(file, info.reading), zoom=1 / info.crop)
        image = crop_resize(file, box, info.shape[1], info.reading)
    if info.shape[0] == 1:
        image = image.convert("L")
    pixels = np.atleast_3d(np.asarray(image)).transpose(2, 0, 1)
    return normalised(torch.from_numpy(np.ascontiguousarray(pixels)).float(), info)


def normalised(pixels: Tensor, info: ModelInfo) -> Tensor:
    """Pixels of 0 to 255 as the model takes them."""
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (info.mean, info.std))
    return (pixels * (info.pixel_max / 255) - mean) / std
