"""Writing files that are whole or not there, and giving a stream up."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


def atomic_write(path: Path, content: str | bytes) -> None:
    """Write `content` (text as UTF-8) beside `path`, then put it in its place: a kill in between
    leaves the old file. Raises OSError, which names `path`."""
    aside = path.with_name(f"{path.name}.tmp")
    with named(path):
        aside.write_bytes(content.encode() if isinstance(content, str) else content)
        aside.replace(path)


def write_text(path: Path, text: str) -> None:
    """`text` as UTF-8, with the bytes of file names of any encoding. Raises OSError, which names
    `path`."""
    with named(path):
        path.write_text(text, encoding="utf-8", errors="surrogateescape")


@contextmanager
def named(path: Path) -> Iterator[None]:
    """An OSError from within names `path`: one of a write or a flush (a full disk, EINVAL of a
    network's) names no file at all."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def discard(stream: TextIO) -> None:
    """Send what is still printed to `stream` nowhere: Python flushes it once more at its end, and a
    failure there would be the exit code."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
