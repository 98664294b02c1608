"""Who runs: the user `dev` takes the uid and gid of the owner of the mounted workspace, or those of
$PUID and $PGID."""

import os
import pwd
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from entrypoints.errors import EntrypointError, warn
from entrypoints.paths import HOME, RUN, WORKSPACE

NAME = "dev"
UNNAMED_NAME = (
    "user"  # a uid of --user without a name; `dev` is the image's uid 1000, which it is not
)
UNNAMED = RUN / "users"  # /var/lib/extrausers points here
TEMPLATES = Path("/opt/etc")
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


def mounts(table: Path = Path("/proc/self/mountinfo")) -> dict[Path, str]:
    """Mount points of this container, each with the folder mounted there; proc(5) writes blanks in
    them as \\040."""
    fields = (line.split() for line in table.read_text().splitlines())
    return {Path(_unescaped(field[4])): _unescaped(field[3]) for field in fields}


def _unescaped(text: str) -> str:
    return re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), text)


def mounted_workspace(points: Iterable[Path], workspace: Path = WORKSPACE) -> Path | None:
    """The mount whose owner counts: /workspace, else one below it (the article mounts
    /workspace/code).

    Of several below, one that can be written to and is not root's: data beside it is often mounted
    read-only.
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


def decide(environment: Mapping[str, str]) -> Identity:
    """The identity for this start.

    Raises:
        EntrypointError: PUID or PGID is no number a user can have.
    """
    if os.getuid() != 0:
        name = NAME if os.getuid() == DEFAULT_ID else UNNAMED_NAME
        return Identity(
            name, os.getuid(), os.getgid(), usable_home(environment), tuple(os.getgroups())
        )
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
    text = environment.get(name, "").strip()
    if not text:
        return None
    if not text.isdecimal() or not 0 < int(text) <= HIGHEST_ID:
        what = f"{name} is {text!r}, which is no user or group id"
        raise EntrypointError(
            f"{what}; give a number above 0, such as the output of `id -u` on the host."
        )
    return int(text)


def _extra_groups() -> tuple[int, ...]:
    return tuple(
        group for group in os.getgroups() if group != 0
    )  # what `--group-add` gave, without root's own


def root_is_root_outside(table: Path = Path("/proc/self/uid_map")) -> bool:
    """False in a user namespace (rootless Docker, podman, userns-remap), where uid 0 is an ordinary
    user outside."""
    return table.read_text().split()[:2] == ["0", "0"]


def usable_home(environment: Mapping[str, str]) -> Path:
    """A home that a container started with `--user` can write to: $HOME, /home/dev, else one under
    /tmp."""
    for home in (Path(environment.get("HOME", "/")), HOME):
        if home != Path("/") and os.access(home, os.W_OK):
            return home
    return home_under_tmp(f"home-{os.getuid()}")


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
            f"No home can be made under /tmp ({error.strerror}). With a read-only root: --tmpfs /tmp --tmpfs /run"
        ) from error
    return home


def writable_home(uid: int, gid: int) -> Path:
    """/home/dev, or with a read-only root and no volume there, one under /tmp."""
    if not is_read_only(HOME):
        return HOME
    home = home_under_tmp("home-dev")
    give(home, uid, gid)
    return home


def make_run_folder() -> None:
    """Make /run/pytorch-cuda, and see to it that from a start as root on only root can write
    there."""
    try:
        for folder in (RUN, UNNAMED):
            folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            if folder.stat().st_uid == os.getuid():
                folder.chmod(0o755)  # the image has them open to all, for starts with --user
        if not os.access(RUN, os.W_OK):
            raise PermissionError(f"{RUN} belongs to uid {RUN.stat().st_uid}")
    except OSError as error:
        place = (
            "/run" if os.getuid() == 0 else f"{RUN}:mode=1777"
        )  # Docker's tmpfs on /run is root's alone
        raise EntrypointError(
            f"{RUN} can't be written to ({error}). With a read-only root it needs a place of its own: --tmpfs {place}"
        ) from error


def name_user(identity: Identity, password_hash: str = "*") -> None:
    """Give the uid its name, so that getpass, git, ssh and torch.compile know it
    (docker-stacks#552).

    Started as root, `dev` gets the identity's ids. The account files in /etc are links to
    /run/pytorch-cuda, where they can be written also with a read-only root; there they are made
    anew from the image's in /opt/etc. Started with --user, a uid without a name is named in files
    of libnss-extrausers; no shared file is made writable. '*' is no password, yet not a locked
    account: without PAM, sshd refuses the keys of a locked one (atmoz/sftp#50).
    """
    if os.getuid() != 0:
        name_unnamed(identity, password_hash)
        return
    lines = {
        "passwd": {
            NAME: f"{NAME}:x:{identity.uid or DEFAULT_ID}:{identity.gid or DEFAULT_ID}::{identity.home}:/bin/bash"
        },
        "group": {NAME: f"{NAME}:x:{identity.gid or DEFAULT_ID}:"},
        "shadow": {name: f"{name}:{password_hash}:20000:0:99999:7:::" for name in (NAME, "root")},
    }
    for file, changes in lines.items():
        path = Path("/etc") / file
        before = path.read_text() if path.exists() else (TEMPLATES / file).read_text()
        after = "".join(
            changes.get(line.split(":")[0], line) + "\n" for line in before.splitlines()
        )
        if before != after or not path.exists():
            write_private(path, after, 0o600 if file == "shadow" else 0o644)


def write_private(path: Path, text: str, mode: int) -> None:
    """Write a file that is never readable for more than `mode` allows, also where it is new."""
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w") as file:
            file.write(text)
    except OSError as error:
        warn(
            f"{path} can't be written ({error}): `dev` keeps the ids of the image, or can't log in by password."
        )


def known(uid: int) -> bool:
    """Whether this uid has a name already."""
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def name_unnamed(identity: Identity, password_hash: str) -> None:
    """Name the uid of a start with --user, unless it has a name; sshd, run as that uid, reads its
    password here."""
    entries = {"shadow": f"{identity.name}:{password_hash}:20000:0:99999:7:::\n"}
    if not known(identity.uid):
        entries["passwd"] = (
            f"{identity.name}:x:{identity.uid}:{identity.gid}::{identity.home}:/bin/bash\n"
        )
        entries["group"] = f"{identity.name}:x:{identity.gid}:\n"
    for file, text in entries.items():
        write_private(UNNAMED / file, text, 0o600 if file == "shadow" else 0o644)


def own_home(identity: Identity) -> None:
    """Give what the image put there, home and workspace, to the identity. Never walks what the user
    made.

    A folder of the host stays as it is; a volume is the container's own.
    """
    if os.getuid() != 0:
        return
    points = mounts()
    if WORKSPACE not in points and not is_read_only(WORKSPACE):  # the image's own copy
        take_over([WORKSPACE], identity)
    if identity.home != HOME:
        return
    if HOME not in points or re.search(r"/volumes/[^/]+/_data$", points[HOME]):
        names = (
            ".bashrc",
            ".profile",
            ".bash_logout",
            ".ssh",
            ".cache",
            ".local",
            ".vscode-server",
        )
        take_over(
            [HOME, *(HOME / name for name in names), HOME / ".vscode-server/extensions"], identity
        )
    owner = HOME.stat().st_uid
    if owner != identity.uid:
        warn(
            f"{HOME} belongs to uid {owner}, not to {identity.uid}, which may not be able to write there. "
            f"Start with PUID={owner or identity.uid}, or give the folder or volume over once with chown -R."
        )


def take_over(paths: Iterable[Path], identity: Identity) -> None:
    """Give these to the identity, except what an earlier start gave to somebody else."""
    for path in paths:
        if (
            path.exists()
            and path.lstat().st_uid in (0, DEFAULT_ID)
            and path.lstat().st_uid != identity.uid
        ):
            give(path, identity.uid, identity.gid)


def give(path: Path, uid: int, gid: int) -> None:
    """Give one file or folder to the user.

    Raises:
        EntrypointError: root may not do that here (CHOWN was dropped).
    """
    try:
        os.chown(path, uid, gid, follow_symlinks=False)
    except OSError as error:
        raise EntrypointError(
            f"Started as root, but root may not give {path} to uid {uid} here ({error.strerror}). "
            "Allow it with --cap-add CHOWN, or start with --user."
        ) from error


def become(identity: Identity) -> None:
    """Drop to the identity for good. No sudo, no setuid helper: works under `no-new-privileges`.

    Raises:
        EntrypointError: the container may not change its user (SETUID and SETGID were dropped).
    """
    if os.getuid() != 0 or identity.uid == 0:
        return
    try:
        os.setgroups([identity.gid, *identity.groups])
        os.setresgid(identity.gid, identity.gid, identity.gid)
        os.setresuid(identity.uid, identity.uid, identity.uid)
    except PermissionError as error:
        raise EntrypointError(
            f"Started as root, but root may not become uid {identity.uid} here ({error}). "
            f"Allow it with --cap-add SETUID --cap-add SETGID, or start with --user {identity.uid}:{identity.gid}."
        ) from error
