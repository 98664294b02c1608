"""Lint, types and the host's tests: what can be seen without a container, in under two minutes.

    python3 -m host.check [arguments of pytest…]

The tools come from requirements/host-tests.lock; no Docker is needed.
"""

from __future__ import annotations

import subprocess
import sys

from host.errors import HostError
from host.shell import help_asked
from host.test import has_ensurepip, test_python
from host.versions import ROOT


def main(arguments: list[str]) -> int:
    """Command line of this module."""
    if help_asked(arguments, __doc__):
        return 0
    try:
        if not has_ensurepip():
            raise HostError("This Python can make no virtual environment; install python3-venv.")
        python = str(test_python())
    except HostError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    pytest = [python, "-m", "pytest", "tests/host", "-m", "not engine", *arguments]
    return subprocess.run(pytest, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
