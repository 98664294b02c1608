"""`amptrain check --run -- COMMAND`: runs the user's own program, and judges what was seen."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from amptrain.check.finding import Finding
from amptrain.check.judge import Record, judge, summary
from amptrain.errors import ConfigError
from amptrain.words import counted

STARTUP = Path(__file__).resolve().parent / "startup"
TOLD = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}
FROM_KERNEL = 128  # si_code SI_KERNEL: a terminal's Ctrl-C, which the program gets as well


def run_watched(command: Sequence[str], stdout: int | None) -> tuple[int, list[Record]]:
    """Run `command`, watched. Returns its exit code, 128 and the signal for one that ended it, and
    the record of each of its processes that made a step. Raises ConfigError if it can't be started.
    """
    with tempfile.TemporaryDirectory(prefix="amptrain-check-") as folder:
        others = os.environ.get("PYTHONPATH")
        path = f"{STARTUP}{os.pathsep}{others}" if others else str(STARTUP)
        environment = {**os.environ, "PYTHONPATH": path, "AMPTRAIN_WATCH": folder}
        code = _run(command, environment, stdout)
        records = [json.loads(file.read_text()) for file in sorted(Path(folder).glob("*.json"))]
    return code, records


def _run(command: Sequence[str], environment: dict[str, str], stdout: int | None) -> int:
    """Start the command, hand it the signals that come, and wait for its end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, TOLD | {signal.SIGCHLD})
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=stdout,
            # Safe, for this process has one thread; the program starts with no signal blocked.
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, before),  # noqa: PLW1509
        )
        while process.poll() is None:
            told = signal.sigwaitinfo(TOLD | {signal.SIGCHLD})
            if told.si_signo != signal.SIGCHLD and told.si_code != FROM_KERNEL:
                process.send_signal(told.si_signo)
    except OSError as error:
        raise ConfigError(f"{command[0]} cannot be run: {error.strerror}.") from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def findings(records: Sequence[Record]) -> list[Finding]:
    """What the records show, each once: the processes of one run show the same."""
    found: dict[tuple[object, str], Finding] = {}
    for record in records:
        for finding in judge(record):
            found.setdefault((finding.place, finding.rule.number), finding)
    return [found[key] for key in sorted(found, key=str)]


def tell(records: Sequence[Record]) -> None:
    """What was seen, on stderr."""
    if not records:
        print("amptrain: no step of a torch optimizer was seen.", file=sys.stderr)
        return
    most = max(records, key=lambda record: int(record["steps"]))
    others = f"; {counted(len(records), 'process')}" if len(records) > 1 else ""
    print(f"amptrain: {summary(most)}{others}", file=sys.stderr)
