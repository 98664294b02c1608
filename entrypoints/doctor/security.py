"""Who works here, PID 1, and whether secrets can be read by whom they are for."""

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from entrypoints import credentials
from entrypoints.authorized_keys import SECRET as KEYS_SECRET
from entrypoints.authorized_keys import operator_keys
from entrypoints.doctor.finding import Finding
from entrypoints.errors import EntrypointError
from entrypoints.identity import Identity
from entrypoints.paths import SECRETS

# Inits that wait in sigtimedwait(2): the kernel shows a signal waited for neither as blocked nor as
# caught.
WAITING = ("tini", "docker-init", "dumb-init")


def mode_credentials(environment: Mapping[str, str]) -> list[Finding]:
    """The credentials of the modes, read as at start, before privileges are dropped.

    No value is told.
    """
    findings = []
    for name in credentials.VARIABLES:
        try:
            given = credentials.credential(environment, name) is not None
            if name == "SSH_PUBLIC_KEY":
                given = bool(operator_keys(environment))
        except EntrypointError as error:
            findings.append(
                Finding("secrets", "error", str(error), f"{name} or {name}_FILE that can be read")
            )
            continue
        if given:
            findings.append(Finding("secrets", "ok", f"{name} can be read"))
    return findings or [Finding("secrets", "ok", "none is set; each mode makes its own at start")]


def mounted_secrets(
    environment: Mapping[str, str], identity: Identity, folder: Path = SECRETS
) -> list[Finding]:
    """Mounted secrets that programs can't read. `mode_credentials` judges those of the modes."""
    of_modes = {environment.get(f"{name}_FILE") for name in credentials.VARIABLES} | {
        str(KEYS_SECRET)
    }
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    closed = [file for file in files if str(file) not in of_modes and not os.access(file, os.R_OK)]
    return [
        Finding(
            "secrets",
            "warning",
            f"{file} (mode {credentials.mode_of(file)}) can't be read as uid {identity.uid}",
            "read permission for programs",
            (
                f"On the host: chown {identity.uid} the file, or chmod 0444 it in a "
                "folder of mode 0700"
            ),
        )
        for file in closed
    ]


def first_process(status: Path = Path("/proc/1/status")) -> Finding:
    """PID 1 gets no default signal handling from the kernel and inherits all orphans: it must do
    both itself."""
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
    name = lines["Name"].strip()
    handled = int(lines["SigCgt"], 16) | int(lines["SigBlk"], 16)
    lacks = []
    if name not in WAITING and not handled >> (signal.SIGTERM - 1) & 1:
        lacks.append("does not take SIGTERM, so that docker stop kills after 10 s")
    if not reaps():
        lacks.append("does not reap, so that dead processes pile up")
    if lacks:
        do = "docker run --init, or keep the image's entrypoint (tini)"
        return Finding(
            "pid 1",
            "warning",
            f"{name} {' and '.join(lacks)}",
            "an init that forwards and reaps",
            do,
        )
    return Finding("pid 1", "ok", f"{name} takes SIGTERM and reaps")


def reaps(timeout_s: float = 1.0) -> bool:
    """Whether an orphan's entry goes away after its death: one is made and watched.

    A child makes the orphan, tells its pid, and ends. The orphan ends when it sees that it was
    adopted.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        parent = os.getpid()
        orphan = os.fork()
        if orphan == 0:
            while os.getppid() == parent:
                time.sleep(0.001)
            os._exit(0)
        os.write(writer, str(orphan).encode())
        os._exit(0)
    os.close(writer)
    orphan_pid = int(os.read(reader, 32))
    os.close(reader)
    os.waitpid(child, 0)
    deadline = time.monotonic() + timeout_s
    while Path(f"/proc/{orphan_pid}").exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
