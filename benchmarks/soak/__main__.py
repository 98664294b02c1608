"""A long run in the image: training that is killed, logins, kernels, doctor; then what grew, as
Markdown.

    python3 -m benchmarks.soak [--minutes 10] [--rounds 200]     or: make soak MINUTES=10

A round is one ssh login and one kernel started and stopped; every tenth one, doctor and health
check run in both containers. Meanwhile a training run is killed again and again, and in the end
compared with one that nobody disturbed. Every container has two CPUs and 6 GB. It ends after the
rounds, or after the minutes. Exit code 1: something leaked, or the two runs of training differ.
"""

import argparse
import sys
import threading
import time
import uuid

from benchmarks.soak.rounds import Jupyter, Sample, Sshd, Used
from benchmarks.soak.training import Run
from host.engine import require_engine

EVERY = 10  # rounds between two samples
WARM_UP = 0.2  # of the rounds: caches fill, the allocator takes its share
GROWTH = 1024  # KiB per 100 rounds that are taken for noise of an allocator


def slope(samples: list[tuple[int, float]]) -> float:
    """Growth per 100 rounds: the straight line of least squares through (round, value)."""
    middle = sum(number for number, _ in samples) / len(samples)
    height = sum(value for _, value in samples) / len(samples)
    spread = sum((number - middle) ** 2 for number, _ in samples)
    rise = sum((number - middle) * (value - height) for number, value in samples)
    return 100 * rise / spread if spread else 0.0


def value(sample: Sample, row: str) -> float:
    """One figure of a sample; `program/memory` is one inside another."""
    outer, _, inner = row.partition("/")
    return float(sample[outer][inner] if inner else sample[outer])


ROWS = {
    "pid 1/memory": "PID 1, KiB",
    "program/memory": "program, KiB",
    "program/threads": "program's threads",
    "program/files": "program's open files",
    "pid 1/files": "PID 1's open files",
    "processes": "processes",
    "zombies": "zombies",
    "left files": "files in /tmp, /run, /dev/shm, home, workspace",
}


def table(used: Used, title: str) -> tuple[list[str], list[str]]:
    """Rows of the table for one container, and sentences on what leaked."""
    rounds = used.samples[-1][0]
    settled = [one for one in used.samples if one[0] >= WARM_UP * rounds]
    lines, leaks = [], []
    for row, words in ROWS.items():
        series = [(number, value(sample, row)) for number, sample in settled]
        first, last, grows = series[0][1], series[-1][1], slope(series)
        most = max(height for _, height in series)
        lines.append(
            f"| {title}: {words} | {first:,.0f} | {last:,.0f} | {most:,.0f} | {grows:+,.1f} |"
        )
        leaked = grows > GROWTH if "memory" in row else last > first
        if leaked or (row == "zombies" and last):
            leaks.append(f"{title}: {words} went from {first:,.0f} to {last:,.0f}")
    return lines, leaks


def compare(alone: Run, killed: Run) -> list[str]:
    """Sentences on how the killed run differs from the other."""
    errors = [*alone.errors, *killed.errors]
    if errors:
        return [f"Training failed: {text}" for text in errors]
    found = []
    if alone.curve() != killed.curve() or len(alone.curve()) != alone.steps:
        found.append("The killed run's loss curve is another.")
    if alone.weights() != killed.weights():
        found.append("The killed run's weights are others.")
    return found


def main() -> int:
    """Command line of this module."""
    parser = argparse.ArgumentParser(
        prog="python3 -m benchmarks.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=10, help="at most 30")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--steps", type=int, default=1500, help="of the training runs")
    asked = parser.parse_args()
    if not 0 < asked.minutes <= 30 or asked.rounds < 1 or asked.steps < 1:
        parser.error("--minutes is from 0 to 30, --rounds and --steps are at least 1")
    client, name = require_engine(), f"soak-{uuid.uuid4().hex[:8]}"
    begin = time.monotonic()
    deadline = begin + 60 * asked.minutes
    alone = Run(client, f"{name}-alone", asked.steps)
    killed = Run(client, f"{name}-killed", asked.steps)
    containers: list[Used] = []
    try:
        alone.train(deadline)
        sshd, jupyter = Sshd(client, f"{name}-ssh"), None
        containers.append(sshd)
        jupyter = Jupyter(client, f"{name}-jupyter")
        containers.append(jupyter)
        training = threading.Thread(target=killed.train, args=(deadline, True))
        training.start()
        done = 0
        while done < asked.rounds and time.monotonic() < deadline:
            if done % EVERY == 0:
                for one in containers:
                    one.check()
                    one.probe(done)
            sshd.round()
            jupyter.round()
            done += 1
        training.join()
        time.sleep(5)  # what ends takes a moment
        for one in containers:
            one.probe(done)
        findings = compare(alone, killed)
    finally:
        for thing in (*containers, alone, killed):
            thing.remove()
    checks = (done + EVERY - 1) // EVERY
    print(
        f"{done} logins, {done} kernels, {checks} rounds of doctor and health check in each of two "
        f"containers, {time.monotonic() - begin:.0f} s in all; training of {asked.steps} steps "
        f"killed {killed.kills} times, {killed.seconds:.0f} s against {alone.seconds:.0f} s.\n"
    )
    print("| what | after warm-up | at the end | most | per 100 rounds |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for title, one in (("ssh", sshd), ("jupyter", jupyter)):
        lines, leaks = table(one, title)
        findings += leaks
        print("\n".join(lines))
    print("\n" + ("\n".join(findings) or "Nothing leaked, and both runs of training are the same."))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
