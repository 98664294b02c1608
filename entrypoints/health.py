"""HEALTHCHECK: asks the mode that runs whether it answers. Imports nothing heavy: it runs every 30
s for ever."""

import json
import ssl
import urllib.request
from pathlib import Path

from entrypoints.doctor.gpu_watch import gpu_lost
from entrypoints.errors import say
from entrypoints.paths import MODE

LISTEN = "0A"  # the state's number in proc(5), net/tcp


def main() -> int:
    """Exit code 0 for healthy, 1 for not, as Docker wants it; one line says why."""
    try:
        facts = json.loads(MODE.read_text())
    except (OSError, ValueError) as error:
        say(f"not started yet: {error}")
        return 1
    try:
        problem = CHECKS.get(facts["mode"], no_check)(facts) or gpu_lost()
    except OSError as error:
        problem = f"{facts['mode']} does not answer on port {facts['port']}: {error}"
    if problem:
        say(problem)
    return 1 if problem else 0


def jupyter(facts: dict[str, str | int]) -> str | None:
    """Jupyter answers /api without a login; the certificate is not what is asked here."""
    context = ssl._create_unverified_context() if facts["scheme"] == "https" else None
    url = f"{facts['scheme']}://127.0.0.1:{facts['port']}{facts['base']}api"
    with urllib.request.urlopen(url, timeout=4, context=context) as reply:
        return None if reply.status == 200 else f"Jupyter answered {reply.status}"


def ssh(facts: dict[str, str | int]) -> str | None:
    """sshd listens. Asked of the kernel: a connection that says nothing would be a line in sshd's
    log each time."""
    listening = f":{int(facts['port']):04X}"
    tables = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
    sockets = (
        line.split()
        for table in tables
        if table.exists()
        for line in table.read_text().splitlines()[1:]
    )
    if any(fields[1].endswith(listening) and fields[3] == LISTEN for fields in sockets):
        return None
    return f"nothing listens on port {facts['port']}"


def no_check(facts: dict[str, str | int]) -> str | None:
    """A program of the user's is healthy as long as it runs, and Docker sees that by itself."""
    return None


CHECKS = {"jupyter": jupyter, "ssh": ssh}
