"""How busy the GPU is while a run trains, and why it is not: one warning that names the cause and
the flag to try.

The GPU is found by the UUID that CUDA itself gives for the device torch uses, so
CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER hold, whatever they say: NVML's own numbers know nothing
of either (pytorch#94472).
"""

import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import torch

from amptrain.config import TrainConfig
from amptrain.distributed import Processes
from amptrain.precision import Precision
from amptrain.report.log import Window
from amptrain.words import counted

PERIOD = 1.0
"""Seconds between samples; NVML's own figure is an average over 1/6 to 1 s."""
WARM_UP = 20
"""Samples after the start which count for nothing: cuDNN tries its kernels, torch.compile compiles,
loaders fill."""
IDLE_SAMPLES = 30
"""Samples below MIN_UTILISATION, on average, that make the warning."""
MIN_UTILISATION = 60.0
"""Per cent of time with a kernel on the GPU from which on all is well."""
MAX_DATA_WAIT = 0.1
"""Share of the time spent waiting for data from which on that is the cause."""


class NotAvailable(Exception):
    """NVML gives no utilisation; the text, which says why, ends a sentence."""


class Gpu:
    """One GPU by its UUID, in NVML."""

    def __init__(self, uuid: str, nvml: Any = None) -> None:
        """`uuid` as torch gives it, without the prefix GPU- or MIG-. Raises NotAvailable."""
        if nvml is None:
            try:
                import pynvml
            except ImportError:
                raise NotAvailable("the package nvidia-ml-py is not installed") from None
            nvml = pynvml
        self.nvml = nvml
        with self._errors():
            nvml.nvmlInit()
            try:
                self.handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            except nvml.NVMLError_NotFound:
                # CUDA gives a MIG instance's own UUID. It has no utilisation, and its GPU's is that
                # of others too.
                nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
                raise NotAvailable(
                    "the device is a MIG instance, of which NVML measures none"
                ) from None
            if self._mig():
                raise NotAvailable(
                    "the GPU is split into MIG instances, of which NVML measures none"
                )

    def utilisation(self) -> float:
        """Per cent of the last moment in which a kernel ran. Raises NotAvailable."""
        with self._errors():
            return float(self.nvml.nvmlDeviceGetUtilizationRates(self.handle).gpu)

    def _mig(self) -> bool:
        try:
            return bool(self.nvml.nvmlDeviceGetMigMode(self.handle)[0])
        except self.nvml.NVMLError_NotSupported:
            return False  # a GPU that cannot be split

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except self.nvml.NVMLError as error:
            raise NotAvailable(f"NVML says: {error}") from None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What of a run decides why its GPU idles."""

    fp16: bool
    fused: bool
    log_every: int
    batch_size: int
    compile: bool
    workers: int
    """Loader processes of each rank."""
    cpus: int
    """CPUs each rank may use, by affinity and quota."""


@dataclass
class Samples:
    """Utilisation in per cent, of one window and of the time the warning looks at."""

    window: list[float] = field(default_factory=list)
    recent: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    """Data-wait share of each window in `recent`."""
    seen: int = 0


class Monitor:
    """Samples one GPU in a thread while a run trains. When NVML is lost, which is said once, the
    run goes on.

    `say` gets each sentence; `gpu` is None where there is nothing to watch; `period` is in seconds.
    """

    def __init__(
        self,
        settings: Settings,
        say: Callable[[str], None],
        gpu: Gpu | None,
        period: float = PERIOD,
    ) -> None:
        self.settings, self.say, self.gpu, self.period = settings, say, gpu, period
        self.samples = Samples()
        self.warned = False
        self.lost: str | None = None
        self.paused_by = 0
        self.lock = threading.Lock()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._run, name="gpu-monitor", daemon=True)

    def __enter__(self) -> Self:
        if self.gpu is not None:
            self.thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.ended.set()
        if self.thread.ident is not None:
            self.thread.join(
                timeout=2 * self.period
            )  # NVML may hang; a run that is over does not wait for it

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Not training: validation, or a checkpoint. What the GPU does meanwhile counts for
        nothing."""
        with self.lock:
            self.paused_by += 1
        try:
            yield
        finally:
            with self.lock:
                self.paused_by -= 1

    def sample(self) -> None:
        """Ask NVML once, as the thread does each second."""
        if self.gpu is None:
            return
        try:
            value = self.gpu.utilisation()
        except NotAvailable as error:
            self.gpu = None
            self.lost = str(error)  # said by the thread that trains, so that lines do not mix
            return
        with self.lock:
            if self.paused_by:
                return
            self.samples.seen += 1
            if self.samples.seen > WARM_UP:
                self.samples.window.append(value)

    def window(self, record: Window) -> Window:
        """A window of steps is over. Returns it with its utilisation, and warns if the GPU has
        idled for a while."""
        if self.lost is not None:
            self.say(
                f"GPU utilisation is not available from here on ({self.lost}). Training goes on."
            )
            self.lost = None
        with self.lock:
            values, self.samples.window = self.samples.window, []
        if not values:
            return record
        self._judge(values, record.data_wait_share)
        return dataclasses.replace(record, gpu_utilisation=sum(values) / len(values))

    def _judge(self, values: list[float], waited: float) -> None:
        recent, waits = self.samples.recent, self.samples.waits
        recent += values
        waits += [waited] * len(values)  # so that a long window weighs more
        del recent[:-IDLE_SAMPLES], waits[:-IDLE_SAMPLES]
        mean = sum(recent) / len(recent)
        if self.warned or len(recent) < IDLE_SAMPLES or mean >= MIN_UTILISATION:
            return
        self.warned = True
        self.say(
            f"The GPU was busy only {mean:.0f} % of the time lately. "
            f"{cause(self.settings, sum(waits) / len(waits))}"
        )

    def _run(self) -> None:
        while self.gpu is not None and not self.ended.wait(self.period):
            self.sample()


