"""Becoming the program."""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from entrypoints import modes, python
from entrypoints.errors import EntrypointError, warn
from entrypoints.paths import VENV

FOLDERS = os.pathsep.join((str(VENV / "bin"), os.defpath))  # where programs are, whatever PATH is


def execute(
    command: Sequence[str], environment: Mapping[str, str], attended: bool = False
) -> NoReturn:
    """Replace this process by the program, or stay beside it where it is `attended`: signals and
    exit codes are the program's own.

    Raises:
        EntrypointError: there is no such program (exit code 127), or it can't be run (126), as in a
            shell; or it is Python's and a variable keeps Python from starting (2).
    """
    path = environment.get("PATH") or os.defpath
    program = shutil.which(command[0], path=path)
    if program is None:
        elsewhere = shutil.which(command[0], path=FOLDERS)
        if elsewhere:
            raise EntrypointError(
                f"{command[0]!r} is not in PATH={path}, but it is {elsewhere}. Leave PATH as the "
                f"image has it, or put {Path(elsewhere).parent} into yours.",
                127,
            )
        names = ", ".join(mode.name for mode in modes.NAMED)
        raise EntrypointError(
            f"{command[0]!r} is neither a mode of this image ({names}) nor a program in it.", 127
        )
    refusal = python.refusal(environment)
    if refusal and Path(program).is_relative_to(VENV):
        raise EntrypointError(refusal)
    if refusal:
        warn(refusal)
    try:
        if attended:
            from entrypoints import ended  # late: other starts have no use for it

            ended.attend(program, command, environment)
        os.execve(program, list(command), dict(environment))
    except OSError as error:
        raise EntrypointError(f"{program} can't be run: {error.strerror}.", 126) from error
