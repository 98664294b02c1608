"""What this process may use: CPUs by affinity and cgroup quota, memory, shared memory."""

import math
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def usable_cpus(root: Path = Path("/")) -> int:
    """CPUs this process can keep busy, at least 1: the affinity mask, and the quota of all cgroups
    it is in.

    os.cpu_count() and the affinity know nothing of `docker run --cpus` (joblib/loky#111).
    """
    affinity = len(os.sched_getaffinity(0))
    return max(1, min([affinity, *(math.ceil(quota) for quota in _quotas(root))]))


def _quotas(root: Path) -> Iterator[float]:
    """Quotas in CPUs, of version 2 (cpu.max) and version 1 (cpu.cfs_quota_us)."""
    for cgroup in _cgroups(root, "cpu"):
        quota = _quota(cgroup)
        if quota is not None:
            yield quota


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of `controller`, of version 2 and of version 1, from this cgroup up to the
    root."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / controllers
        own = PurePosixPath(path.lstrip("/"))
        # In a container with a private cgroup namespace the path is that of the host, and the
        # mount's root is our own.
        for level in {own, *own.parents, PurePosixPath()}:
            yield mount / level


def _quota(cgroup: Path) -> float | None:
    try:
        if (cgroup / "cpu.max").exists():
            quota, period = (cgroup / "cpu.max").read_text(encoding="ascii").split()
        else:
            quota = (cgroup / "cpu.cfs_quota_us").read_text(encoding="ascii").strip()
            period = (cgroup / "cpu.cfs_period_us").read_text(encoding="ascii").strip()
    except OSError:
        return None
    return None if quota in {"max", "-1"} else int(quota) / int(period)


def shared_memory_free(path: Path = Path("/dev/shm")) -> int:
    """Bytes free in the shared memory that loader workers hand their batches over in; 0 where there
    is none."""
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return 0


def memory_free(root: Path = Path("/")) -> int:
    """Bytes that programs can still have, of the host and of each cgroup: file pages count as free,
    since the kernel gives them up."""
    text = (root / "proc/meminfo").read_text(encoding="ascii")
    found = re.search(r"^MemAvailable:\s*(\d+) kB", text, re.MULTILINE)
    host = int(found[1]) * 1024 if found else 0
    return max(0, min([host, *(limit - used for limit, used in _memory(root))]))


UNLIMITED = 2**60
"""Version 1 writes no limit as the largest multiple of a page."""


def _memory(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, held by programs) in bytes, of each cgroup that has a limit: memory.max in version 2,
    memory.limit_in_bytes in version 1."""
    for cgroup in _cgroups(root, "memory"):
        for limit_file, usage_file, file_pages in (
            ("memory.max", "memory.current", r"^(?:in)?active_file (\d+)"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", r"^total_(?:in)?active_file (\d+)"),
        ):
            try:
                limit = (cgroup / limit_file).read_text(encoding="ascii").strip()
                usage = int((cgroup / usage_file).read_text(encoding="ascii"))
                stat = (cgroup / "memory.stat").read_text(encoding="ascii")
            except OSError:
                continue
            if limit != "max" and int(limit) < UNLIMITED:
                pages = sum(map(int, re.findall(file_pages, stat, re.MULTILINE)))
                yield int(limit), max(0, usage - pages)
