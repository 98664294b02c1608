"""What is mounted in this container, and which mount is the workspace."""

import os
import re
from collections.abc import Iterable
from pathlib import Path

from entrypoints.paths import WORKSPACE


def mounts(table: Path = Path("/proc/self/mountinfo")) -> dict[Path, str]:
    """Mount points of this container, each with the folder that is mounted there."""
    fields = (line.split() for line in table.read_text().splitlines())
    return {Path(_unescaped(field[4])): _unescaped(field[3]) for field in fields}


def is_own_tmpfs(folder: Path, table: Path = Path("/proc/self/mountinfo")) -> bool:
    """Whether what is mounted there is a tmpfs, and not a folder of one (`-v /dev/shm/x:…`)."""
    kind = ""
    for line in table.read_text().splitlines():
        mount, _, source = line.partition(" - ")
        root, point = mount.split()[3:5]
        if Path(_unescaped(point)) == folder:  # the last is on top
            kind = f"{source.split()[0]} {root}"
    return kind == "tmpfs /"


def _unescaped(text: str) -> str:
    """proc(5) writes a blank as \\040."""
    return re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), text)


def mounted_workspace(points: Iterable[Path], workspace: Path = WORKSPACE) -> Path | None:
    """The mount whose owner counts: /workspace, else one below it (/workspace/code, say).

    Of several below it, one that can be written to and is not root's: people often mount data
    read-only beside their code.
    """
    below = [point for point in points if point == workspace or workspace in point.parents]
    return min(
        below,
        key=lambda p: (p != workspace, is_read_only(p), p.stat().st_uid == 0, p),
        default=None,
    )


def is_read_only(folder: Path) -> bool:
    """Whether the file system of a folder is mounted read-only."""
    return bool(os.statvfs(folder).f_flag & os.ST_RDONLY)


def is_volume(source: str) -> bool:
    """Whether the folder mounted (as in `mounts`) is a volume of the engine, not a host folder."""
    return bool(re.search(r"/volumes/[^/]+/_data$", source))
