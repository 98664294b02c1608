"""Mode `ssh`: sshd that lets in the operator's key, or where none was given a one-time password."""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from entrypoints.accounts import set_password
from entrypoints.authorized_keys import operator_keys
from entrypoints.credentials import new_password
from entrypoints.errors import EntrypointError, say
from entrypoints.identity import NAME, Identity
from entrypoints.mode import Facts, Launch, Mode
from entrypoints.paths import RUN, STATE
from entrypoints.ports import is_listened_on, published_port, require_free_port

SSHD = "/usr/sbin/sshd"
PORT = 2222
SSHD_PORT = 22  # sshd's own default
# In the home, for what a start with --user keeps: sshd wants a folder that no other can write to.
PRIVATE = ".ssh-server"


class Ssh(Mode):
    """Claims `ssh`, and sshd as people write it themselves: `/usr/sbin/sshd -D`, on port 22."""

    name = "ssh"
    program = "sshd"
    port = PORT
    compose = "up"
    uses_workspace = True

    def claims(self, words: Sequence[str]) -> bool:
        return words[0] in (self.name, "sshd", SSHD)

    def prepare(
        self, words: Sequence[str], environment: Mapping[str, str], identity: Identity
    ) -> Launch:
        """Settle keys, password, host key and port.

        Raises:
            EntrypointError: a key that is none, no key with SSH_REQUIRE_KEY=1, no place for the
                host key, flags that sshd refuses, a port in use.
        """
        arguments = words[1:]
        as_root = os.getuid() == 0
        if as_root:
            make_system_files()
        default_port = PORT if words[0] == self.name else SSHD_PORT
        port = listening_port(arguments, default_port)
        require_free_port(port, self.program)
        keys = operator_keys(environment)
        users = [NAME, "root"] if as_root else [identity.name]
        folder = RUN if as_root else identity.home / PRIVATE
        folder.mkdir(mode=0o700, exist_ok=True)
        authorized = install_keys(folder / "authorized_keys", keys, users)
        password = None if keys or has_own_keys(identity) else one_time_password(environment)
        if password:
            set_password(identity, hashed(password))
        host_key = ensure_host_key(identity)
        announce(environment, users, port, password, host_key)
        options = [
            *(["-p", str(port)] if port == default_port else []),
            *("-h", str(host_key)),
            *("-o", f"PasswordAuthentication={'yes' if password else 'no'}"),
            *("-o", f"AuthorizedKeysFile={authorized}/%u .ssh/authorized_keys"),
        ]
        own = [argument for argument in arguments if argument not in ("-D", "-e")]
        return Launch([SSHD, "-D", "-e", *options, *own], as_root=True, facts={"port": port})

    def problem(self, facts: Facts) -> str | None:
        """sshd listens. A connection that says nothing would be a line in its log each time."""
        if is_listened_on(int(facts["port"])):
            return None
        return f"nothing listens on port {facts['port']}"


def make_system_files() -> None:
    """Make what sshd wants in /run, which may be a fresh tmpfs."""
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # for its privilege separation
    Path("/run/utmp").touch(mode=0o644)  # who is logged in; without it each logout is a complaint


def listening_port(arguments: Sequence[str], default: int) -> int:
    """The port sshd listens on with the caller's flags and files. sshd itself is asked (9 ms).

    Raises:
        EntrypointError: sshd refuses the flags.
    """
    if not arguments:
        return default
    # A port in the flags comes beside the default one; sshd's own default stands for itself.
    ours = [] if default == SSHD_PORT else ["-p", str(default)]
    asked = subprocess.run(
        [SSHD, "-G", *arguments, *ours], capture_output=True, text=True, check=False
    )
    if asked.returncode:
        reason = (asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"])[0]
        raise EntrypointError(f"sshd refuses `{' '.join(arguments)}`: {reason.rstrip('.')}.")
    lines = [line.split() for line in asked.stdout.splitlines()]
    ports = [int(line[1].rpartition(":")[2]) for line in lines if line[0] == "listenaddress"]
    return next((port for port in ports if port != default), default)


def install_keys(folder: Path, keys: Sequence[str], users: Sequence[str]) -> Path:
    """Put our own copy of the keys where sshd looks: owner and mode of a mount no longer matter
    (docker-sshd#5)."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o755)
    for user in users if keys else ():
        (folder / user).write_text("".join(f"{key}\n" for key in keys))
        (folder / user).chmod(0o644)
    return folder


def has_own_keys(identity: Identity) -> bool:
    """Whether the user has put keys into the home themselves (`ssh-copy-id` into a volume)."""
    try:
        lines = (identity.home / ".ssh/authorized_keys").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return False
    return any(line.strip() and not line.lstrip().startswith("#") for line in lines)


def one_time_password(environment: Mapping[str, str]) -> str:
    """A password for this start, unless keys are required.

    Raises:
        EntrypointError: SSH_REQUIRE_KEY=1 and there is no key.
    """
    if environment.get("SSH_REQUIRE_KEY", "").strip() not in ("", "0"):
        raise EntrypointError(
            "SSH_REQUIRE_KEY is set, and there is no public key. Give one by SSH_PUBLIC_KEY, "
            "SSH_PUBLIC_KEY_FILE or a mounted authorized_keys: "
            'SSH_PUBLIC_KEY="$(cat ~/.ssh/id_ed25519.pub)"'
        )
    return new_password()


def hashed(password: str) -> str:
    """The SHA-512 crypt hash of a password, for shadow(5).

    The password goes through a pipe: other users can see the arguments of a command.
    """
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
    may_share = os.access(shared, os.W_OK) or os.access(STATE, os.W_OK)
    folder = shared if may_share else identity.home / PRIVATE
    key = folder / "ssh_host_ed25519_key"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not key.exists():
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(key)]
            subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise EntrypointError(
            f"The ssh host key can't be written to {folder} ({error}). "
            f"Mount a volume there: -v ssh-state:{STATE}"
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
    others = "".join(f"   (or {user}@127.0.0.1)" for user in users[1:])
    say(f"ssh: ssh -p {published} {users[0]}@127.0.0.1{others}")
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


MODE = Ssh()
