"""What doctor says of GPUs. NVML is a stand-in here (no driver on this machine); nodes and records
are real files."""

from pathlib import Path
from typing import Any

import pytest

from entrypoints.doctor import gpu, gpu_watch
from entrypoints.doctor.finding import Finding


class FakeError(Exception):
    """As pynvml's: the nvmlReturn_t is in `value`."""

    def __init__(self, value: int) -> None:
        super().__init__(f"nvml {value}")
        self.value = value


class FakeNvml:
    """The functions of pynvml that doctor calls, for GPUs described here."""

    NVMLError = FakeError

    def __init__(self, driver: str = "550.54.15", **changes: Any) -> None:
        self.driver = driver
        self.capability = changes.get("capability", (9, 0))
        self.init_error = changes.get("init_error", 0)
        self.device_error = changes.get("device_error", 0)
        self.mig: tuple[int, int] | None = changes.get("mig")  # slots, and those with an instance

    def nvmlInit(self) -> None:
        if self.init_error:
            raise FakeError(self.init_error)

    def nvmlSystemGetDriverVersion(self) -> str:
        return self.driver

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if self.device_error:
            raise FakeError(self.device_error)
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA Test"

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return self.capability  # type: ignore[no-any-return]

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
        if self.mig is None:
            raise FakeError(3)  # NVML_ERROR_NOT_SUPPORTED
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: int) -> int:
        assert self.mig
        return self.mig[0]

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: int, slot: int) -> int:
        assert self.mig
        if slot >= self.mig[1]:
            raise FakeError(6)  # NVML_ERROR_NOT_FOUND
        return slot


def only(findings: list[Finding], check: str) -> Finding:
    """The one finding of this check."""
    (found,) = [finding for finding in findings if finding.check == check]
    return found


@pytest.mark.parametrize(
    ("version", "severity"),
    [
        ("515.105.01", "error"),
        ("525.60.11", "error"),
        ("525.60.13", "warning"),
        ("550.54.14", "warning"),
        ("550.54.15", "ok"),
        ("610.43.02", "ok"),
    ],
)
def test_driver_version(version: str, severity: str) -> None:
    found = only(gpu.driver_and_devices(FakeNvml(version)), "driver")
    assert found.severity == severity
    assert version in found.found
    if severity == "error":
        assert (found.needed, "HOST" in found.do) == (">= 525.60.13", True)


@pytest.mark.parametrize(
    ("version", "severity"), [(11070, "error"), (12000, "warning"), (12040, "ok"), (13000, "ok")]
)
def test_driver_by_its_cuda_version(version: int, severity: str) -> None:
    (found,) = gpu.cuda_version(version)
    assert found.severity == severity
    assert f"CUDA {version // 1000}.{version % 1000 // 10}" in found.found


@pytest.mark.parametrize(
    "capability", [(5, 0), (6, 1), (7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0)]
)
def test_same_major_suffices(capability: tuple[int, int]) -> None:
    assert only(gpu.driver_and_devices(FakeNvml(capability=capability)), "device").severity == "ok"


@pytest.mark.parametrize("capability", [(10, 0), (10, 3), (12, 0), (12, 1)])
def test_blackwell_is_told_which_torch_can(capability: tuple[int, int]) -> None:
    found = only(gpu.driver_and_devices(FakeNvml(capability=capability)), "device")
    assert found.severity == "error"
    assert f"sm_{capability[0]}{capability[1]}" in found.found
    assert "torch >= 2.7 for CUDA 12.8" in found.do


def test_too_old_a_gpu_is_not_told_to_take_a_newer_torch() -> None:
    found = gpu.architecture("GPU 0: K80", (3, 7))
    assert found.severity == "error"
    assert "torch >=" not in found.do


def test_code_for_a_higher_minor_does_not_run() -> None:
    assert gpu.architecture("GPU 0", (8, 0), ["sm_86", "sm_90"]).severity == "error"