def cause(settings: Settings, waited: float) -> str:
    """Why a GPU idles, and the flag to try, as sentences. `waited` is the share of time spent
    waiting for data."""
    if waited >= MAX_DATA_WAIT:
        found = (
            f"Training waited for data {waited:.0%} of the time, with "
            f"{counted(settings.workers, 'loader worker')} in each process and a quota of "
            f"{counted(settings.cpus, 'CPU')}."
        )
        if settings.workers < settings.cpus:
            return f"{found} Try --num-workers {settings.cpus}."
        return (
            f"{found} Give the container more CPUs and raise --num-workers, "
            "or try --prefetch-factor 4 or smaller image files."
        )
    if settings.fp16 and not settings.fused:
        return (
            "The host waits for the device at each step, "
            "as the loss scale of an unfused optimizer asks. Try --fused."
        )
    if settings.log_every < 10:
        return (
            f"The host waits for the device at each log line, so once in "
            f"{counted(settings.log_every, 'step')}. "
            f"Try --log-every {max(50, 10 * settings.log_every)}."
        )
    more = "" if settings.compile else ", or --compile, which starts fewer and larger kernels"
    return (
        f"Data was there in time ({waited:.0%} waiting), so a step gives the GPU too little work: "
        "the batch is small. "
        f"Try --global-batch-size {2 * settings.batch_size}{more}."
    )


def watch(
    config: TrainConfig,
    precision: Precision,
    workers: int,
    processes: Processes,
    say: Callable[[str], None],
) -> Monitor:
    """A monitor of rank 0's GPU, as rank 0 is the one that speaks; of none without NVML, which is
    said."""
    settings = Settings(
        fp16=precision.has_scaler,
        fused=config.optim.fused,
        log_every=config.run.log_every,
        batch_size=config.optim.global_batch_size,
        compile=config.model.compile,
        workers=workers,
        cpus=processes.cpus,
    )
    if processes.device.type != "cuda" or not processes.is_main:
        return Monitor(settings, say, None)
    return Monitor(
        settings, say, find_gpu(str(torch.cuda.get_device_properties(processes.device).uuid), say)
    )


def find_gpu(uuid: str, say: Callable[[str], None], nvml: Any = None) -> Gpu | None:
    """The GPU with this UUID, or None and a sentence why."""
    try:
        return Gpu(uuid, nvml)
    except NotAvailable as error:
        say(f"GPU utilisation is not available: {error}. Training goes on without it.")
        return None
