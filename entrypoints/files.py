"""Writing files and giving them to the user."""

import os
from pathlib import Path

from entrypoints.errors import EntrypointError


def write_file(
    path: Path, text: str, mode: int = 0o600, owner: tuple[int, int] | None = None
) -> Path:
    """Write a file that a reader finds whole or not at all, and never open for more than `mode`.

    It is written aside and renamed; a link is followed first. `owner` (uid, gid) counts for root.

    Raises:
        OSError: the folder can't be written to.
        EntrypointError: root may not give the file to its owner.
    """
    path = path.resolve()
    aside = path.with_name(f".{path.name}.new")
    try:
        _write_aside(aside, text, mode)
    except OSError as error:  # of a full disk or a limit, which the kernel tells without a name
        raise OSError(error.errno, error.strerror, str(path)) from error
    if owner is not None and os.getuid() == 0:
        give(aside, *owner, name=path)
    aside.replace(path)
    return path


def _write_aside(aside: Path, text: str, mode: int) -> None:
    aside.unlink(missing_ok=True)
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="surrogateescape") as file:
        os.fchmod(descriptor, mode)  # whatever the umask
        file.write(text)


def give(path: Path, uid: int, gid: int, name: Path | None = None) -> None:
    """Give one file or folder to the user; an error calls it `name`.

    Raises:
        EntrypointError: root may not do that here (CHOWN was dropped).
    """
    try:
        os.chown(path, uid, gid, follow_symlinks=False)
    except OSError as error:
        raise EntrypointError(
            f"Started as root, but root may not give {name or path} to uid {uid} here "
            f"({error.strerror}). Allow it with --cap-add CHOWN, or start with --user."
        ) from error
