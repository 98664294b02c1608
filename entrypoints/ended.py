"""Why a program ended by a signal. It could not say so itself, and Docker tells a number alone
(137)."""

import os
import re
import resource
import signal
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import NoReturn

from entrypoints import limits
from entrypoints.doctor.finding import gibibytes
from entrypoints.doctor.memory import LARGER_MACHINE, MORE_MEMORY, STACK_NEEDED
from entrypoints.errors import say
from entrypoints.natural import natural

FORWARDED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
ASKED_FOR = {*FORWARDED, signal.SIGPIPE, signal.SIGALRM}  # ends that somebody wanted
KERNEL = 128  # si_code of a signal from the kernel: Ctrl-C in a terminal, sigaction(2)


def main(words: Sequence[str]) -> int:
    """`ended CODE`, for a shell and for JupyterLab: why a program of this container ended so."""
    code = natural(words[0] if words else "", 255)
    reason = why(code) if code is not None else None
    if reason:
        say(f"The program was {reason}")
    return 0


def why(code: int, cgroup: Path = limits.CGROUP) -> str | None:
    """What ended a program with this exit code (128 and the signal's number, as in a shell), or
    None where there is nothing to tell."""
    number = code - 128
    if number not in signal.valid_signals() or number in ASKED_FOR:
        return None
    name = signal.strsignal(number)
    return f"ended by signal {number} ({name}), exit code {code}: {cause(number, cgroup)}."


def cause(number: int, cgroup: Path) -> str:
    """What this container knows of it, and what to do."""
    kills = limits.oom_kills(cgroup)
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    if number == signal.SIGKILL and kills:
        return out_of_memory(kills, limits.memory_limit(cgroup))
    if number == signal.SIGKILL:
        return "somebody killed it; the memory was not full"
    if number == signal.SIGBUS and limits.shared_memory_size() < limits.SHM_NEEDED:
        return "/dev/shm is full or missing; start the container with --shm-size=8g"
    if number == signal.SIGSEGV and 0 <= stack < STACK_NEEDED:
        return f"stacks are limited to {stack >> 10} KiB; leave --ulimit stack out"
    if number == signal.SIGXCPU:
        return "its CPU time is limited; leave --ulimit cpu out"
    return "PYTHONFAULTHANDLER=1 shows where; docs/extending.md has more"


def out_of_memory(kills: int, limit: int | None) -> str:
    """What was full, and what to do."""
    full = f"this container's limit is {gibibytes(limit)}" if limit else "the machine's is full"
    more = MORE_MEMORY if limit else LARGER_MACHINE
    return (
        f"the kernel killed it for want of memory, {full} ({kills} killed here so far). "
        f"Smaller batches or fewer loader workers (--num-workers), or more memory: {more}"
    )


def attend(program: str, command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Run the program, pass signals on, end with its exit code, and say which signal ended it.

    `tini -g` sends a signal to the whole process group, and a terminal does: what has reached the
    program so is not sent a second time, which amptrain takes for `at once`.
    """
    signals = {*FORWARDED, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    child = os.posix_spawn(program, list(command), dict(environment), setsigmask=())
    tini = os.getppid() if sends_to_the_group(os.getppid()) else None
    while True:
        info = signal.sigwaitinfo(signals)
        if info.si_signo != signal.SIGCHLD:
            if info.si_code != KERNEL and info.si_pid != tini:
                os.kill(child, info.si_signo)
            continue
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
    code = os.waitstatus_to_exitcode(status)
    code = 128 - code if code < 0 else code
    reason = why(code)
    if reason:
        say(f"error: {Path(program).name} was {reason}")
    os._exit(code)


def sends_to_the_group(process: int) -> bool:
    """Whether it is `tini -g`; without it, as PID 1 or in Apptainer, this process alone gets the
    signal."""
    try:
        program, *words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    flags = takewhile(lambda word: word != b"--", words)
    return program.endswith(b"tini") and any(re.match(rb"-\w*g", flag) for flag in flags)
