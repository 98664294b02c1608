"""Shared memory, memory, CPUs and open files: what the engine gave, against what training takes."""

import os
import re
import resource
from collections.abc import Mapping
from pathlib import Path

from entrypoints import limits
from entrypoints.doctor.finding import Finding, gibibytes
from entrypoints.natural import natural

MEMORY_NEEDED = (
    4 << 30
)  # bytes: a process with CUDA takes 2 to 3 GiB of the host's memory before any data
FILES_NEEDED = (
    8192  # each batch a loader worker sends keeps files open; 1024 end in "Too many open files"
)


def check(environment: Mapping[str, str]) -> list[Finding]:
    """All of them."""
    return [shared_memory(), *memory(), cpus(environment), open_files()]


def shared_memory(folder: Path = limits.SHM) -> Finding:
    """/dev/shm, through which loader workers pass batches."""
    size = limits.shared_memory_size(folder)
    if size >= limits.SHM_NEEDED:
        return Finding("shm", "ok", f"{folder} {gibibytes(size)}")
    found = f"{folder} has {gibibytes(size)}; data loader workers die with 'Bus error'"
    return Finding(
        "shm", "warning", found, ">= 1 GiB", "docker run --shm-size 8g (the compose file does)"
    )


def memory(cgroup: Path = limits.CGROUP) -> list[Finding]:
    """The limit, and whether the kernel has killed programs here: none of them could tell
    (jupyterlab#15115)."""
    limit, kills = limits.memory_limit(cgroup), oom_kills(cgroup)
    if limit is None:
        findings = [Finding("memory", "ok", "no limit but the host's own")]
    elif limit < MEMORY_NEEDED:
        found = f"limited to {gibibytes(limit)}; a program above it is killed without a word"
        findings = [
            Finding(
                "memory",
                "warning",
                found,
                f">= {gibibytes(MEMORY_NEEDED)}",
                "docker run --memory 8g",
            )
        ]
    else:
        findings = [Finding("memory", "ok", f"limited to {gibibytes(limit)}")]
    if kills:
        found = f"the kernel has killed {kills} program(s) in this container for want of memory"
        do = "A higher --memory, fewer loader workers (--workers), or a smaller batch"
        findings.append(Finding("memory", "warning", found, "none killed", do))
    return findings


def oom_kills(cgroup: Path = limits.CGROUP) -> int:
    """Programs the kernel killed here when the memory was full: memory.events (v2),
    memory.oom_control (v1)."""
    for file in (cgroup / "memory.events", cgroup / "memory" / "memory.oom_control"):
        if file.exists():
            count = re.search(r"^oom_kill (\d+)", file.read_text(), re.MULTILINE)
            return int(count[1]) if count else 0
    return 0


def cpus(environment: Mapping[str, str], cgroup: Path = limits.CGROUP) -> Finding:
    """The CPU quota, and whether a given OMP_NUM_THREADS goes beyond it (45 times slower in
    ollama#17916)."""
    quota, usable, total = limits.cpu_quota(cgroup), limits.usable_cpus(cgroup), os.cpu_count() or 1
    given = environment.get("OMP_NUM_THREADS", "")
    if (natural(given, 1 << 32) or 0) > usable:
        found = (
            f"OMP_NUM_THREADS={given}, but {usable} of {total} CPUs may be used; "
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
        return Finding("cpu", "note", f"{quota:g} of {total} CPUs, by quota", do=do)
    return Finding("cpu", "ok", f"{usable} of {total} CPUs, no quota")


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
