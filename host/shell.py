"""Running other programs from the host tools."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from host.errors import HostError


def say(text: str) -> None:
    """Print one line of progress to stderr, so that stdout stays free for results."""
    print(f"==> {text}", file=sys.stderr, flush=True)


def help_asked(arguments: Sequence[str], text: str | None) -> bool:
    """Print a module's own text where its first argument asks for help; whether it did."""
    asked = list(arguments[:1]) in (["--help"], ["-h"])
    if asked:
        print((text or "").strip())
    return asked


def run(command: Sequence[str]) -> None:
    """Run a program whose output the user sees.

    Raises:
        HostError: it ended with a non-zero exit code, or is not installed.
    """
    try:
        code = subprocess.run(command, check=False).returncode
    except FileNotFoundError as error:
        raise HostError(
            f"The program {command[0]!r} is not installed; install it and run this again."
        ) from error
    if code:
        raise HostError(f"This command ended with exit code {code}: {' '.join(command)}")


def output(command: Sequence[str], timeout_s: float = 60) -> str | None:
    """Return a program's stripped stdout, or None where it is missing, fails or takes longer than
    `timeout_s`."""
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=timeout_s
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
