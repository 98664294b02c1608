"""Mode `ssh`: sshd that lets in the operator's key, or where none was given a one-time password."""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from entrypoints.authorized_keys import operator_keys
from entrypoints.credentials import new_password
from entrypoints.errors import EntrypointError, say
from entrypoints.identity import NAME, Identity, name_user
from entrypoints.paths import RUN, STATE
from entrypoints.program import published_port, require_free_port, write_mode

SSHD = "/usr/sbin/sshd"
PORT = 2222
PRIVATE = ".ssh-server"  # in the home, for what a start with --user keeps: sshd wants a folder no other can write to


def is_sshd(word: str) -> bool:
    """Whether the caller wrote sshd himself, as the article does: `/usr/sbin/sshd -D`."""
    return word in ("sshd", SSHD)


def port_of(arguments: Sequence[str], default: int) -> int:
    """The port in sshd's own flags (`-p 22`, `-p22`, `-oPort=22`), else the default."""
    for position, argument in enumerate(arguments):
        text = (
            argument[2:] or next(iter(arguments[position + 1 :]), "")
            if argument.startswith("-p")
            else ""
        )
        for form in (
            argument,
            next(iter(arguments[position + 1 :]), "") if argument == "-o" else "",
        ):
            name, equals, value = form.removeprefix("-o").partition("=")
            text = value if equals and name.strip().lower() == "port" else text
        if text.strip().isdecimal():
            return int(text)
    return default


def prepare(
    arguments: Sequence[str], environment: Mapping[str, str], identity: Identity, default_port: int
) -> list[str]:
    """Settle keys, password, host key and port; return the sshd command to run.

    Raises:
        EntrypointError: a key that is none, no key with SSH_REQUIRE_KEY=1, no place for the host
        key, a port in use.
    """
    port = port_of(arguments, default_port)
    require_free_port(port, "sshd")
    keys = operator_keys(environment)
    users = [NAME, "root"] if os.getuid() == 0 else [identity.name]
    folder = RUN if os.getuid() == 0 else identity.home / PRIVATE
    folder.mkdir(mode=0o700, exist_ok=True)
    authorized = install_keys(folder / "authorized_keys", keys, users)
    password = None if keys or personal_keys(identity) else first_password(environment)
    name_user(identity, hashed(password) if password else "*")
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(
            mode=0o755, exist_ok=True
        )  # sshd's privilege separation; /run may be a fresh tmpfs
        Path("/run/utmp").touch(
            mode=0o644
        )  # who is logged in; without it sshd complains at each logout
    host_key = ensure_host_key(identity)
    write_mode(mode="ssh", port=port)
    announce(environment, users, port, password, host_key)
    options = (
        ["-e", "-p", str(port), "-h", str(host_key)]
        if port == default_port
        else ["-e", "-h", str(host_key)]
    )
    options += ["-o", f"PasswordAuthentication={'yes' if password else 'no'}"]
    options += ["-o", f"AuthorizedKeysFile={authorized}/%u .ssh/authorized_keys"]
    own = [argument for argument in arguments if argument not in ("-D", "-e")]
    return [SSHD, "-D", *options, *own]


def install_keys(folder: Path, keys: Sequence[str], users: Sequence[str]) -> Path:
    """Put our own copy of the keys where sshd looks: owner and mode of a mount no longer matter
    (docker-sshd#5)."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o755)
    for user in users if keys else ():
        (folder / user).write_text("".join(f"{key}\n" for key in keys))
        (folder / user).chmod(0o644)
    return folder


def personal_keys(identity: Identity) -> bool:
    """Whether the user has put keys into his home himself (`ssh-copy-id` into the home volume)."""
    try:
        lines = (identity.home / ".ssh/authorized_keys").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return False
    return any(line.strip() and not line.lstrip().startswith("#") for line in lines)


def first_password(environment: Mapping[str, str]) -> str:
    """A password for this start, unless keys are required.

    Raises:
        EntrypointError: SSH_REQUIRE_KEY=1 and there is no key.
    """
    if environment.get("SSH_REQUIRE_KEY", "").strip() not in ("", "0"):
        raise EntrypointError(
            "SSH_REQUIRE_KEY is set, and there is no public key. Give one by SSH_PUBLIC_KEY, SSH_PUBLIC_KEY_FILE "
            'or a mounted authorized_keys: SSH_PUBLIC_KEY="$(cat ~/.ssh/id_ed25519.pub)"'
        )
    return new_password()


def hashed(password: str) -> str:
    """The SHA-512 crypt hash of a password, for shadow(5). It goes through a pipe: arguments can be
    seen by others."""
    command = ["openssl", "passwd", "-6", "-stdin"]
    return subprocess.run(
        command, input=password, capture_output=True, text=True, check=True
    ).stdout.strip()


def ensure_host_key(identity: Identity) -> Path:
    """The host key, made at the first start into the volume: one per deployment, and the same after
    `down` and `up`.

    Raises:
        EntrypointError: neither the volume nor the home can be written to.
    """
    shared = STATE / "ssh"
    folder = (
        shared
        if os.access(shared, os.W_OK) or os.access(STATE, os.W_OK)
        else identity.home / PRIVATE
    )
    key = folder / "ssh_host_ed25519_key"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not key.exists():
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(key)]
            subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise EntrypointError(
            f"The ssh host key can't be written to {folder} ({error}). Mount a volume there: -v ssh-state:{STATE}"
        ) from error
    return key


def fingerprint(key: Path) -> str:
    """`SHA256:…` of a key, as ssh shows it at the first connection."""
    command = ["ssh-keygen", "-l", "-f", f"{key}.pub"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[1]


def announce(
    environment: Mapping[str, str], users: Sequence[str], port: int, password: str | None, key: Path
) -> None:
    """Print how to log in, and a block for the client's ~/.ssh/config."""
    published = published_port(environment, "SSH_PORT", port)
    say(
        f"ssh: ssh -p {published} {users[0]}@127.0.0.1"
        + ("   (or root@127.0.0.1)" if len(users) > 1 else "")
    )
    say(f"ssh: host key {fingerprint(key)} (ED25519)")
    if password:
        say(f"ssh: no public key was given; one-time password: {password}")
        say('ssh: with a key, passwords are off: SSH_PUBLIC_KEY="$(cat ~/.ssh/id_ed25519.pub)"')
    say("ssh: for ~/.ssh/config (VS Code Remote-SSH, rsync, scp):")
    for line in (
        "Host pytorch-cuda",
        "    HostName 127.0.0.1",
        f"    Port {published}",
        f"    User {users[0]}",
    ):
        say(line)
