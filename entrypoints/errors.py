"""Errors and notes for the person who reads the container's log."""

import sys


class EntrypointError(Exception):
    """What was found, what is needed, what to do. The container ends with `exit_code` (2: a setting
    is wrong)."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def say(text: str) -> None:
    """Print one line to stderr at once: the log of `docker logs`."""
    print(text, file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """Print something that works less well than it could, with what mends it."""
    say(f"warning: {text}")
