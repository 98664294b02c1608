"""The operator's public keys: where they may come from, and that each of them can log in."""

import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from entrypoints.credentials import credential, read_secret
from entrypoints.errors import EntrypointError, warn
from entrypoints.mounts import mounts
from entrypoints.paths import HOME, SECRETS, SSHD

# Where people mount an authorized_keys file. Only a mount counts: what the user `dev` writes into
# their home is for `dev` alone, and must not become a key of root at the next start.
MOUNTED = (
    HOME / ".ssh/authorized_keys",
    Path("/root/.ssh/authorized_keys"),
    Path("/etc/ssh/authorized_keys"),
)
SECRET = SECRETS / "ssh_public_key"
# sshd(8), AUTHORIZED_KEYS FILE FORMAT. sshd refuses a key whose options have another name.
OPTIONS = frozenset(
    [
        "agent-forwarding",
        "cert-authority",
        "command",
        "environment",
        "expiry-time",
        "from",
        "no-agent-forwarding",
        "no-port-forwarding",
        "no-pty",
        "no-touch-required",
        "no-user-rc",
        "no-x11-forwarding",
        "permitlisten",
        "permitopen",
        "port-forwarding",
        "principals",
        "pty",
        "restrict",
        "tunnel",
        "user-rc",
        "verify-required",
        "x11-forwarding",
    ]
)
KEY = re.compile(r"(?:^|\s)((?:sk-|webauthn-sk-)?(?:ssh|ecdsa)-[\w@.-]+)\s+AAAA")
OPTION = re.compile(r'([\w-]+)(?:="(?:\\.|[^"\\])*")?(?:,|$)')


@dataclass(frozen=True)
class KeyRules:
    """What this sshd takes: bits of an RSA key, and the types of keys."""

    rsa_bits: int
    types: frozenset[str]


def sshd_rules() -> KeyRules:
    """The rules of the image's sshd, as it tells them (9 ms)."""
    asked = subprocess.run([SSHD, "-G"], capture_output=True, text=True, check=True)
    settings = dict(line.partition(" ")[::2] for line in asked.stdout.splitlines())
    types = settings["pubkeyacceptedalgorithms"].split(",")
    return KeyRules(int(settings["requiredrsasize"]), frozenset(types))


def operator_keys(environment: Mapping[str, str]) -> list[str]:
    """All public keys the operator gave that can log in, without duplicates, in the order given.

    Raises:
        EntrypointError: a file can't be read, holds no key that can log in, or has a line that is
            no public key.
    """
    sources = list(key_sources(environment))
    rules = sshd_rules() if sources else None
    found: dict[str, None] = {}
    for source, text in sources:
        assert rules
        found.update(dict.fromkeys(checked(text, source, rules)))
    return list(found)


def key_sources(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Name and text of each place where the operator put keys.

    Raises:
        EntrypointError: one can't be read.
    """
    value = credential(environment, "SSH_PUBLIC_KEY")
    if value is not None:
        yield environment.get("SSH_PUBLIC_KEY_FILE", "SSH_PUBLIC_KEY"), value
    files = mounted_files()
    if SECRET.exists() and "SSH_PUBLIC_KEY_FILE" not in environment:
        files.append(SECRET)
    for file in files:
        yield str(file), read_secret(file, "The mount")


def mounted_files() -> list[Path]:
    """The authorized_keys files that the operator mounted, or whose folder they mounted."""
    points = mounts()
    return [path for path in MOUNTED if path in points or (path.parent in points and path.exists())]


def checked(text: str, source: str, rules: KeyRules) -> list[str]:
    """The keys in a text that can log in; each other one is told with its cause.

    Raises:
        EntrypointError: a line is no public key (its number is named), or no key can log in.
    """
    if "PRIVATE KEY-----" in text:
        raise EntrypointError(
            f"{source} holds a PRIVATE key. Keep it to yourself; "
            "give the public one, the file in .pub."
        )
    usable, refused = [], []
    for number, line in key_lines(text):
        try:
            cause = refusal(line, rules)
        except ValueError as error:
            # The line is not shown: it may be a password that was put there by mistake.
            raise EntrypointError(
                f"Line {number} of {source} is no public key. "
                "Needed is a line as in ~/.ssh/id_ed25519.pub: ssh-ed25519 AAAA… name"
            ) from error
        if cause is None:
            usable.append(line)
        else:
            refused.append(f"the key in line {number} of {source} can't log in: {cause}")
    if not usable and refused:
        raise EntrypointError("; ".join(refused))
    if not usable:
        raise EntrypointError(
            f"{source} holds no public key; put the line of ~/.ssh/id_ed25519.pub into it."
        )
    for sentence in refused:
        warn(sentence)
    return usable


def key_lines(text: str) -> Iterator[tuple[int, str]]:
    """Number and text of each line that should be a key."""
    for number, line in enumerate(text.splitlines(), start=1):
        key = line.strip()
        if key and not key.startswith("#"):
            yield number, key


def refusal(line: str, rules: KeyRules) -> str | None:
    """Why sshd will refuse this key at the login, or None.

    Raises:
        ValueError: it is no public key.
    """
    new_key = "make another one: ssh-keygen -t ed25519"
    key = KEY.search(line)
    if key and key[1] == "ssh-dss":  # ssh-keygen knows it no more
        return f"it is a DSA key, which OpenSSH no longer knows; {new_key}"
    seen = subprocess.run(
        ["ssh-keygen", "-l", "-f", "-"],
        input=f"{line}\n",
        capture_output=True,
        text=True,
        check=False,
    )
    if seen.returncode or key is None:
        raise ValueError("no public key")
    options = line[: key.start()].strip()
    unknown = unknown_option(options)
    if unknown is not None:
        return f"{unknown!r} in front of it is no option that sshd knows"
    kind, bits = key[1], int(seen.stdout.split()[0])
    if "-cert-v" in kind and "cert-authority" not in options:
        return "it is a certificate; give the public key itself"
    if kind == "ssh-rsa" and bits < rules.rsa_bits:
        return f"an RSA key of {bits} bits, and {rules.rsa_bits} are needed; {new_key}"
    if kind not in rules.types and kind != "ssh-rsa":
        return f"sshd here takes no {kind} keys; {new_key}"
    return None


def unknown_option(options: str) -> str | None:
    """The first of a key's options that sshd does not know, or None."""
    rest = options
    while rest:
        option = OPTION.match(rest)
        if option is None or option[1].lower() not in OPTIONS:
            return option[1] if option else rest
        rest = rest[option.end() :]
    return None
