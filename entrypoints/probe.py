"""One HTTP request to a server in this container, for the health check."""

import http.client
import socket
import ssl
from collections.abc import Mapping
from typing import Any

ANY_ADDRESS = ("", "0.0.0.0", "::", "*")
TIMEOUT_S = 4  # below the HEALTHCHECK's own


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


def status_of(info: Mapping[str, Any], path: str) -> int:
    """The status with which the server answers `path`. `info` is what Jupyter writes down.

    Raises:
        OSError: it does not answer, or no HTTP.
    """
    connection = connection_to(info)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except http.client.HTTPException as error:
        raise OSError(f"no HTTP: {error!r}") from error
    finally:
        connection.close()


def connection_to(info: Mapping[str, Any]) -> http.client.HTTPConnection:
    """A connection to the server's socket or port; http.client follows no proxy variable."""
    if info.get("sock"):
        return UnixConnection(info["sock"])
    host = "127.0.0.1" if info["hostname"] in ANY_ADDRESS else info["hostname"]
    if not info["secure"]:
        return http.client.HTTPConnection(host, info["port"], timeout=TIMEOUT_S)
    # Whether the certificate is good is the browser's question, not the health check's.
    context = ssl._create_unverified_context()
    return http.client.HTTPSConnection(host, info["port"], timeout=TIMEOUT_S, context=context)
