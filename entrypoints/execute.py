"""Becoming the program."""

import os
import shutil
from collections.abc import Mapping, Sequence
from typing import NoReturn

from entrypoints import modes
from entrypoints.errors import EntrypointError


def execute(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Replace this process by the program: signals and exit codes are the program's own.

    Raises:
        EntrypointError: there is no such program (exit code 127), or it can't be run (126), as in a
            shell.
    """
    program = shutil.which(command[0], path=environment.get("PATH") or os.defpath)
    if program is None:
        names = ", ".join(mode.name for mode in modes.NAMED)
        raise EntrypointError(
            f"{command[0]!r} is neither a mode of this image ({names}) nor a program in it.", 127
        )
    try:
        os.execve(program, list(command), dict(environment))
    except OSError as error:
        raise EntrypointError(f"{program} can't be run: {error.strerror}.", 126) from error
