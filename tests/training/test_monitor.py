"""The GPU's monitor, on a stand-in for NVML; the tests marked gpu ask the real one."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from amptrain.config import TrainConfig
from amptrain.distributed import Processes
from amptrain.report.log import Window
from amptrain.report.monitor import (
    IDLE_SAMPLES,
    MIN_UTILISATION,
    WARM_UP,
    Gpu,
    Monitor,
    NotAvailable,
    Settings,
    cause,
    find_gpu,
)
from amptrain.signals import StopSignal
from amptrain.train import Trainer

SETTINGS = Settings(
    fp16=False, fused=True, log_every=20, batch_size=64, compile=False, workers=4, cpus=4
)


class Nvml:
    """NVML with some GPUs, each with its utilisation: NVML's order, which is not CUDA's."""

    class NVMLError(Exception):
        pass

    class NVMLError_NotFound(NVMLError):
        pass

    class NVMLError_NotSupported(NVMLError):
        pass

    def __init__(self, gpus: dict[str, float], mig_mode: int | None = None) -> None:
        self.gpus, self.mig_mode = gpus, mig_mode
        self.lost = False
        self.asked = 0

    def nvmlInit(self) -> None:
        if self.lost:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in self.gpus:
            raise self.NVMLError_NotFound("Not Found")
        return uuid

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:
        if self.mig_mode is None:
            raise self.NVMLError_NotSupported("Not Supported")
        return [self.mig_mode, self.mig_mode]

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:
        self.asked += 1
        if self.lost:
            raise self.NVMLError("Unknown Error")
        return SimpleNamespace(gpu=self.gpus[handle], memory=0)


def window(**values: float) -> Window:
    base = Window(
        step=20, epoch=1, loss=1.0, lr=0.1, scale=1.0, skips=0, skipped_steps=(),
        images_per_s=100.0,
        images_per_s_compute=100.0, data_wait_share=0.0, memory_allocated=0, memory_reserved=0,
        grad_norm=1.0,
    )  # fmt: skip
    return replace(base, **values)  # type: ignore[arg-type]


def monitor_of(
    nvml: Nvml, said: list[str], settings: Settings = SETTINGS, period: float = 1.0
) -> Monitor:
    return Monitor(settings, said.append, Gpu("b", nvml), period)


def samples(monitor: Monitor, number: int) -> None:
    for _ in range(number):
        monitor.sample()


def test_the_gpu_is_found_by_uuid() -> None:
    """Not by its place: with CUDA_VISIBLE_DEVICES=1 the second GPU is cuda:0 (pytorch#94472)."""
    nvml = Nvml({"GPU-a": 3, "GPU-b": 97})
    assert Gpu("b", nvml).utilisation() == 97
    assert Gpu("a", nvml).utilisation() == 3


@pytest.mark.parametrize(
    ("nvml", "why"),
    [
        (Nvml({"GPU-a": 50, "MIG-b": 50}), "is a MIG instance"),
        (Nvml({"GPU-b": 50}, mig_mode=1), "split into MIG instances"),
        (Nvml({}), "NVML says: Not Found"),
    ],
    ids=["instance", "mig-mode", "unknown"],
)
def test_not_available_is_said_and_not_zero(nvml: Nvml, why: str) -> None:
    said: list[str] = []
    assert find_gpu("b", said.append, nvml) is None
    assert len(said) == 1
    assert said[0].startswith("GPU utilisation is not available: ")
    assert why in said[0]


def test_a_gpu_that_could_be_split_but_is_not_is_watched() -> None:
    assert Gpu("b", Nvml({"GPU-b": 80}, mig_mode=0)).utilisation() == 80


def test_without_a_driver_the_run_goes_on() -> None:
    nvml = Nvml({"GPU-b": 50})
    nvml.lost = True
    said: list[str] = []
    assert find_gpu("b", said.append, nvml) is None
    assert "Driver Not Loaded" in said[0]


def test_a_window_has_the_mean_of_its_own_samples() -> None:
    nvml = Nvml({"GPU-b": 0})
    monitor = monitor_of(nvml, [])
    samples(monitor, WARM_UP)
    assert monitor.window(window()).gpu_utilisation is None
    for value in (70, 90):
        nvml.gpus["GPU-b"] = value
        monitor.sample()
    assert monitor.window(window()).gpu_utilisation == 80
    assert monitor.window(window()).gpu_utilisation is None


def test_an_idle_gpu_is_warned_of_once_and_after_a_while() -> None:
    said: list[str] = []
    monitor = monitor_of(Nvml({"GPU-b": MIN_UTILISATION - 1}), said)
    samples(monitor, WARM_UP + IDLE_SAMPLES - 1)
    monitor.window(window(data_wait_share=0.4))
    assert said == []
    for _ in range(3):
        samples(monitor, IDLE_SAMPLES)
        monitor.window(window(data_wait_share=0.4))
    assert len(said) == 1
    assert "busy only 59 %" in said[0]
    assert (
        "waited for data 40% of the time, with 4 loader workers in each process and a quota of 4 "
        "CPUs" in said[0]
    )


def test_a_busy_gpu_is_not_warned_of() -> None:
    said: list[str] = []
    monitor = monitor_of(Nvml({"GPU-b": MIN_UTILISATION}), said)
    samples(monitor, WARM_UP + 3 * IDLE_SAMPLES)
    monitor.window(window(data_wait_share=0.9))
    assert said == []


def test_a_gpu_that_idles_after_hours_of_work_is_warned_of() -> None:
    """The last while counts, not the mean since the start."""
    nvml, said = Nvml({"GPU-b": 99}), list[str]()
    monitor = monitor_of(nvml, said)
    samples(monitor, WARM_UP + 100 * IDLE_SAMPLES)
    monitor.window(window())
    nvml.gpus["GPU-b"] = 10
    samples(monitor, IDLE_SAMPLES)
    monitor.window(window())
    assert len(said) == 1


def test_what_happens_in_validation_does_not_count() -> None:
    nvml, said = Nvml({"GPU-b": 99}), list[str]()
    monitor = monitor_of(nvml, said)
    samples(monitor, WARM_UP)
    nvml.gpus["GPU-b"] = 0
    with monitor.paused(), monitor.paused():
        samples(monitor, 10 * IDLE_SAMPLES)
    nvml.gpus["GPU-b"] = 99
    samples(monitor, IDLE_SAMPLES)
    assert monitor.window(window()).gpu_utilisation == 99
    assert said == []


def test_nvml_lost_in_the_middle_is_said_once_and_asked_no_more() -> None:
    """As after `systemctl daemon-reload` on the host (nvidia-container-toolkit#48)."""
    nvml, said = Nvml({"GPU-b": 90}), list[str]()
    with monitor_of(nvml, said, period=0.005) as monitor:
        wait_for(lambda: nvml.asked > WARM_UP + 2)
        assert monitor.window(window()).gpu_utilisation == 90
        nvml.lost = True
        wait_for(lambda: not monitor.thread.is_alive())
        monitor.window(window())
        assert monitor.window(window()).gpu_utilisation is None
    assert said == [
        "GPU utilisation is not available from here on (NVML says: Unknown Error). Training goes "
        "on."
    ]


def test_the_thread_ends_with_the_run() -> None:
    nvml = Nvml({"GPU-b": 90})
    with monitor_of(nvml, [], period=0.005) as monitor:
        wait_for(lambda: nvml.asked > 0)
    assert not monitor.thread.is_alive()


@pytest.mark.parametrize(
    ("changes", "waited", "expected"),
    [
        ({"workers": 2}, 0.3, ("with 2 loader workers", "quota of 4 CPUs", "Try --num-workers 4.")),
        (
            {"fp16": True, "fused": False},
            0.3,
            ("Give the container more CPUs", "--prefetch-factor 4"),
        ),
        (
            {"fp16": True, "fused": False},
            0.02,
            ("waits for the device at each step", "Try --fused."),
        ),
        ({"fused": False}, 0.02, ("the batch is small", "--global-batch-size 128")),
        ({"log_every": 1}, 0.02, ("once in 1 step.", "Try --log-every 50.")),
        ({}, 0.02, ("the batch is small", "Try --global-batch-size 128, or --compile")),
        ({"compile": True}, 0.02, ("the batch is small", "Try --global-batch-size 128.")),
    ],
    ids=str,
)
def test_the_cause_and_the_flag(
    changes: dict[str, int], waited: float, expected: tuple[str, ...]
) -> None:
    text = cause(replace(SETTINGS, **changes), waited)  # type: ignore[arg-type]
    for part in expected:
        assert part in text
    assert text.count("Try ") + text.count("or try ") == 1


def test_the_flags_exist(capsys: pytest.CaptureFixture[str]) -> None:
    from amptrain.cli import main

    assert main(["train", "--help"]) == 0
    help_text = capsys.readouterr().out
    for flag in (
        "--num-workers",
        "--prefetch-factor",
        "--fused",
        "--log-every",
        "--global-batch-size",
        "--compile",
    ):
        assert flag in help_text


def test_a_run_watches_while_it_trains_and_not_in_validation(
    make_config: Callable[..., TrainConfig], messages: list[str]
) -> None:
    """Wired into the loop: the records have the utilisation, and validation and saves are left
    out."""
    config = make_config(log_every=4, precision="fp32")
    config.run_dir.mkdir(parents=True)
    trainer = Trainer(config, Processes("cpu"), StopSignal())
    paused: list[str] = []
    trainer.report.monitor = Recorder(Nvml({"GPU-b": 42}), messages, paused)
    with trainer.report.monitor:
        assert trainer.fit()
    assert paused.count("paused") == 2  # one validation, one save
    assert '"gpu_utilisation": 42.0' in (config.run_dir / "metrics.jsonl").read_text()


class Recorder(Monitor):
    """Samples at each window in place of each second, and remembers pauses."""

    def __init__(self, nvml: Nvml, said: list[str], paused: list[str]) -> None:
        super().__init__(SETTINGS, said.append, Gpu("b", nvml), period=60.0)
        self.pauses = paused
        samples(self, WARM_UP)

    def window(self, record: Window) -> Window:
        self.sample()
        return super().window(record)

    def paused(self):  # type: ignore[no-untyped-def]
        self.pauses.append("paused")
        return super().paused()


@pytest.fixture
def uuid() -> str:
    return str(torch.cuda.get_device_properties(0).uuid)


@pytest.mark.gpu
@pytest.mark.parametrize("by", ["index", "uuid"])
def test_the_real_nvml_knows_the_device_torch_uses(by: str, uuid: str) -> None:
    """In a process of its own, as CUDA_VISIBLE_DEVICES is read once."""
    code = (
        "import torch, pynvml; from amptrain.report.monitor import Gpu, NotAvailable\n"
        "uuid = str(torch.cuda.get_device_properties(0).uuid)\n"
        "try: gpu = Gpu(uuid)\n"
        "except NotAvailable as error: assert 'MIG' in str(error), error; print('MIG', uuid)\n"
        "else: assert 0 <= gpu.utilisation() <= 100; print(pynvml.nvmlDeviceGetUUID(gpu.handle))"
    )
    last = torch.cuda.device_count() - 1
    chosen = f"GPU-{uuid}" if by == "uuid" else str(last)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": chosen}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    expected = uuid if by == "uuid" else str(torch.cuda.get_device_properties(last).uuid)
    assert expected in done.stdout


def test_not_available_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NotAvailable, match="nvidia-ml-py is not installed"):
        Gpu("b")


def wait_for(condition: Callable[[], bool]) -> None:
    """Up to a minute."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_no_driver_here_is_a_sentence_of_nvmls_own(tmp_path: Path) -> None:
    """The real nvidia-ml-py: on a machine without a GPU it says so; on one with, the made-up UUID
    is not found."""
    said: list[str] = []
    assert find_gpu("00000000-0000-0000-0000-000000000000", said.append) is None
    assert said[0].startswith("GPU utilisation is not available: NVML says: ")
