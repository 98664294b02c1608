"""From a file to an RGB image, whatever a camera, a scanner or an editor wrote.

What is done in silence, and why, stands in docs/data.md.
"""

import errno
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from PIL import Image

from amptrain.data.transforms import Box

READ_ERRORS = (OSError, ValueError, SyntaxError, TypeError, Image.DecompressionBombError)
"""What Pillow raises for a file that is broken."""
PASSING = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EREMOTEIO, errno.EHOSTDOWN}
"""What a network disk answers for a moment (microsoft/pai#5730)."""
WAITS = (0.2, 1.0, 5.0)
"""Seconds before each further try."""
T = TypeVar("T")
ORIENTATION = 0x0112
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What makes an image of each EXIF orientation upright."""
KEEP = 2.0
"""A JPEG is decoded at reduced size as long as the part that is used has this many times the pixels
per side that are needed; the same as Pillow's own thumbnail()."""


@dataclass(frozen=True)
class Reading:
    """How image files are read, where people differ."""

    exif_orientation: bool = True
    """Whether a photo is turned as its EXIF data say."""
    background: str = "white"
    """What shows through where an image is transparent: a colour as Pillow's ImageColor names
    it."""
    white_level: float | None = None
    """The value that is white in images of more than 8 bits; None goes by the type and the largest
    value."""


warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
"""Twice the size, where Pillow raises, counts as broken."""


def retried(read: Callable[[], T]) -> T:
    """`read()`; where the disk gives an error that may pass, again, for some 6 s in all."""
    for wait in WAITS:
        try:
            return read()
        except OSError as error:
            if error.errno not in PASSING:
                raise
        time.sleep(wait)
    return read()


def upright_size(file: Image.Image, reading: Reading) -> tuple[int, int]:
    """(width, height) of the image as it is to be looked at."""
    width, height = file.size
    return (height, width) if _orientation(file, reading) >= 5 else (width, height)


def _orientation(file: Image.Image, reading: Reading) -> int:
    if file.format == "TIFF" or not reading.exif_orientation:
        return 1  # Pillow turns a TIFF while it loads
    try:
        value = file.getexif().get(ORIENTATION, 1)
    except Exception:  # EXIF is free text to many programs; Pillow raises a dozen kinds
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def crop_resize(file: Image.Image, box: Box, size: int, reading: Reading) -> Image.Image:
    """The part `box` of an opened image as an upright RGB square of `size` pixels.

    A pure function of its arguments. A large JPEG is decoded at 1/2, 1/4 or 1/8 of its
    size where that is enough: two to four times as fast (roboflow/rf-detr#1389).
    """
    upright, orientation = upright_size(file, reading), _orientation(file, reading)
    spare = min(box[2] - box[0], box[3] - box[1]) / (size * KEEP)
    if file.format in {"JPEG", "MPO"} and spare >= 2:
        file.draft(None, (int(file.width / spare), int(file.height / spare)))
    image = to_rgb(file, reading)
    if orientation > 1:
        image = image.transpose(TURNS[orientation])
    across, down = image.width / upright[0], image.height / upright[1]
    scaled = (box[0] * across, box[1] * down, box[2] * across, box[3] * down)
    return image.resize((size, size), Image.Resampling.BILINEAR, box=scaled)


def to_rgb(image: Image.Image, reading: Reading) -> Image.Image:
    """8-bit RGB: 16-bit and float scaled, transparency on the background, of an animation the first
    frame."""
    mode = image.mode
    if mode.startswith("I") or mode == "F":
        values = np.asarray(image)
        if reading.white_level is not None:
            levels = _to_white(values, reading.white_level)
        else:
            levels = _from_floats(values) if mode == "F" else _from_integers(values)
        return Image.fromarray(levels).convert("RGB")
    if mode in {"RGBA", "LA", "PA", "RGBa", "La"} or "transparency" in image.info:
        seen = image.convert("RGBA")
        behind = Image.new("RGBA", seen.size, reading.background)
        return Image.alpha_composite(behind, seen).convert("RGB")
    return image.convert("RGB")


def _to_white(values: np.ndarray, white_level: float) -> np.ndarray:
    """0 to `white_level` as black to white."""
    finite = np.nan_to_num(values.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    return np.clip(np.round(finite * (255 / white_level)), 0, 255).astype(np.uint8)


def _from_integers(values: np.ndarray) -> np.ndarray:
    """The upper 8 of 16 bits, where Pillow clips to white all but the lowest 256 levels
    (pytorch/vision#2218). More than 16 bits are scaled by the largest value."""
    values = np.clip(values, 0, None).astype(np.int64)
    largest = int(values.max(initial=0))
    if largest > 65535:
        return (values * 255 // largest).astype(np.uint8)
    return (values >> 8).astype(np.uint8)


def _from_floats(values: np.ndarray) -> np.ndarray:
    """0 to 1 as black to white; with a value above 1 it is 0 to 255, above 255 it is 16 bits."""
    largest = float(np.max(values, initial=0.0, where=np.isfinite(values)))
    levels = (1.0, 255.0, 65535.0)
    return _to_white(values, next((level for level in levels if largest <= level), largest))


def broken_text(path: str, error: Exception) -> str:
    """`path: reason`, with no other ": " in the reason."""
    if isinstance(error, OSError) and error.errno is not None:
        return f"{path}: {os.strerror(error.errno)}"
    reason = str(error).replace(": ", ", ").replace("\n", " ") or type(error).__name__
    return f"{path}: {reason}"
