# ruff: noqa: PTH116, PTH118, PTH120, PTH122  a Path for each of a million files takes seconds
"""A folder of images as it lies on a disk: which files are data, and what else is there."""

import os
import pwd
import stat
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from PIL import Image

from amptrain.errors import ConfigError
from amptrain.words import counted

NOT_DATA = {"__MACOSX", "@eaDir", "#recycle", "$RECYCLE.BIN", "lost+found", "Thumbs.db"}
"""Names that macOS, NAS boxes, Windows and mkfs leave behind (hako-mikan/sd-webui-traintrain#26).
Names that begin with a dot are no data either: Jupyter's .ipynb_checkpoints (pytorch/vision#2831),
macOS's ._x.jpg."""
PHOTO_ENDINGS = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".webp", ".gif", ".avif", ".heic"),
    *(".heif", ".bmp", ".dib", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".tga"),
)


@cache
def image_endings() -> frozenset[str]:
    """The endings of PHOTO_ENDINGS that Pillow reads here; .heic needs the package pillow-heif."""
    try:
        import pillow_heif  # type: ignore[import-not-found,unused-ignore]

        pillow_heif.register_heif_opener()
    except ImportError:
        pass
    return frozenset(PHOTO_ENDINGS) & frozenset(Image.registered_extensions())


@dataclass
class Seen:
    """What lay beside the images."""

    others: Counter[str] = field(default_factory=Counter)
    """Files of other kinds, by ending."""
    hidden: int = 0
    """Files and folders that are no data by their name."""
    loops: list[str] = field(default_factory=list)
    """Links to a folder that they lie in."""
    dangling: list[str] = field(default_factory=list)
    """Links to nothing."""

    def sentences(self) -> list[str]:
        """What is to be said of it."""
        found = []
        if self.others:
            kinds = ", ".join(f"{count} {ending}" for ending, count in self.others.most_common(8))
            found.append(
                f"Left out: {counted(self.others.total(), 'file')} of other kinds ({kinds})."
            )
        if any(ending in {".heic", ".heif"} for ending in self.others):
            found.append("Pillow reads .heic with the package pillow-heif: pip install pillow-heif")
        if self.hidden:
            found.append(f"Left out, files and folders that are hidden: {self.hidden}.")
        for what, links in (("in a circle", self.loops), ("to nothing", self.dangling)):
            if links:
                found.append(f"Left out: {counted(len(links), 'link')} {what}, such as {links[0]}.")
        return found


def is_hidden(name: str) -> bool:
    """Whether a file or folder of this name is no data."""
    return name.startswith(".") or name in NOT_DATA


def subfolders(folder: Path, seen: Seen | None = None) -> list[str]:
    """Names of the folders in `folder`, sorted as torchvision's ImageFolder does, hidden ones left
    out. Links are followed. Raises ConfigError if it cannot be read."""
    names = []
    for entry in _entries(os.fspath(folder)):
        if is_hidden(entry.name):
            if seen is not None:
                seen.hidden += 1
        elif entry.is_dir():
            names.append(entry.name)
    return sorted(names)


def find_images(
    folder: str, seen: Seen, progress: Callable[[int], None] | None = None
) -> tuple[list[str], list[int]]:
    """Paths relative to `folder`, sorted, and sizes in bytes of the images below it.

    Links are followed, as torchvision and timm do (pytorch-image-models#334). Raises ConfigError
    for a folder that cannot be read: its images would be missing without a word.
    """
    found: list[tuple[str, int]] = []
    endings = image_endings()
    # Each folder with the identities of those it lies in: a link to one of them is a loop.
    waiting = [("", frozenset({_identity(folder)}))]
    while waiting:
        below, above = waiting.pop()
        for entry in _entries(os.path.join(folder, below)):
            path = os.path.join(below, entry.name)
            if is_hidden(entry.name):
                seen.hidden += 1
            elif entry.is_dir():
                own = _identity(entry.path)
                if own in above:
                    seen.loops.append(entry.path)
                else:
                    waiting.append((path, above | {own}))
            elif (ending := os.path.splitext(entry.name)[1].lower()) not in endings:
                seen.others[ending or "without an ending"] += 1
            else:
                try:
                    status = entry.stat()
                except FileNotFoundError:
                    seen.dangling.append(entry.path)
                    continue
                except PermissionError:
                    raise ConfigError(unreadable(os.path.dirname(entry.path))) from None
                found.append((path, status.st_size))
                if progress is not None:
                    progress(1)
    found.sort()
    return [path for path, _ in found], [size for _, size in found]


def holds_image(folder: Path) -> bool:
    """Whether an image lies in `folder` itself."""
    endings = image_endings()
    return any(
        os.path.splitext(entry.name)[1].lower() in endings and not is_hidden(entry.name)
        for entry in _entries(os.fspath(folder))
        if not entry.is_dir()
    )


def unreadable(folder: str) -> str:
    """The sentence about a folder that this user may not read."""
    status = os.stat(folder)
    try:
        user = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        user = "without a name"
    return (
        f"The folder {folder} cannot be read: it has mode {stat.S_IMODE(status.st_mode):03o} and "
        f"belongs to uid {status.st_uid}, gid {status.st_gid}; this is uid {os.geteuid()} ({user})."
        f" Let that user read it (chmod -R a+rX {folder}), or start the container with its uid."
    )


def _identity(folder: str) -> tuple[int, int]:
    status = os.stat(folder)
    return status.st_dev, status.st_ino


def _entries(folder: str) -> list["os.DirEntry[str]"]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except PermissionError:
        raise ConfigError(unreadable(folder.rstrip("/"))) from None
