"""What this process may use: CPUs by affinity and cgroup quota, shared memory."""

import math
import os
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
    """Quotas in CPUs, of version 2 (cpu.max) and version 1 (cpu.cfs_quota_us), from this cgroup up
    to the root."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / controllers
        own = PurePosixPath(path.lstrip("/"))
        # In a container with a private cgroup namespace the path is that of the host, and the
        # mount's root is our own.
        for level in {own, *own.parents, PurePosixPath()}:
            quota = _quota(mount / level)
            if quota is not None:
                yield quota


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
