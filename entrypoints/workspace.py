"""Whether the workspace can be worked in."""

from pathlib import Path

from entrypoints.errors import EntrypointError, warn
from entrypoints.identity import Identity, is_read_only, mounted_workspace, mounts
from entrypoints.paths import WORKSPACE


def check_writable(identity: Identity, required: bool) -> None:
    """See that the mounted workspace can be written to.

    Raises:
        EntrypointError: it is mounted read-only, and the mode needs to write there (`required`).
    """
    folder = mounted_workspace(mounts())
    if folder is None or (
        folder != WORKSPACE and is_read_only(folder)
    ):  # data mounted below: the rest is ours
        if identity.uid not in (0, WORKSPACE.stat().st_uid):
            warn(
                f"{WORKSPACE} is the image's own copy, and uid {identity.uid} may not write there; "
                f"mount a folder of yours: -v ./workspace:{WORKSPACE}"
            )
        return
    if is_read_only(folder):
        message = f"{folder} is mounted read-only"
        if required:
            raise EntrypointError(
                f"{message}, but runs, notebooks and checkpoints are written there; drop `:ro`."
            )
        warn(f"{message}: programs can read, but not write there.")
    elif not may_write(folder, identity):
        owner = folder.stat()
        warn(
            f"{folder} belongs to {owner.st_uid}:{owner.st_gid} (mode {owner.st_mode & 0o7777:04o}), and uid "
            f"{identity.uid} may not write there. On the host: "
            'sudo chown -R "$(id -u):$(id -g)" THE-FOLDER (root: 1000:1000)'
        )


def may_write(folder: Path, identity: Identity) -> bool:
    """Whether the mode bits let the identity write (asked before the privileges are dropped)."""
    status = folder.stat()
    if identity.uid in (0, status.st_uid):
        return identity.uid == 0 or bool(status.st_mode & 0o200)
    if status.st_gid in (identity.gid, *identity.groups):
        return bool(status.st_mode & 0o020)
    return bool(status.st_mode & 0o002)
