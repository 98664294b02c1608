"""Mode `ssh`: sshd that lets in the operator's key, or where none was given a one-time password."""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from entrypoints.accounts import set_password
from entrypoints.authorized_keys import (
    key_lines,
    mounted_files,
    operator_keys,
    refusal,
    sshd_rules,
)
from entrypoints.credentials import new_password
from entrypoints.errors import EntrypointError, say, warn
from entrypoints.files import give
from entrypoints.identity import NAME, Identity
from entrypoints.mode import Facts, Launch, Mode
from entrypoints.paths import RUN, SSHD, STATE
from entrypoints.ports import is_listened_on, published_port, require_free_port
from entrypoints.workspace import may_write

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
    needs_run_folder = True

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
        make_key_folder(identity)
        authorized = install_keys(folder / "authorized_keys", keys, users)
        password = None if has_own_keys(identity) or keys else one_time_password(environment)
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


def make_key_folder(identity: Identity) -> None:
    """Make the ~/.ssh into which people copy their keys. A convenience, and not at any price."""
    folder = identity.home / ".ssh"
    if not may_write(identity.home, identity):
        return
    with suppress(
        OSError
    ):  # it is there, or the home is full, read-only or a NAS that refuses root
        folder.mkdir(mode=0o700)
        if os.getuid() == 0:
            give(folder, identity.uid, identity.gid)


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
    """Whether the user has put keys into the home that sshd will take (`ssh-copy-id`).

    What sshd will refuse is told here, not at the login: with a key, passwords are off.
    """
    file = identity.home / ".ssh/authorized_keys"
    if file in mounted_files():
        return False  # those are the operator's; our copy of them has the right owner and mode
    try:
        lines = list(key_lines(file.read_text()))
        strict = strict_modes_refusal(file, identity) if lines else None
    except (OSError, UnicodeDecodeError):
        return False
    if strict is not None:
        warn(f"sshd ignores {file}: {strict}")
        return False
    rules = sshd_rules() if lines else None
    usable = 0
    for number, line in lines:
        assert rules
        try:
            cause = refusal(line, rules)
        except ValueError:
            cause = "it is no public key"
        usable += cause is None
        if cause is not None:
            warn(f"line {number} of {file} can't log in: {cause}")
    return usable > 0


def strict_modes_refusal(file: Path, identity: Identity) -> str | None:
    """Why sshd's StrictModes refuses a file of the home, or None: safe_path() in its misc.c.

    A home of a NAS, of Windows or of mode 0777 is such a case.
    """
    home = identity.home.resolve()
    path = file.resolve()
    for part in (path, *path.parents):
        status = part.stat()
        if status.st_uid not in (0, identity.uid):
            return f"{part} belongs to uid {status.st_uid}, not to {identity.uid}"
        if status.st_mode & 0o022:
            mode = f"{status.st_mode & 0o7777:04o}"
            return f"others may write to {part} (mode {mode}); needed: chmod go-w {part}"
        if part == home:
            break
    return None


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
        if not is_whole(key):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(key)]
            subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise EntrypointError(
            f"The ssh host key can't be written to {folder} ({error}). "
            f"Mount a volume there: -v ssh-state:{STATE}"
        ) from error
    return key


def is_whole(key: Path) -> bool:
    """Whether the host key can be used; one that a crash left half-written is put aside.

    Raises:
        OSError: others may read it, so that sshd refuses it.
    """
    if not key.exists():
        return False
    command = ["ssh-keygen", "-y", "-P", "", "-f", str(key)]
    read = subprocess.run(command, check=False, capture_output=True, text=True)
    if read.returncode == 0:
        return True
    if key.is_file() and "bad permissions" in read.stderr:
        raise PermissionError(f"{key} can be read by others, and sshd refuses it: chmod 0600 it")
    warn(f"{key} is damaged; it is kept as {key.name}.damaged, and clients see a new host key.")
    key.replace(f"{key}.damaged")
    return False


def fingerprint(key: Path) -> str:
    """`SHA256:…` of a key, as ssh shows it at the first connection."""
    command = ["ssh-keygen", "-l", "-f", str(key)]
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
