"""Checkpoints: written aside, made durable, read back, renamed into place; the newest good one is
read.

A file `step-N.pt` is what `torch.save` writes: a zip archive, each of whose records carries a
CRC-32. torch itself does not look at those when it loads, so that a flipped bit becomes a weight;
here they are checked at each save and load.
"""

import errno
import os
import pickle
import shutil
import zipfile
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from amptrain.errors import CheckpointError

__all__ = ["CheckpointError", "CheckpointStore", "Loaded"]

FORMAT = "amptrain checkpoint 1"
NEEDED = {"format", "step", "model", "optimizer", "scaler", "progress", "rng", "config"}


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A checkpoint that was read."""

    state: dict[str, Any]
    step: int
    path: Path
    messages: list[str] = field(default_factory=list)
    """Sentences for the person reading: files that were damaged and passed over."""


class CheckpointStore:
    """The checkpoints of one run. One process at a time uses it (lock.py sees to that)."""

    def __init__(
        self, directory: Path, keep: int = 2, needed: Collection[str] = frozenset(NEEDED)
    ) -> None:
        """`needed` are the keys without which a file is not used; a loop of one's own gives its
        own."""
        self.directory = directory
        self.keep = keep
        self.needed = frozenset(needed)

    def save(self, state: Mapping[str, object], step: int) -> Path:
        """Write `state`, which holds tensors and plain types only; then remove all but the newest
        `keep`.

        Raises CheckpointError if it could not be written; the checkpoints from before are then as
        they were.
        """
        path = self.directory / f"step-{step:09d}.pt"
        aside = path.with_suffix(".tmp")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._remove_half_written()
            write(aside, {"format": FORMAT, "step": step, **state})
            problem = damage(aside)
            if problem is not None:
                raise OSError(f"what was written reads back {problem}")
            aside.replace(path)
            sync_directory(self.directory)
            for old in self._paths()[: -self.keep]:
                old.unlink()
        except OSError as error:
            self._remove_half_written()
            raise CheckpointError(
                f"The checkpoint {path} could not be written: {error.strerror or error}. The "
                "checkpoints from before "
                "are untouched. Make room on that disk, or let it be written to."
            ) from error
        return path

    def mark_best(self, step: int) -> None:
        """Keep the checkpoint of `step` as best.pt too, however many come after it.

        A link, which takes no room; a copy where the file system has none.
        """
        path, aside = self.directory / f"step-{step:09d}.pt", self.directory / "best.tmp"
        aside.unlink(missing_ok=True)
        try:
            os.link(path, aside)
        except OSError:
            shutil.copyfile(path, aside)
        aside.replace(self.directory / "best.pt")
        sync_directory(self.directory)

    def load_latest(self) -> Loaded | None:
        """The newest good checkpoint, or None if none was ever written.

        A file that cannot be used is renamed to `*.unusable`, so that it is not in the way and not
        lost.
        Raises CheckpointError if there are checkpoints and none can be used, or if one may not be
        read: to start from nothing, or from further back, would throw training away.
        """
        self._remove_half_written()
        passed_over: list[str] = []
        for path in reversed(self._paths()):
            try:
                state = read(path, self.needed)
            except PermissionError as error:
                raise CheckpointError(
                    f"The checkpoint {path} may not be read by uid {os.getuid()}; it is of uid "
                    f"{path.stat().st_uid}. "
                    "Run as its owner, or change the file's owner or mode."
                ) from error
            except Unusable as error:
                passed_over.append(f"The checkpoint {path} {error}, and is not used.")
                continue
            for unusable in self._paths()[self._paths().index(path) + 1 :]:
                unusable.replace(unusable.with_suffix(".unusable"))
            return Loaded(state=state, step=state["step"], path=path, messages=passed_over)
        if passed_over:
            raise CheckpointError(
                f"{' '.join(passed_over)} No other is left in {self.directory}. Put a copy there, "
                "or start anew with "
                "another --name."
            )
        return None

    def _paths(self) -> list[Path]:
        """The checkpoints, oldest first."""
        return sorted(self.directory.glob("step-*.pt"))

    def _remove_half_written(self) -> None:
        """What a kill in the middle of a save left, which would fill the disk in time."""
        for path in self.directory.glob("step-*.tmp"):
            path.unlink(missing_ok=True)


class Unusable(Exception):
    """A file is no checkpoint; the text continues a sentence that begins with its path."""


def write(path: Path, content: dict[str, object]) -> None:
    """`torch.save`, made durable. Raises OSError."""
    with path.open("wb") as file:
        try:
            torch.save(content, file)
        except (
            RuntimeError
        ) as error:  # torch tells a failed write as "PytorchStreamWriter failed writing file"
            cause = error.__context__
            raise (
                cause if isinstance(cause, OSError) else OSError(str(error).splitlines()[0])
            ) from error
        file.flush()
        os.fsync(file.fileno())


def read(path: Path, needed: Collection[str] = frozenset(NEEDED)) -> dict[str, Any]:
    """What `write` wrote. Raises Unusable, or PermissionError."""
    problem = damage(path)
    if problem is not None:
        raise Unusable(problem)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise Unusable("holds something other than tensors and plain types") from error
    except (RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
        raise Unusable(f"cannot be read ({str(error).splitlines()[0]})") from error
    if (
        not isinstance(content, dict)
        or not isinstance(content.get("step"), int)
        or content.get("format") != FORMAT
        or not content.keys() >= set(needed)
    ):
        raise Unusable("was not written by this version of amptrain")
    return content


def damage(path: Path) -> str | None:
    """What is wrong with the file: it is empty, cut short, or some record is not what its CRC-32
    says."""
    try:
        if path.stat().st_size == 0:
            return "is empty"
        with zipfile.ZipFile(path) as archive:
            record = archive.testzip()
    except PermissionError:
        raise
    except zipfile.BadZipFile:
        return "is damaged or cut short"
    except (OSError, zlib.error, NotImplementedError, RuntimeError, EOFError, ValueError) as error:
        return f"is damaged ({error})"
    return None if record is None else f"is damaged (in {record})"


def sync_directory(directory: Path) -> None:
    """Make a rename durable: it is the directory that changes by it, not the file."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network disks cannot sync a directory; the file itself is synced and in its place
        # (borgbackup/borg#1287).
        if error.errno not in {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}:
            raise
    finally:
        os.close(descriptor)