@pytest.mark.parametrize(
    ("code", "severity", "says"),
    [
        (9, "error", "driver is not loaded"),
        (12, "warning", "libnvidia-ml.so.1 is missing"),
        (18, "error", "driver was updated"),
        (999, "error", "daemon-reload"),
        (4, "error", "NVML fails: nvml 4 (4)"),
    ],
)
def test_nvml_that_does_not_start(code: int, severity: str, says: str) -> None:
    found = only(gpu.driver_and_devices(FakeNvml(init_error=code)), "nvml")
    assert found.severity == severity
    assert says in found.found
    assert found.do


def test_gpu_off_the_bus_does_not_hide_the_driver() -> None:
    findings = gpu.driver_and_devices(FakeNvml(device_error=15))
    assert only(findings, "driver").severity == "ok"
    assert only(findings, "nvml").found.startswith("GPU 0: has fallen off the bus")


def test_mig_with_instances_is_a_note_and_without_an_error() -> None:
    assert not [f for f in gpu.driver_and_devices(FakeNvml()) if f.check == "mig"]
    some = only(gpu.driver_and_devices(FakeNvml(mig=(7, 3))), "mig")
    assert (some.severity, "visible instances: 3;" in some.found) == ("note", True)
    assert only(gpu.driver_and_devices(FakeNvml(mig=(7, 0))), "mig").severity == "error"


def test_without_a_gpu_it_depends_on_whether_one_was_asked_for(tmp_path: Path) -> None:
    for asked in ({}, {"NVIDIA_VISIBLE_DEVICES": "void"}, {"NVIDIA_VISIBLE_DEVICES": "none"}):
        (found,) = gpu.nodes(asked, tmp_path, tmp_path / "record")
        assert (found.severity, "--gpus all" in found.do) == ("note", True)
    (found,) = gpu.nodes({"NVIDIA_VISIBLE_DEVICES": "all"}, tmp_path, tmp_path / "record")
    assert (found.severity, "nvidia-ctk runtime configure" in found.do) == ("warning", True)


def test_nodes_are_found_in_order_and_missing_ones_named(tmp_path: Path) -> None:
    for name in ("nvidia10", "nvidia2", "nvidiactl", "nvidia-caps"):
        (tmp_path / name).touch()
    there, missing = gpu.nodes({}, tmp_path, tmp_path / "record")
    assert there.found == f"{tmp_path}/nvidia2, {tmp_path}/nvidia10"
    assert (missing.severity, missing.found) == ("error", f"{tmp_path}/nvidia-uvm is missing")
    assert "nvidia-modprobe -u" in missing.do


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A host with one GPU, as /dev, /proc/driver/nvidia and /sys/bus/pci show it."""
    files = {
        "dev/nvidia0": b"",
        "dev/nvidiactl": b"",
        "driver/gpus/0000:17:00.0/information": b"Model: \t NVIDIA Test\nDevice Minor: \t 0\n",
        "pci/0000:17:00.0/config": b"\xde\x10\x30\x23",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    gpu_watch.record_gpus(
        tmp_path / "record", tmp_path / "dev", tmp_path / "driver", tmp_path / "pci"
    )
    return tmp_path


def lost(host: Path) -> str | None:
    return gpu_watch.gpu_lost(host / "record", host / "dev", host / "pci")


def test_nothing_is_lost_before_something_is(host: Path) -> None:
    assert lost(host) is None
    assert gpu_watch.gpu_lost(host / "no record", host / "dev", host / "pci") is None


@pytest.mark.parametrize("name", ["nvidia0", "nvidiactl"])
def test_a_node_that_goes_is_lost(host: Path, name: str) -> None:
    (host / "dev" / name).unlink()
    assert lost(host) == f"{host}/dev/{name} was there at start and is gone"
    (found, *_) = gpu.nodes({}, host / "dev", host / "record")
    assert (found.severity, found.do) == ("error", gpu_watch.REMEDY)


def test_a_gpu_off_the_bus_reads_as_ones(host: Path) -> None:
    (host / "pci/0000:17:00.0/config").write_bytes(b"\xff\xff\xff\xff")
    assert "fallen off the bus: PCI device 0000:17:00.0" in str(lost(host))


def test_a_gpu_whose_pci_header_was_never_readable_is_not_lost(host: Path) -> None:
    (host / "pci/0000:17:00.0/config").unlink()
    gpu_watch.record_gpus(host / "record", host / "dev", host / "driver", host / "pci")
    assert lost(host) is None
