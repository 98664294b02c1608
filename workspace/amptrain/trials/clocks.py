"""The GPU's clock while a measurement runs, and why it was lowered: a figure taken on a throttled
GPU is no figure."""

import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from amptrain.report.monitor import Gpu, NotAvailable

PERIOD = 0.2
"""Seconds between samples."""
REASONS = {
    "nvmlClocksThrottleReasonSwPowerCap": "power limit",
    "nvmlClocksThrottleReasonHwSlowdown": "hardware slowdown",
    "nvmlClocksThrottleReasonSwThermalSlowdown": "temperature",
    "nvmlClocksThrottleReasonHwThermalSlowdown": "temperature, by hardware",
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": "power brake",
}
"""NVML's bits, and what they mean (its reference, Clocks Throttle Reasons)."""


class Clock:
    """Samples of one GPU; none where NVML does not tell."""

    def __init__(self, gpu: Gpu | None) -> None:
        self.gpu = gpu
        self.mhz: list[int] = []
        self.max_mhz: int | None = None
        self.reasons: set[str] = set()

    def sample(self) -> None:
        """Ask NVML once."""
        if self.gpu is None:
            return
        nvml, handle = self.gpu.nvml, self.gpu.handle
        try:
            self.mhz.append(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
            self.max_mhz = nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)
            bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        except nvml.NVMLError:
            self.gpu = None
            return
        self.reasons |= {text for name, text in REASONS.items() if bits & getattr(nvml, name)}

    def found(self) -> dict[str, Any]:
        """The fields of job.Measured; empty without a sample."""
        if not self.mhz:
            return {"throttled": []}
        return {
            "clock_mhz": statistics.median(self.mhz),
            "max_clock_mhz": self.max_mhz,
            "throttled": sorted(self.reasons),
        }


@contextmanager
def watched(device: torch.device) -> Iterator[Clock]:
    """Sample the GPU's clock in a thread for the length of a `with` block."""
    clock = Clock(_gpu(device))
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(PERIOD):
            clock.sample()

    thread = threading.Thread(target=run, name="gpu-clock", daemon=True)
    if clock.gpu is not None:
        thread.start()
    try:
        yield clock
    finally:
        ended.set()
        if thread.ident is not None:
            thread.join(timeout=2)


def _gpu(device: torch.device) -> Gpu | None:
    if device.type != "cuda":
        return None
    try:
        return Gpu(str(torch.cuda.get_device_properties(device).uuid))
    except NotAvailable:
        return None
