"""Who runs: `dev` with the ids of the workspace's owner, or with those of $PUID and $PGID."""

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from entrypoints.credentials import unquoted
from entrypoints.errors import EntrypointError
from entrypoints.files import give
from entrypoints.mounts import is_read_only, mounted_workspace, mounts
from entrypoints.natural import natural
from entrypoints.paths import HOME

NAME = "dev"
UNNAMED_NAME = "user"  # for a uid of --user that has no name; `dev` is the image's uid 1000
DEFAULT_ID = 1000
HIGHEST_ID = 2**32 - 2  # (uid_t)-1 means "no user"


@dataclass(frozen=True)
class Identity:
    """The user whose programs run here."""

    name: str
    uid: int
    gid: int
    home: Path
    groups: tuple[int, ...] = ()


def choose_identity(environment: Mapping[str, str]) -> Identity:
    """The identity for this start.

    Raises:
        EntrypointError: PUID or PGID is no number that a user can have.
    """
    if os.getuid() != 0:
        name = NAME if os.getuid() == DEFAULT_ID else UNNAMED_NAME
        home = usable_home(environment)
        return Identity(name, os.getuid(), os.getgid(), home, tuple(os.getgroups()))
    uid, gid = _number(environment, "PUID"), _number(environment, "PGID")
    mount = mounted_workspace(mounts())
    owner = mount.stat() if mount else None
    if owner and owner.st_uid == 0 and not root_is_root_outside():
        name = NAME if uid else "root"  # rootless engine: 0 is the person outside
        return Identity(name, uid or 0, gid or 0, HOME, _extra_groups())
    if owner and owner.st_uid != 0:
        uid = owner.st_uid if uid is None else uid
        gid = owner.st_gid if gid is None else gid
    uid = DEFAULT_ID if uid is None else uid
    gid = (DEFAULT_ID if uid == DEFAULT_ID else uid) if gid is None else gid
    return Identity(NAME, uid, gid, writable_home(uid, gid), _extra_groups())


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = unquoted(environment.get(name, ""))
    if not text:
        return None
    number = natural(text, HIGHEST_ID)
    if number is None:
        raise EntrypointError(
            f"{name} is {text[:40]!r}, which is no user or group id; "
            "give a number above 0, such as the output of `id -u` on the host."
        )
    return number


def _extra_groups() -> tuple[int, ...]:
    """What `--group-add` gave, without root's own group."""
    return tuple(group for group in os.getgroups() if group != 0)


def root_is_root_outside(table: Path = Path("/proc/self/uid_map")) -> bool:
    """False in a user namespace (rootless Docker, podman, userns-remap): there uid 0 is an ordinary
    user outside."""
    return table.read_text().split()[:2] == ["0", "0"]


def usable_home(environment: Mapping[str, str]) -> Path:
    """A home that a start with `--user` can write to: $HOME, else /home/dev, else one in /tmp."""
    for home in (Path(environment.get("HOME", "/")), HOME):
        if home.is_absolute() and home != Path("/") and os.access(home, os.W_OK):
            return home
    return home_under_tmp(f"home-{os.getuid()}")


def writable_home(uid: int, gid: int) -> Path:
    """/home/dev; with a read-only root and no volume there, one in /tmp."""
    if not is_read_only(HOME):
        return HOME
    home = home_under_tmp("home-dev")
    give(home, uid, gid)
    return home


def home_under_tmp(name: str) -> Path:
    """A home for this start only.

    Raises:
        EntrypointError: /tmp can't be written to (a read-only root without a tmpfs there).
    """
    home = Path("/tmp") / name
    try:
        home.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise EntrypointError(
            f"No home can be made under /tmp ({error.strerror}). "
            "With a read-only root: --tmpfs /tmp --tmpfs /run, or a HOME that can be written to"
        ) from error
    return home


def give_temporary_folder(environment: MutableMapping[str, str], identity: Identity) -> None:
    """Set TMPDIR to the home where /tmp is read-only: Python would end with `No usable temporary
    directory found`."""
    if is_read_only(Path("/tmp")):
        environment.setdefault("TMPDIR", str(identity.home))


def drop_privileges(identity: Identity) -> None:
    """Become the identity for good. No sudo, no setuid helper: works under `no-new-privileges`.

    Raises:
        EntrypointError: the container may not change its user (SETUID and SETGID were dropped).
    """
    if os.getuid() != 0 or identity.uid == 0:
        return
    uid, gid = identity.uid, identity.gid
    try:
        os.setgroups([gid, *identity.groups])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    except PermissionError as error:
        raise EntrypointError(
            f"Started as root, but root may not become uid {uid} here ({error}). "
            "Allow it with --cap-add SETUID --cap-add SETGID, "
            f"or start with --user {uid}:{gid}."
        ) from error
