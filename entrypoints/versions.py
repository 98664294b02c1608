"""Which image this is: what it was built with, as the build wrote it into /opt/versions.env."""

from __future__ import annotations  # host/ reads such files too, on older Pythons than the image's

import shlex
from functools import lru_cache
from pathlib import Path

from entrypoints import paths


def read_versions(file: Path) -> dict[str, str]:
    """The names and values of a file of NAME=value lines, as bash reads them."""
    words = shlex.split(file.read_text(encoding="utf-8"), comments=True)
    return {name: value for name, _, value in (word.partition("=") for word in words)}


@lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """This image's. Names as in requirements/torch-*/versions.env, and LOCKS and REVISION.

    Raises:
        OSError: not in the image, whose build makes the file.
    """
    return read_versions(paths.VERSIONS)


def numbers(version: str) -> tuple[int, ...]:
    """(525, 60, 13) for 525.60.13; what is not a number does not count."""
    return tuple(int(part) for part in version.split(".") if part.isdecimal())
