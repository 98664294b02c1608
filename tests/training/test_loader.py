"""Workers, shared memory and limits."""

import os
import signal
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from amptrain import limits
from amptrain.config import DataConfig
from amptrain.data.datasets import Dataset, open_dataset
from amptrain.data.loader import Batch, DeviceBatches, FakeBatches, choose_workers, make_loader
from amptrain.data.order import MicroBatchKeys
from amptrain.errors import ConfigError
from amptrain.limits import shared_memory_free, usable_cpus

CPU = torch.device("cpu")


@pytest.fixture
def digits() -> Dataset:
    return open_dataset(DataConfig(augment="none"), seed=0)


def cgroup_tree(root: Path, lines: str, files: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(lines)
    for name, content in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


@pytest.mark.parametrize(
    ("lines", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 64),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "300000 100000\n"}, 3),
        (
            "0::/docker/0123\n",
            {"cpu.max": "50000 100000\n"},
            1,
        ),  # the host's path, seen in a private namespace
        (
            "4:cpu,cpuacct:/\n",
            {"cpu,cpuacct/cpu.cfs_quota_us": "250000", "cpu,cpuacct/cpu.cfs_period_us": "100000"},
            3,
        ),
        (
            "4:cpu:/x\n0::/\n",
            {"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "100000"},
            64,
        ),
        (
            "4:cpu:/x\n0::/\n",
            {"cpu/x/cpu.cfs_quota_us": "400000", "cpu/x/cpu.cfs_period_us": "100000"},
            4,
        ),
        ("4:memory:/\n", {"memory/cpu.max": "100000 100000"}, 64),
    ],
)
def test_cpus_follow_the_cgroup_quota(
    lines: str,
    files: dict[str, str],
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    assert usable_cpus(cgroup_tree(tmp_path, lines, files)) == expected


V1 = {"memory.limit_in_bytes": "1000000", "memory.usage_in_bytes": "600000"}
V1_STAT = "cache 250000\ntotal_inactive_file 150000\ntotal_active_file 50000\n"


@pytest.mark.parametrize(
    ("lines", "files", "expected"),
    [
        ("0::/\n", {"memory.max": "max", "memory.current": "5", "memory.stat": ""}, 4096000),
        (
            "0::/\n",
            {
                "memory.max": "1000000",
                "memory.current": "600000",
                "memory.stat": "active_file 1000",
            },
            401000,
        ),
        ("4:memory:/\n", {**V1, "memory.stat": V1_STAT}, 600000),
        ("4:memory:/\n", {**V1, "memory.limit_in_bytes": str(2**63 - 4096)}, 4096000),
    ],
)
def test_free_memory_follows_the_cgroup(
    tmp_path: Path, lines: str, files: dict[str, str], expected: int
) -> None:
    """File pages count as free; a limit of the size of the address space is none."""
    folder = "" if lines.startswith("0") else "memory/"
    root = cgroup_tree(tmp_path, lines, {f"{folder}{name}": text for name, text in files.items()})
    (root / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    4000 kB\n")
    assert limits.memory_free(root) == expected


def test_cpus_follow_the_affinity(tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert usable_cpus(tmp_path) == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_free_shared_memory_is_told() -> None:
    stat = os.statvfs("/dev/shm")  # what df shows, by another road
    assert 0 < shared_memory_free() == pytest.approx(stat.f_bavail * stat.f_frsize, rel=0.2)
    assert shared_memory_free(Path("/no/such/place")) == 0


def folder_like(task: Dataset) -> Dataset:
    """`task`, as if its images lay in files of 224×224 pixels."""
    from dataclasses import replace

    return replace(task, in_memory=False, shape=(3, 224, 224))


def test_workers_come_from_the_cpus_unless_data_is_in_memory(digits: Dataset) -> None:
    assert choose_workers(None, digits, cpus=4, prefetch=2, images=64) == 0
    assert choose_workers(None, folder_like(digits), cpus=4, prefetch=2, images=64) == 4
    assert choose_workers(7, digits, cpus=4, prefetch=2, images=64) == 7
    with pytest.raises(
        ConfigError, match="--num-workers 65 is more than 16 a CPU, and this process may use 4 CPUs"
    ):
        choose_workers(65, digits, cpus=4, prefetch=2, images=64)
    assert (
        choose_workers(3, open_dataset(DataConfig(data="fake:9"), 0), cpus=4, prefetch=2, images=64)
        == 0
    )


def test_too_little_shared_memory_is_said_before_it_kills(
    digits: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Docker's default is 64 MiB; four workers with 3 batches each of 64 images take 110 MiB, and
    as many for validation."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(limits.shutil, "disk_usage", lambda path: usage(64 << 20, 0, 64 << 20))
    with pytest.raises(
        ConfigError,
        match=r"/dev/shm has 64 MiB free, .* need 221 MiB.*--shm-size=505m .*--num-workers 1",
    ):
        choose_workers(4, folder_like(digits), cpus=4, prefetch=2, images=64)
    assert choose_workers(None, folder_like(digits), cpus=4, prefetch=2, images=64) == 1
    # Two ranks of one host share it (Deep_Object_Pose#297).
    with pytest.raises(ConfigError, match=r"need 111 MiB.*--num-workers 0"):
        choose_workers(1, folder_like(digits), cpus=4, prefetch=2, images=64, local_ranks=2)


def test_workers_live_through_sigterm(digits: Dataset) -> None:
    """torchrun signals the whole group; a loader whose workers died could not end in a
    checkpoint."""
    keys = [MicroBatchKeys([(0, index)]) for index in range(40)]
    batches = iter(make_loader(digits.train, keys, 2, 1, pin_memory=False))
    for _ in range(4):  # both workers have delivered, so both have started
        next(batches)
    for worker in batches._workers:  # type: ignore[attr-defined]
        os.kill(worker.pid, signal.SIGTERM)
        os.kill(worker.pid, signal.SIGINT)
    assert sum(1 for _ in batches) == 36


def test_reading_does_not_touch_the_global_generator(digits: Dataset) -> None:
    before = torch.get_rng_state()
    list(make_loader(digits.train, [MicroBatchKeys([(0, 0)])], 0, 2, pin_memory=False))
    assert torch.equal(before, torch.get_rng_state())


def test_batches_on_the_device_are_normalised_and_channels_last() -> None:
    task = open_dataset(DataConfig(data="fake:4", image_size=8), 0)
    raw = torch.randint(0, 255, (5, 3, 8, 8), dtype=torch.uint8)
    reports: list[tuple[str, ...]] = []

    def read() -> Iterator[Batch]:
        yield Batch(raw, torch.arange(5), ("a.png: cut off",), loss_weight=0.25, last=False)

    batches = DeviceBatches(read(), task, CPU, torch.channels_last, reports.append)
    [batch] = list(batches)
    images, labels = batch.inputs, batch.targets
    assert (batch.loss_weight, batch.last) == (0.25, False)
    assert images.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(images, (raw.float() - 127.5) / 64)
    assert labels.tolist() == list(range(5))
    assert reports == [("a.png: cut off",)]
    assert batches.waited > 0


def test_fake_batches_have_the_sizes_asked_for() -> None:
    task = open_dataset(DataConfig(data="fake:10", image_size=8), 0)
    keys = [MicroBatchKeys([(0, index) for index in range(size)]) for size in (2, 4)]
    short, whole = FakeBatches(keys, task, CPU, torch.channels_last, max_images=4)
    for batch, size in ((short, 2), (whole, 4)):
        assert (tuple(batch.inputs.shape), len(batch.targets)) == ((size, 3, 8, 8), size)
    assert short.inputs.data_ptr() == whole.inputs.data_ptr()  # made once
    [again] = FakeBatches(keys[1:], task, CPU, torch.channels_last, max_images=4)
    assert torch.equal(again.inputs, whole.inputs)  # whichever size comes first
    assert torch.equal(again.targets, whole.targets)
