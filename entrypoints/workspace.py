"""Whether the workspace can be worked in."""

from pathlib import Path

from entrypoints.errors import EntrypointError, warn
from entrypoints.identity import Identity
from entrypoints.mounts import is_own_tmpfs, is_read_only, mounted_workspace, mounts
from entrypoints.paths import WORKSPACE


def check_writable(identity: Identity) -> None:
    """See that the workspace can be written to, and warn where file modes forbid it.

    Raises:
        EntrypointError: it is mounted read-only.
    """
    folder = mounted_workspace(mounts())
    if folder is None or (folder != WORKSPACE and is_read_only(folder)):
        # Nothing is mounted, or read-only data below the image's own copy.
        if identity.uid not in (0, WORKSPACE.stat().st_uid):
            warn(
                f"{WORKSPACE} is the image's own copy, and uid {identity.uid} may not write there; "
                f"mount a folder of yours: -v ./workspace:{WORKSPACE}"
            )
        return
    if is_read_only(folder):
        raise EntrypointError(
            f"{folder} is mounted read-only, "
            "but runs, notebooks and checkpoints are written there; drop `:ro`."
        )
    if not may_write(folder, identity):
        owner = folder.stat()
        warn(
            f"{folder} belongs to {owner.st_uid}:{owner.st_gid} "
            f"(mode {owner.st_mode & 0o7777:04o}), and uid {identity.uid} may not write there. "
            f"{way_in(folder, identity)}"
        )


def way_in(folder: Path, identity: Identity) -> str:
    """What makes a mount the identity's. A tmpfs is no folder of the host: Docker makes it root's.

    Only --tmpfs knows uid and gid; `--mount type=tmpfs` does not (compose-spec#278), and a mode
    gives way to that of the image's folder (moby#20437).
    """
    if is_own_tmpfs(folder):
        return f"It is a tmpfs: --tmpfs {folder}:uid={identity.uid},gid={identity.gid}"
    return 'On the host: sudo chown -R "$(id -u):$(id -g)" THE-FOLDER (root: 1000:1000)'


def may_write(folder: Path, identity: Identity) -> bool:
    """Whether the mode bits let the identity make files there (asked before privileges are
    dropped)."""
    status = folder.stat()
    if identity.uid == 0:
        return True
    if identity.uid == status.st_uid:
        bits = status.st_mode >> 6
    elif status.st_gid in (identity.gid, *identity.groups):
        bits = status.st_mode >> 3
    else:
        bits = status.st_mode
    return bits & 0o3 == 0o3
