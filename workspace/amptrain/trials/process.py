"""One trial in a process of its own: started here, its answer read here."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from amptrain.config import TrainConfig, flatten, require
from amptrain.errors import ConfigError, TrainingError

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The machine, and what is trained on it."""

    device: str
    """The GPU's name, or the CPU's."""
    is_cuda: bool
    memory: int
    """Bytes that are free."""
    cpus: int
    versions: dict[str, str]
    emulated: dict[str, str]
    """Precisions that this device lacks or emulates, each with a sentence."""
    images: int
    """Training images."""
    shape: list[int]
    """Channels, height, width."""
    is_made: bool
    """Whether the images are noise, which no loader reads."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Whether a micro-batch fits."""

    fits: bool
    why: str = ""
    """Why it does not."""
    allocated: int = 0
    reserved: int = 0
    """Bytes at the peak, on CUDA."""
    resident: int = 0
    """Bytes of the process at the peak, on a CPU."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How long a measurement takes."""

    warm_up_s: float = 5.0
    measure_s: float = 10.0
    fewest_steps: int = 5


QUICK = Effort(warm_up_s=1.0, measure_s=3.0, fewest_steps=2)


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What one process measured."""

    images_per_s: float
    """Without loading: images of a step over the median time of one."""
    steps: int
    """Steps in that median."""
    peak: Fit
    data_images_per_s: float | None = None
    """Through the loader, over the whole time; None where that was not asked for."""
    data_wait: float | None = None
    """Share of that time in which the step waited for images."""
    workers: int | None = None
    """Loader workers."""
    clock_mhz: float | None = None
    """Median of the GPU's clock meanwhile; None where NVML tells none."""
    max_clock_mhz: float | None = None
    throttled: tuple[str, ...] = ()
    """Why the GPU lowered its clock."""


class Killed(TrainingError):
    """A trial was ended by a signal."""


def require_alone(command: str, config: TrainConfig) -> None:
    """Raise ConfigError for what takes several processes."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(f"{command} starts processes of its own: call it without torchrun.")
    require(
        config.model.parallel == "ddp",
        f"{command} tries one process, in which --parallel fsdp shares nothing out. Leave it out.",
    )


def facts(config: TrainConfig) -> Facts:
    """Ask a process that then ends. Raises ConfigError for settings that cannot be."""
    return Facts(**_run(config, "facts", {}))


def fit(config: TrainConfig, micro_batch: int) -> Fit:
    """Try training steps with micro-batches of this size."""
    try:
        return Fit(**_run(config, "fit", {"micro_batch": micro_batch}))
    except Killed as error:
        return Fit(fits=False, why=str(error))


def speed(config: TrainConfig, effort: Effort, *, photos: Path | None, with_data: bool) -> Speed:
    """Time training steps; `with_data` also through the loader, from the folder `photos` where the
    data set is noise. Raises TrainingError where it does not fit."""
    asked = {**asdict(effort), "photos": photos and str(photos), "with_data": with_data}
    answer = _run(config, "speed", asked)
    answer["throttled"] = tuple(answer["throttled"])
    return Speed(**{**answer, "peak": Fit(**answer["peak"])})


def peak_text(found: Fit) -> str:
    """The peak in GiB, or why there is none."""
    if not found.fits:
        return found.why
    if found.reserved:
        return f"{found.allocated / GIB:.2f} GiB allocated, {found.reserved / GIB:.2f} reserved"
    return f"{found.resident / GIB:.2f} GiB"


def _run(config: TrainConfig, work: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The answer of `work` on `config`. Raises Killed, ConfigError, TrainingError."""
    request = json.dumps({"work": work, "settings": flatten(config), "arguments": arguments})
    with subprocess.Popen(
        [sys.executable, "-m", "amptrain.trials.inside"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        try:
            answer, said = process.communicate(request)
        finally:
            process.kill()  # Ctrl-C, for one
    if process.returncode < 0:
        name = signal.Signals(-process.returncode).name
        by_kernel = ", likely by the kernel for want of memory" if name == "SIGKILL" else ""
        raise Killed(f"killed by {name}{by_kernel}")
    if process.returncode == 0:
        return dict(json.loads(answer))
    last = said.strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
    text = last[0].removeprefix("amptrain: ")
    raise ConfigError(text) if process.returncode == 2 else TrainingError(text)
