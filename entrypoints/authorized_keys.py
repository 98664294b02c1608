"""The operator's public keys: where they may come from, and that each of them is one."""

import subprocess
from collections.abc import Mapping
from pathlib import Path

from entrypoints.credentials import credential, read_secret
from entrypoints.errors import EntrypointError
from entrypoints.mounts import mounts
from entrypoints.paths import HOME, SECRETS

# Where people mount an authorized_keys file. Only a mount counts: what the user `dev` writes into
# their home is for `dev` alone, and must not become a key of root at the next start.
MOUNTED = (
    HOME / ".ssh/authorized_keys",
    Path("/root/.ssh/authorized_keys"),
    Path("/etc/ssh/authorized_keys"),
)
SECRET = SECRETS / "ssh_public_key"


def operator_keys(environment: Mapping[str, str]) -> list[str]:
    """All public keys the operator gave, without duplicates, in the order given.

    Raises:
        EntrypointError: a file can't be read, holds no key, or has a line that is no public key.
    """
    found: dict[str, None] = {}
    value = credential(environment, "SSH_PUBLIC_KEY")
    if value is not None:
        source = environment.get("SSH_PUBLIC_KEY_FILE", "SSH_PUBLIC_KEY")
        found.update(dict.fromkeys(checked(value, source)))
    points = mounts()
    files = [
        path for path in MOUNTED if path in points or (path.parent in points and path.exists())
    ]
    if SECRET.exists() and "SSH_PUBLIC_KEY_FILE" not in environment:
        files.append(SECRET)
    for file in files:
        found.update(dict.fromkeys(checked(read_secret(file, "The mount"), str(file))))
    return list(found)


def checked(text: str, source: str) -> list[str]:
    """The keys in a text, each seen by ssh-keygen.

    Raises:
        EntrypointError: a line is no public key; its number is named.
    """
    if "PRIVATE KEY-----" in text:
        raise EntrypointError(
            f"{source} holds a PRIVATE key. Keep it to yourself; give the public one, the file in .pub."
        )
    keys = []
    for number, line in enumerate(text.splitlines(), start=1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        seen = subprocess.run(
            ["ssh-keygen", "-l", "-f", "-"],
            input=f"{key}\n",
            capture_output=True,
            text=True,
            check=False,
        )
        if seen.returncode:
            raise EntrypointError(
                f"Line {number} of {source} is no public key. "  # not shown: it may be a password put there by mistake
                "Needed is a line as in ~/.ssh/id_ed25519.pub: ssh-ed25519 AAAA… name"
            )
        keys.append(key)
    if not keys:
        raise EntrypointError(
            f"{source} holds no public key; put the line of ~/.ssh/id_ed25519.pub into it."
        )
    return keys
