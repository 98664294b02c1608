"""Which image `host.build` makes: its versions, its tag, its commit and the hash of its locks.

All of it stands in requirements/torch-$TORCH/versions.env and its locks; $TORCH chooses another
folder.

    python3 -m host.versions         print them
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from pathlib import Path

from entrypoints.versions import read_versions
from host.errors import HostError
from host.shell import help_asked, output

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ("cuda", "torch", "tools")  # what the image holds, in the order of its layers


def default_torch() -> str:
    """The PyTorch that the Dockerfile builds when nobody asks for another."""
    found = re.search(r"^ARG TORCH=(.+)$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.M)
    if not found:
        raise HostError("The Dockerfile has no line ARG TORCH=…, which chooses a folder of locks.")
    return found[1]


TORCH = os.environ.get("TORCH") or default_torch()
TAG = "v" + ".".join(TORCH.split(".")[:2])  # moves; RELEASE in the file below stays
FOLDER = ROOT / "requirements" / f"torch-{TORCH}"
VERSIONS_FILE = FOLDER / "versions.env"


def versions() -> dict[str, str]:
    """The names and values of the folder's versions.env.

    Raises:
        HostError: there is no such folder.
    """
    if not VERSIONS_FILE.is_file():
        there = ", ".join(sorted(path.name for path in FOLDER.parent.glob("torch-*")))
        raise HostError(
            f"TORCH={TORCH} needs a folder {FOLDER.name} in requirements/; there is {there}."
        )
    return read_versions(VERSIONS_FILE)


def locks_hash() -> str:
    """SHA-256 of the image's locks, one behind the other, as container/build/finish takes it."""
    return hashlib.sha256(
        b"".join((FOLDER / f"{name}.lock").read_bytes() for name in LOCKS)
    ).hexdigest()


def revision() -> str:
    """The commit that is built, `-dirty` behind it with changes on top; `unknown` outside git."""
    git = ["git", "-C", str(ROOT), "-c", "safe.directory=*"]
    return (
        output([*git, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]) or "unknown"
    )


def build_arguments() -> list[str]:
    """Options for `docker buildx build`, in the names of the Dockerfile."""
    values = {
        "TORCH": TORCH,
        "RELEASE": versions()["RELEASE"],
        "REVISION": revision(),
        "LOCKS": locks_hash(),
    }
    return [f"--build-arg={name}={value}" for name, value in values.items()]


def main() -> int:
    """Command line of this module."""
    if help_asked(sys.argv[1:], __doc__):
        return 0
    try:
        for name, value in versions().items():
            print(f"{name}={value}")
        print(f"REVISION={revision()}\nLOCKS={locks_hash()}")
    except HostError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
