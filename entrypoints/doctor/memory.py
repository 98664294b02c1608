"""Shared memory, memory, CPUs and open files: what the engine gave, against what training takes."""

import os
import resource
from collections.abc import Mapping
from pathlib import Path

from entrypoints import limits
from entrypoints.doctor.finding import Finding, gibibytes
from entrypoints.natural import natural

MEMORY_NEEDED = (
    4 << 30
)  # bytes: a process with CUDA takes 2 to 3 GiB of the host's memory before any data
# Bytes; measured: two steps of the smallest model with two loader workers are killed at 320 MiB,
# and run at 384.
MEMORY_LEAST = 384 << 20
MORE_MEMORY = "docker run --memory 8g; Compose: mem_limit: 8g"
LARGER_MACHINE = (
    "Docker Desktop: Settings > Resources > Memory; WSL 2: memory=8GB in .wslconfig; else a larger "
    "machine"
)
# Measured on 2 CPUs: training with 2 workers fails at 16 and runs at 32. A thread a CPU, kernels
# and torch.compile's processes come to it.
PROCESSES_NEEDED = 512
STACK_NEEDED = 1 << 20  # bytes; measured: torch dies at 64 KiB, and runs at 256
FILES_NEEDED = (
    8192  # each batch a loader worker sends keeps files open; 1024 end in "Too many open files"
)


def check(environment: Mapping[str, str]) -> list[Finding]:
    """All of them."""
    return [shared_memory(), *memory(), cpus(environment), open_files(), processes(), stack()]


def shared_memory(folder: Path = limits.SHM) -> Finding:
    """/dev/shm, through which loader workers pass batches."""
    size = limits.shared_memory_size(folder)
    if size >= limits.SHM_NEEDED:
        return Finding("shm", "ok", f"{folder} {gibibytes(size)}")
    found = f"{folder} has {gibibytes(size)}; data loader workers die with 'Bus error'"
    return Finding(
        "shm", "warning", found, ">= 1 GiB", "docker run --shm-size 8g (the compose file does)"
    )


def memory(cgroup: Path = limits.CGROUP, machine: int | None = None) -> list[Finding]:
    """The limit, and whether the kernel has killed programs here: none of them could tell
    (jupyterlab#15115). `machine`: bytes of this machine, unless it is this one."""
    limit, kills = limits.memory_limit(cgroup), limits.oom_kills(cgroup)
    total = limits.machine_memory() if machine is None else machine
    needed = f">= {gibibytes(MEMORY_NEEDED)}"
    if limit is not None and limit < MEMORY_NEEDED:
        least = f"training takes {gibibytes(MEMORY_LEAST)} and more, and "
        found = (
            f"limited to {gibibytes(limit)}; {least if limit < MEMORY_LEAST else ''}"
            "a program above it is killed"
        )
        findings = [Finding("memory", "warning", found, needed, MORE_MEMORY)]
    elif total < MEMORY_NEEDED:
        found = f"this machine has {gibibytes(total)}"
        findings = [Finding("memory", "warning", found, needed, LARGER_MACHINE)]
    elif limit is None:
        findings = [Finding("memory", "ok", "no limit but the host's own")]
    else:
        findings = [Finding("memory", "ok", f"limited to {gibibytes(limit)}")]
    if kills:
        found = f"the kernel has killed {kills} of this container's programs for want of memory"
        do = "A higher --memory, fewer loader workers (--num-workers), or a smaller batch"
        findings.append(Finding("memory", "warning", found, "none killed", do))
    return findings


def processes(cgroup: Path = limits.CGROUP) -> Finding:
    """How many processes and threads there may be. torch says `can't start new thread` where one
    is refused, or waits for ever for a loader worker."""
    per_container = limits.process_limit(cgroup)
    _, per_user = resource.getrlimit(resource.RLIMIT_NPROC)
    where, do = "in this container", "docker run --pids-limit 8192 (the compose file does)"
    limit = per_container
    if per_user != resource.RLIM_INFINITY and per_user < (limit or per_user + 1):
        where = "of this user, in all containers and outside"  # setrlimit(2): of the real user id
        limit, do = per_user, "docker run without --ulimit nproc"
    if limit is not None and limit < PROCESSES_NEEDED:
        found = f"at most {limit} {where}, processes and threads together"
        return Finding("processes", "warning", found, f">= {PROCESSES_NEEDED}", do)
    return Finding("processes", "ok", "no limit" if limit is None else f"at most {limit}")


def stack() -> Finding:
    """The limit of a stack: below it a program ends in `Segmentation fault`, and says nothing."""
    size, _ = resource.getrlimit(resource.RLIMIT_STACK)
    if size != resource.RLIM_INFINITY and size < STACK_NEEDED:
        found = f"at most {size >> 10} KiB; programs end in a 'Segmentation fault' (exit code 139)"
        do = "docker run --ulimit stack=8388608, which is Linux's default"
        return Finding("stack", "warning", found, f">= {STACK_NEEDED >> 10} KiB", do)
    text = "no limit" if size == resource.RLIM_INFINITY else gibibytes(size)
    return Finding("stack", "ok", text)


def cpus(environment: Mapping[str, str], cgroup: Path = limits.CGROUP) -> Finding:
    """The CPU quota, and whether a given OMP_NUM_THREADS goes beyond it (45 times slower in
    ollama#17916)."""
    quota, usable, total = limits.cpu_quota(cgroup), limits.usable_cpus(cgroup), os.cpu_count() or 1
    given = environment.get("OMP_NUM_THREADS", "")
    if (natural(given, 1 << 32) or 0) > usable:
        found = (
            f"OMP_NUM_THREADS={given}, and CPUs that may be used: {usable} of {total}; "
            "threads wait for each other"
        )
        return Finding(
            "cpu",
            "warning",
            found,
            f"<= {usable}",
            "Leave OMP_NUM_THREADS unset: it follows the quota",
        )
    if quota is not None:
        do = f"Threads follow it. For more: docker run --cpus {total}" if quota < total else ""
        return Finding("cpu", "note", f"CPUs by quota: {quota:g} of {total}", do=do)
    return Finding("cpu", "ok", f"CPUs, no quota: {usable} of {total}")


def open_files() -> Finding:
    """The limit of open files. The modes raise the soft one to the hard one; a `docker exec` has
    what Docker gave."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if hard != unlimited and hard < FILES_NEEDED:
        found = f"at most {hard}; many loader workers end in 'Too many open files'"
        return Finding(
            "files",
            "warning",
            found,
            f">= {FILES_NEEDED}",
            "docker run --ulimit nofile=1048576:1048576",
        )
    if soft != unlimited and soft < FILES_NEEDED:
        do = (
            f"Here: ulimit -n {'unlimited' if hard == unlimited else hard}; Jupyter, "
            "ssh and train do it themselves"
        )
        return Finding("files", "note", f"{soft} in this session, up to {hard}", do=do)
    return Finding("files", "ok", f"{soft}")
