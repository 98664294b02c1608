"""How long each mode takes to open and to close, and what it holds while nobody uses it, as
Markdown: medians over interleaved runs; and how long `import torch` takes.

    python3 -m benchmarks.modes [--repeats 5]

`bare` is the same program in the same image without our entrypoint: the difference is what the
entrypoint costs. Start is counted from `docker start` on a created container to the first answer on
its port; stop is `docker stop`. Idle memory is the anonymous memory of all processes (RssAnon in
proc_pid_status(5)) three seconds later: what the kernel could not drop.
"""

import argparse
import re
import socket
import statistics
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from host.build import IMAGE
from host.engine import require_engine


@dataclass(frozen=True)
class Mode:
    """One way to start the image, and how its readiness is seen."""

    name: str
    port: int
    options: Sequence[str]
    command: Sequence[str]
    answers: Callable[[int], bool]


def http_answers(port: int) -> bool:
    """Whether JupyterLab answers on this port of 127.0.0.1."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api", timeout=1) as reply:
            return bool(reply.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def ssh_answers(port: int) -> bool:
    """Whether sshd sends its banner on this port of 127.0.0.1."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            connection.settimeout(1)
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False


JUPYTER = ["lab", "--ip=0.0.0.0", "--port=8888", "--no-browser", "--allow-root"]
MODES = (
    Mode("jupyter, bare", 8888, ["--entrypoint", "/opt/venv/bin/jupyter"], JUPYTER, http_answers),
    Mode("jupyter", 8888, [], ["jupyter"], http_answers),
    Mode("ssh", 2222, [], ["ssh"], ssh_answers),
)


@dataclass(frozen=True)
class Run:
    """One start of a mode."""

    opened: float
    """Seconds to the first answer."""
    closed: float
    """Seconds of `docker stop`."""
    idle: int
    """KiB of memory in between."""


def idle_memory(client: str, name: str) -> int:
    """KiB of anonymous memory of all processes in a container, but the one that looks."""
    time.sleep(3)
    look = "for p in /proc/[0-9]*; do [ $p = /proc/$$ ] || cat $p/status; done 2>/dev/null || true"
    said = subprocess.run(
        [client, "exec", "-u", "root", name, "sh", "-c", look],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return sum(int(kib) for kib in re.findall(r"^RssAnon:\s*(\d+) kB", said, re.MULTILINE))


def import_seconds(client: str, module: str) -> list[float]:
    """Seconds of `import module` in five new processes, the first of six left out."""
    code = f"import time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"
    loop = f"for i in 1 2 3 4 5 6; do python -c '{code}'; done"
    command = [client, "run", "--rm", IMAGE, "bash", "-c", loop]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [float(line) for line in said.split()][1:]


def measure(client: str, mode: Mode) -> Run:
    """One run of a mode."""
    name = f"bench-{uuid.uuid4().hex[:8]}"
    create = [
        client,
        "create",
        "--name",
        name,
        "--publish",
        f"127.0.0.1::{mode.port}",
        *mode.options,
        IMAGE,
        *mode.command,
    ]
    subprocess.run(create, check=True, capture_output=True)
    try:
        begin = time.monotonic()
        subprocess.run([client, "start", name], check=True, capture_output=True)
        shown = subprocess.run(
            [client, "port", name], check=True, capture_output=True, text=True
        ).stdout
        port = int(shown.split(":")[-1])
        while not mode.answers(port):
            if time.monotonic() - begin > 120:
                raise SystemExit(f"{mode.name} did not answer within 120 s")
            time.sleep(0.02)
        opened = time.monotonic() - begin
        idle = idle_memory(client, name)
        begin = time.monotonic()
        subprocess.run([client, "stop", name], check=True, capture_output=True)
        return Run(opened, time.monotonic() - begin, idle)
    finally:
        subprocess.run(
            [client, "rm", "--force", "--volumes", name], check=False, capture_output=True
        )


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    client = require_engine()
    times: defaultdict[str, list[Run]] = defaultdict(list)
    for _ in range(repeats):
        for mode in MODES:  # interleaved, so that a slow minute of the machine meets all alike
            times[mode.name].append(measure(client, mode))
    print("| mode | start, s (median, min–max) | stop, s (median) | idle memory, MiB (median) |")
    print("| --- | --- | --- | --- |")
    for name, runs in times.items():
        opened = [run.opened for run in runs]
        closed = statistics.median(run.closed for run in runs)
        idle = statistics.median(run.idle for run in runs) / 1024
        print(
            f"| {name} | {statistics.median(opened):.2f} ({min(opened):.2f}–{max(opened):.2f}) | "
            f"{closed:.2f} | {idle:.0f} |"
        )
    print()
    for module in ("torch", "torchvision", "amptrain.train"):
        took = statistics.median(import_seconds(client, module))
        print(f"`import {module}`: {took:.2f} s")


if __name__ == "__main__":
    main()
