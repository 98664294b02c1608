"""Reading the options a caller gave to a program, and becoming that program."""

import json
import os
import shutil
import socket
from collections.abc import Mapping, Sequence
from typing import NoReturn

from entrypoints.errors import EntrypointError
from entrypoints.paths import MODE


def option(arguments: Sequence[str], names: Sequence[str]) -> str | None:
    """The value of the last of these options in `--name=value` or `--name value` form, or None."""
    value = None
    for position, argument in enumerate(arguments):
        name, equals, text = argument.partition("=")
        if name in names:
            value = text if equals else next(iter(arguments[position + 1 :]), "")
    return value


def published_port(environment: Mapping[str, str], name: str, port: int) -> str:
    """The host's port for a printed address: $NAME if it is a number, else the container's own.

    Kubernetes sets JUPYTER_PORT=tcp://10.0.0.1:8888 for a service of that name; that is no port.
    """
    text = environment.get(name, "").strip()
    return text if text.isdecimal() else str(port)


def require_free_port(port: int, what: str) -> None:
    """See that the port can be listened on.

    Raises:
        EntrypointError: it is no port; or another program has it (with `--network host`, one of the
        host), or it is
            reserved for root.
    """
    if not 0 < port < 1 << 16:
        raise EntrypointError(f"{what} can't listen on port {port}; give a number from 1 to 65535.")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
    except OSError as error:
        raise EntrypointError(
            f"{what} can't listen on port {port}: {error.strerror}. Choose another port, or stop what has this one."
        ) from error


def write_mode(**facts: str | int) -> None:
    """Write down which mode runs and where it listens, for the health check."""
    MODE.write_text(json.dumps(facts))


def become_program(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Replace this process by the program: signals and exit codes are the program's own.

    Raises:
        EntrypointError: there is no such program (exit code 127), or it can't be run (126), as in a
        shell.
    """
    program = shutil.which(command[0], path=environment.get("PATH", os.defpath))
    if program is None:
        raise EntrypointError(
            f"{command[0]!r} is neither a mode of this image (jupyter, ssh, train, doctor) nor a program in it.",
            127,
        )
    try:
        os.execve(program, list(command), dict(environment))
    except OSError as error:
        raise EntrypointError(f"{program} can't be run: {error.strerror}.", 126) from error
