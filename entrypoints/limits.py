"""The container's limits: what the cgroup allows, and what follows from it."""

import math
import os
import re
import resource
from collections.abc import MutableMapping
from pathlib import Path

from entrypoints.errors import warn

CGROUP = Path("/sys/fs/cgroup")
SHM = Path("/dev/shm")
# Bytes; Docker's 64 MB kills DataLoader workers with "Bus error" (pytorch#5040).
SHM_NEEDED = 1 << 30


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def cpu_quota(cgroup: Path = CGROUP) -> float | None:
    """CPUs the cgroup lets us use (`docker run --cpus`), or None without a quota.

    cgroup v2, else v1.
    """
    fields = _read(cgroup / "cpu.max").split()
    if len(fields) != 2:
        v1 = cgroup / "cpu"
        fields = [
            _read(v1 / "cpu.cfs_quota_us") or "-1",
            _read(v1 / "cpu.cfs_period_us") or "100000",
        ]
    quota, period = fields
    if quota == "max" or int(quota) <= 0:
        return None
    return int(quota) / int(period)


def memory_limit(cgroup: Path = CGROUP) -> int | None:
    """Bytes of memory the cgroup lets us use, or None without a limit. cgroup v2, else v1."""
    text = _read(cgroup / "memory.max") or _read(cgroup / "memory" / "memory.limit_in_bytes")
    if not text or text == "max":
        return None
    return int(text) if int(text) < 1 << 60 else None  # v1 writes "no limit" as a number near 2**63


def process_limit(cgroup: Path = CGROUP) -> int | None:
    """Processes and threads the cgroup lets us have (`--pids-limit`), or None. cgroup v2, else
    v1."""
    text = _read(cgroup / "pids.max") or _read(cgroup / "pids" / "pids.max")
    return int(text) if text.isdecimal() else None


def oom_kills(cgroup: Path = CGROUP) -> int:
    """Programs the kernel killed here when the memory was full: memory.events (v2),
    memory.oom_control (v1)."""
    text = _read(cgroup / "memory.events") or _read(cgroup / "memory" / "memory.oom_control")
    count = re.search(r"^oom_kill (\d+)", text, re.MULTILINE)
    return int(count[1]) if count else 0


def machine_memory(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes of the machine, or of the one that Docker Desktop or WSL made for the engine."""
    return int(meminfo.read_text().split()[1]) << 10  # MemTotal, the first line, in KiB


def usable_cpus(cgroup: Path = CGROUP) -> int:
    """CPUs to plan threads for: the least of affinity and quota, at least 1.

    A quota is rounded up, as the JVM, Go and joblib do and as amptrain does: one thread can't use
    a quota of 1.5, and two are held back for a quarter of the time only where both compute.
    """
    quota = cpu_quota(cgroup)
    affinity = len(os.sched_getaffinity(0))
    return affinity if quota is None else max(1, min(affinity, math.ceil(quota)))


def limit_threads(environment: MutableMapping[str, str]) -> None:
    """Set OMP_NUM_THREADS (which MKL, OpenBLAS and torch follow) to the quota, unless the user has
    set it.

    Libraries count the host's cores; 64 threads on a quota of 4 CPUs run many times slower
    (ollama#17916).
    """
    if cpu_quota() is not None:
        environment.setdefault("OMP_NUM_THREADS", str(usable_cpus()))


def raise_open_files() -> None:
    """Raise the soft limit of open files to the hard one.

    Docker 29 starts with 1024, too few for data loaders.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def check_shared_memory(folder: Path = SHM) -> None:
    """Warn where /dev/shm is missing or too small for loader workers, with the flag that helps."""
    size = shared_memory_size(folder)
    if size < SHM_NEEDED:
        found = f"{folder} has {size >> 20} MB" if size else f"There is no {folder} (--ipc none)"
        warn(
            f"{found}; data loader workers need more and die with 'Bus error'. "
            "Start the container with --shm-size=8g (the compose file does)."
        )


def shared_memory_size(folder: Path = SHM) -> int:
    """Bytes of the file system for shared memory; 0 where there is none (`--ipc none`)."""
    try:
        status = os.statvfs(folder)
    except OSError:
        return 0
    return status.f_blocks * status.f_frsize
