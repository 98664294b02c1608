"""The workspace: whose it is, whether one can write there, and whether checkpoints fit and get to
the disk."""

import os
import tempfile
import time
from pathlib import Path

from entrypoints.doctor.finding import Finding, gibibytes
from entrypoints.identity import Identity
from entrypoints.mounts import is_own_tmpfs, mounted_workspace, mounts
from entrypoints.paths import WORKSPACE
from entrypoints.workspace import may_write, way_in

FREE_NEEDED = 1 << 30  # bytes; two checkpoints of a ResNet-50 with optimizer and EMA take 0.8 GB
FREE_COMFORTABLE = 5 << 30
PROBE = 4 << 20  # bytes written and synced to time the disk
# For PROBE: a checkpoint of 400 MB would take minutes, longer than the grace of `docker stop`.
SLOW_S = 2.0


def check(identity: Identity, as_root: bool) -> list[Finding]:
    """All findings about the workspace, as the user who works there: privileges are dropped before.

    `as_root`: the container starts as root, and start gives the image's own copy to that user.
    """
    folder = mounted_workspace(mounts())
    if folder is None:
        do = "-v ./workspace:/workspace (the compose file does)"
        found = f"{WORKSPACE} is the image's own copy: what is made there goes with the container"
        if os.statvfs(WORKSPACE).f_flag & os.ST_RDONLY or not (
            as_root or os.access(WORKSPACE, os.W_OK)
        ):
            found = f"{WORKSPACE} is the image's own copy, and uid {identity.uid} can't write there"
            return [Finding("workspace", "warning", found, "a folder of the host to work in", do)]
        return [Finding("workspace", "note", found, do=do), *disk(WORKSPACE)]
    return [owner(folder, identity), *disk(folder)]


def owner(folder: Path, identity: Identity) -> Finding:
    """Whether the mounted workspace can be written to by who works there, tried with a file."""
    status = folder.stat()
    mine = (
        f"{folder} belongs to {status.st_uid}:{status.st_gid}, work is done as "
        f"{os.getuid()}:{os.getgid()}"
    )
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-"):
            pass
    except OSError as error:
        if os.statvfs(folder).f_flag & os.ST_RDONLY:
            found = (
                f"{folder} is mounted read-only; runs, notebooks and checkpoints are written there"
            )
            return Finding(
                "workspace", "error", found, "a writable mount", "Drop `:ro` from the mount"
            )
        found = f"{mine} (mode {status.st_mode & 0o7777:04o}): {error.strerror}"
        do = way_in(folder, identity)
        if isinstance(error, PermissionError) and may_write(folder, identity):
            do = (
                "Owner and mode allow it, so another rule of the host denies it: SELinux "
                f"(-v ./workspace:{folder}:z, see docs/identities.md), or a file server's own"
            )
        elif not is_own_tmpfs(folder):
            do += ", or start with its owner: -e PUID=… -e PGID=…"
        return Finding(
            "workspace", "error", found, f"a folder that uid {identity.uid} may write to", do
        )
    if status.st_uid != os.getuid():
        do = f"-e PUID={status.st_uid} -e PGID={status.st_gid}" if status.st_uid else ""
        return Finding(
            "workspace", "note", f"{mine}; it can be written to, with another owner", do=do
        )
    return Finding("workspace", "ok", mine)


def disk(folder: Path, slow_s: float = SLOW_S) -> list[Finding]:
    """Free space, and how long a synced write takes: a checkpoint counts only when it is on the
    disk."""
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    if free < FREE_NEEDED:
        do = "Make room, or let runs go to a larger disk: amptrain train --runs FOLDER"
        findings = [
            Finding(
                "disk",
                "error",
                f"{gibibytes(free)} free in {folder}",
                f">= {gibibytes(FREE_NEEDED)}",
                do,
            )
        ]
    elif free < FREE_COMFORTABLE:
        found = (
            f"{gibibytes(free)} free in {folder}; two checkpoints are kept, and data "
            "sets come beside them"
        )
        findings = [
            Finding("disk", "warning", found, f">= {gibibytes(FREE_COMFORTABLE)}", "Make room")
        ]
    else:
        findings = [Finding("disk", "ok", f"{gibibytes(free)} free in {folder}")]
    try:
        seconds = synced_write(folder)
    except OSError:
        return findings  # that it can't be written to is told by `owner`
    if seconds > slow_s:
        found = (
            f"{PROBE >> 20} MiB took {seconds:.1f} s to the disk of {folder}; "
            "checkpoints stop training that long"
        )
        do = (
            "A local disk for runs: amptrain train --runs FOLDER; and a longer grace: "
            "docker stop --time 120"
        )
        return [*findings, Finding("fsync", "warning", found, f"<= {slow_s:g} s", do)]
    return [
        *findings,
        Finding("fsync", "ok", f"{PROBE >> 20} MiB to the disk in {seconds * 1000:.0f} ms"),
    ]


def synced_write(folder: Path) -> float:
    """Seconds until PROBE bytes, which no disk can compress, are on the disk; the file is gone
    afterwards."""
    data = os.urandom(PROBE)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
        begin = time.perf_counter()
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        return time.perf_counter() - begin
