"""Ports: the one the host publishes, and whether one is free in here."""

import socket
from collections.abc import Mapping
from pathlib import Path

from entrypoints.errors import EntrypointError

LISTEN = "0A"  # the state's number in proc(5), net/tcp


def published_port(environment: Mapping[str, str], name: str, port: int) -> str:
    """The host's port for a printed address: $NAME if it is a number, else the container's own.

    Kubernetes sets JUPYTER_PORT=tcp://10.0.0.1:8888 for a service of that name; that is no port.
    """
    text = environment.get(name, "").strip()
    return text if text.isdecimal() else str(port)


def require_free_port(port: int, what: str) -> None:
    """See that the port can be listened on.

    Raises:
        EntrypointError: it is no port, it is reserved for root, or another program has it (with
            `--network host`, one of the host).
    """
    if not 0 < port < 1 << 16:
        raise EntrypointError(f"{what} can't listen on port {port}; give a number from 1 to 65535.")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
    except OSError as error:
        raise EntrypointError(
            f"{what} can't listen on port {port}: {error.strerror}. "
            "Choose another port, or stop what has this one."
        ) from error


def is_listened_on(port: int) -> bool:
    """Whether a program listens on the port. The kernel is asked, no connection is made."""
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        lines = table.read_text().splitlines()[1:] if table.exists() else []
        for _, address, _, state, *_ in map(str.split, lines):
            if state == LISTEN and address.endswith(f":{port:04X}"):
                return True
    return False
