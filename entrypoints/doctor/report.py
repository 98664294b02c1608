"""`doctor`: what was found in this container and on its host, what is needed, what to do.

Exit code: 0 when there is nothing to do (ok and notes), 1 when something works less well than it
could (a warning), 2 when something asked for will not work (an error). A machine without a GPU is a
note: the CPU may be what is wanted. It prepares nothing and changes nothing, so that it can be
asked at any time in a running container, too.
"""

import json
import os
import shutil
import sys
import textwrap
import threading
from collections.abc import Callable, Sequence

from entrypoints.doctor import gpu, memory, network, pytorch, security, storage
from entrypoints.doctor.finding import SEVERITIES, Finding
from entrypoints.errors import EntrypointError
from entrypoints.identity import choose_identity, drop_privileges
from entrypoints.versions import versions

BRIEF_S = 0.03  # what a GPU that sleeps may cost at start; its first use by torch wakes it anyway
EXIT_CODES = {"ok": 0, "note": 0, "warning": 1, "error": 2}
COLOURS = {"ok": "32", "note": "36", "warning": "33", "error": "31"}
LABEL = 10  # columns of severity and check


def main(argv: list[str]) -> int:
    """Print the report, and return the exit code of its worst finding."""
    import argparse  # late: the container's start does without it

    parser = argparse.ArgumentParser(
        prog="doctor", description="What was found, what is needed, what to do."
    )
    parser.add_argument(
        "--json", action="store_true", help="for programs: a list of findings, and the exit code"
    )
    options = parser.parse_args(argv)
    findings = examine(dict(os.environ))
    code = max(EXIT_CODES[finding.severity] for finding in findings)
    if options.json:
        print(
            json.dumps(
                {"exit_code": code, "findings": [as_json(finding) for finding in findings]},
                indent=2,
            )
        )
    else:
        width = min(shutil.get_terminal_size((100, 24)).columns, 120)
        print(report(findings, width, sys.stdout.isatty() and not os.environ.get("NO_COLOR")))
    return code


def examine(environment: dict[str, str]) -> list[Finding]:
    """All checks: credentials of the modes as root reads them, the rest as the user."""
    findings = guarded(lambda: security.mode_credentials(environment))
    as_root = os.getuid() == 0
    try:
        identity = choose_identity(environment)
        drop_privileges(identity)
    except EntrypointError as error:
        return [*findings, Finding("user", "error", str(error), "a user to work as")]
    facts = pytorch.ask(environment)
    own = facts.get("architectures") if isinstance(facts, dict) else None
    checks: Sequence[Callable[[], list[Finding]]] = (
        image,
        lambda: gpu.check(environment, own),
        lambda: pytorch.check(facts, environment, gpu.present()),
        lambda: memory.check(environment),
        lambda: storage.check(identity, as_root),
        lambda: network.check(environment),
        lambda: [security.first_process()],
        lambda: security.mounted_secrets(environment, identity),
    )
    return [*(finding for check in checks for finding in guarded(check)), *findings]


def guarded(check: Callable[[], list[Finding]]) -> list[Finding]:
    """The findings of a check; what it could not read is a finding, not the end of the report."""
    try:
        return check()
    except OSError as error:
        return [
            Finding(
                "doctor",
                "warning",
                f"a check could not be made: {error}",
                "a container that lets it read",
            )
        ]


def image() -> list[Finding]:
    """Which image this is, exactly: the first thing a report of an error needs."""
    built = versions()
    commit = built["REVISION"]
    if commit == "unknown":
        commit = "not known (only `make build` tells it)"
    found = f"{built['RELEASE']}, commit {commit}, locks {built['LOCKS'][:12]}"
    return [Finding("image", "ok", found)]


def as_json(finding: Finding) -> dict[str, str]:
    """One finding for programs."""
    return {name: getattr(finding, name) for name in ("check", "severity", "found", "needed", "do")}


def report(findings: Sequence[Finding], width: int, colour: bool) -> str:
    """The report for a person, the worst first; needed and do only where there is something to
    do."""
    counts = [
        (name, sum(finding.severity == name for finding in findings))
        for name in reversed(SEVERITIES)
    ]
    plural = {"ok": "ok"}
    heading = ", ".join(f"{n} {plural.get(name, name + 's' * (n != 1))}" for name, n in counts if n)
    lines = [f"doctor: {heading}", ""]
    for finding in sorted(findings, key=lambda finding: -finding.rank):
        lines += paragraph(finding, width, colour)
    return "\n".join(lines)


def paragraph(finding: Finding, width: int, colour: bool) -> list[str]:
    """One finding: severity, check, what was found; below it what is needed and what to do."""
    severity = f"{finding.severity:<{LABEL}}"
    if colour:
        severity = f"\033[{COLOURS[finding.severity]}m{severity}\033[0m"
    lines = [f"{severity}{finding.check:<{LABEL}}"]
    rows = [("found", finding.found), ("needed", finding.needed), ("do", finding.do)]
    if finding.severity == "ok":
        return [lines[0] + finding.found]
    texts = [(label, text) for label, text in rows if text]
    for number, (label, text) in enumerate(texts):
        indent = " " * (2 * LABEL + 8)
        wrapped = textwrap.wrap(
            text, max(width - len(indent), 40), break_long_words=False, break_on_hyphens=False
        )
        start = lines.pop() if number == 0 else " " * (2 * LABEL)
        lines += [f"{start}{label:<8}{wrapped[0]}", *(indent + more for more in wrapped[1:])]
    return lines


def brief() -> list[str]:
    """Lines for the container's start, in under 50 ms and without torch: the GPUs, and what is
    wrong.

    What limits.py and workspace.py warn of at start is not told twice.
    """
    environment = dict(os.environ)
    findings = [
        *memory.memory(),
        memory.cpus(environment),
        memory.open_files(),
        memory.processes(),
        memory.stack(),
        *gpu.nodes(environment),
    ]
    lines = [
        f"gpu: {finding.found}"
        for finding in findings
        if finding.check == "gpu" and finding.rank < 2
    ]
    if gpu.present():
        findings += gpu_findings_in_time(environment)
        lines += [
            f"gpu: {finding.found}"
            for finding in findings
            if finding.check == "device" and finding.rank < 2
        ]
    return [
        *lines,
        *(f"warning: {f.found}. Needed: {f.needed}. {f.do}." for f in findings if f.rank >= 2),
    ]


def gpu_findings_in_time(environment: dict[str, str]) -> list[Finding]:
    """What libcuda and NVML tell within BRIEF_S; a GPU without persistence mode takes a second to
    wake up."""
    found: list[Finding] = []

    def look() -> None:
        found.extend([gpu.libcuda(environment), *gpu.driver_and_devices(gpu.load_nvml())])

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(BRIEF_S)
    slow = Finding("device", "note", "the GPU is still waking up; `doctor` tells the rest")
    return [slow] if thread.is_alive() else found
