"""The folders that a start needs, and whose they are."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from entrypoints.accounts import UNNAMED
from entrypoints.errors import EntrypointError, say, warn
from entrypoints.files import give
from entrypoints.identity import DEFAULT_ID, Identity
from entrypoints.mounts import is_read_only, is_volume, mounts
from entrypoints.paths import HOME, RUN, WORKSPACE
from entrypoints.workspace import may_write, way_in

# What the image put into the home, and a new volume there took over from it.
HOME_FILES = (".bashrc", ".profile", ".bash_logout")
# What Docker makes, as root, on the way to a mount below it.
HOME_FOLDERS = (".ssh", ".cache", ".local", ".vscode-server", ".vscode-server/extensions")


def make_run_folder(needed: bool) -> bool:
    """Make /run/pytorch-cuda; after a start as root only root can write there.

    Returns whether it can be written to. Apptainer and pyxis leave no such place; a program does
    without (apptainer/singularity#3802).

    Raises:
        EntrypointError: it can't be, and is `needed`.
    """
    try:
        for folder in (RUN, UNNAMED):
            folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            if folder.stat().st_uid == os.getuid():
                folder.chmod(0o755)  # the image has them open to all, for starts with --user
        if not os.access(RUN, os.W_OK):
            raise PermissionError(f"{RUN} belongs to uid {RUN.stat().st_uid}")
    except OSError as error:
        # Docker's tmpfs on /run is root's alone.
        place = "/run" if os.getuid() == 0 else f"{RUN}:mode=1777"
        if not needed:
            say(
                f"note: {RUN} can't be written to, so `docker exec` gets no environment of this "
                f"start, and there is no health check. With both: --tmpfs {place}"
            )
            return False
        raise EntrypointError(
            f"{RUN} can't be written to ({error}). With a read-only root it needs a place of its "
            f"own: --tmpfs {place} (Apptainer: --writable-tmpfs)"
        ) from error
    return True


def give_image_folders(identity: Identity) -> None:
    """Give what the image put there, home and workspace, to the identity.

    Walks nothing that the user made. A folder of the host stays as it is; a volume is the
    container's own.
    """
    if os.getuid() != 0:
        check_home_folders(identity)
        return
    points = mounts()
    if is_containers_own(WORKSPACE, points):
        take_over([WORKSPACE], identity)
    if identity.home != HOME:
        return
    if is_containers_own(HOME, points):
        take_over([HOME, *(HOME / name for name in (*HOME_FILES, *HOME_FOLDERS))], identity)
    owner = HOME.stat().st_uid
    if owner != identity.uid and not may_write(HOME, identity):
        other = f" Or start with PUID={owner}." if owner else ""
        warn(
            f"{HOME} belongs to uid {owner}, not to {identity.uid}, which may not write there. "
            f"{way_in(HOME, identity)}{other}"
        )


def check_home_folders(identity: Identity) -> None:
    """Tell which folders of the home a start with `--user` can't write to.

    Docker makes them as root on the way to a mount below (moby/moby#2259); only root can give them.
    """
    for name in HOME_FOLDERS:
        folder = identity.home / name
        if folder.is_dir() and not os.access(folder, os.W_OK):
            warn(
                f"{folder} belongs to uid {folder.stat().st_uid}, not to {identity.uid}, which may "
                "not write there: Docker makes the folders above a mount as root. Start without "
                f"--user (PUID={identity.uid} says who you are), or mount to a place outside it."
            )


def is_containers_own(folder: Path, points: Mapping[Path, str]) -> bool:
    """Whether a folder is the image's own copy or a volume, and can be written to."""
    is_own = folder not in points or is_volume(points[folder])
    return is_own and not is_read_only(folder)


def take_over(paths: Iterable[Path], identity: Identity) -> None:
    """Give these to the identity, except what an earlier start gave to somebody else."""
    for path in paths:
        if not path.exists():
            continue
        owner = path.lstat().st_uid
        if owner in (0, DEFAULT_ID) and owner != identity.uid:
            give(path, identity.uid, identity.gid)
