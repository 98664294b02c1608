"""The account files: the identity's name, and its password for sshd.

The files in /etc are links to /run/pytorch-cuda, where they can be written also with a read-only
root; there they are made anew from the image's in /opt/etc. Started with --user, a uid without a
name is named in files of libnss-extrausers; no shared file is made writable.
"""

import os
import pwd
from collections.abc import Mapping
from pathlib import Path

from entrypoints.errors import warn
from entrypoints.files import write_file
from entrypoints.identity import DEFAULT_ID, NAME, Identity
from entrypoints.paths import RUN

UNNAMED = RUN / "users"  # /var/lib/extrausers points here
TEMPLATES = Path("/opt/etc")
MODES = {"passwd": 0o644, "group": 0o644, "shadow": 0o640}
# No password, yet no locked account: without PAM, sshd refuses the keys of a locked one
# (atmoz/sftp#50).
NO_PASSWORD = "*"


def name_user(identity: Identity) -> None:
    """Give the uid its name: getpass, git, ssh and torch.compile ask for it (docker-stacks#552).

    Started as root, `dev` gets the identity's ids.
    """
    if os.getuid() != 0:
        if not _has_name(identity.uid):
            passwd = f"{identity.name}:x:{identity.uid}:{identity.gid}::{identity.home}:/bin/bash\n"
            _write(UNNAMED / "passwd", passwd)
            _write(UNNAMED / "group", f"{identity.name}:x:{identity.gid}:\n")
        set_password(identity, NO_PASSWORD)
        return
    uid, gid = identity.uid or DEFAULT_ID, identity.gid or DEFAULT_ID
    _change("passwd", {NAME: f"{NAME}:x:{uid}:{gid}::{identity.home}:/bin/bash"})
    _change("group", {NAME: f"{NAME}:x:{gid}:"})
    set_password(identity, NO_PASSWORD)


def set_password(identity: Identity, password_hash: str) -> None:
    """Give the accounts that may log in this password, as a hash of crypt(5).

    Started with --user, sshd runs as that uid and reads the password from the extra users' file.
    """
    if os.getuid() != 0:
        _write(UNNAMED / "shadow", _shadow(identity.name, password_hash) + "\n")
    else:
        _change("shadow", {name: _shadow(name, password_hash) for name in (NAME, "root")})


def _shadow(name: str, password_hash: str) -> str:
    return f"{name}:{password_hash}:20000:0:99999:7:::"


def _has_name(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def _change(file: str, changes: Mapping[str, str]) -> None:
    """Replace the lines of these names in /etc/FILE, which is made of the image's if missing."""
    path = Path("/etc") / file
    before = path.read_text() if path.exists() else (TEMPLATES / file).read_text()
    lines = [changes.get(line.split(":")[0], line) for line in before.splitlines()]
    after = "".join(f"{line}\n" for line in lines)
    if before != after or not path.exists():
        _write(path, after)


def _write(path: Path, text: str) -> None:
    try:
        write_file(path, text, MODES[path.name])
    except OSError as error:
        warn(
            f"{path} can't be written ({error}): `dev` keeps the ids of the image, "
            "or can't log in by password."
        )
