"""`amptrain find-batch`: trials in processes of their own, a line for each, and the flags."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

from amptrain.config import TrainConfig, flatten, require
from amptrain.errors import ConfigError, TrainingError
from amptrain.find_batch.search import RESOLUTION, SMALLEST, fewest_micro_batches, largest_fitting

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class FindBatchConfig:
    """Find the largest micro-batch that fits, by real steps in fresh processes."""

    train: TrainConfig = field(default_factory=TrainConfig)
    max_batch: int = 4096
    """Micro-batches above this are not tried."""

    def __post_init__(self) -> None:
        require(
            self.max_batch >= SMALLEST,
            f"--max-batch is {self.max_batch}; it needs to be at least {SMALLEST}.",
        )


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The machine, and what is trained on it."""

    device: str
    memory: int
    """Bytes that are free."""
    images: int
    """Training images."""
    shape: list[int]
    """Channels, height, width."""


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


class Killed(TrainingError):
    """A trial was ended by a signal."""


def find_batch(config: FindBatchConfig) -> int:
    """`amptrain find-batch`. Raises ConfigError, and TrainingError where nothing fits."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("find-batch starts processes of its own: call it without torchrun.")
    train = config.train
    known = Facts(**_run(train, "facts", {}))
    shape = "×".join(map(str, known.shape))
    print(
        f"{train.model_name} on images of {shape}, --precision {train.precision.precision}, on "
        f"{known.device}: {known.memory / GIB:.1f} GiB are free.\n\n"
        "| micro-batch | fits | peak memory |\n| ---: | --- | --- |",
        flush=True,
    )
    tried: list[Fit] = []

    def fits(size: int) -> bool:
        found = fit(train, size)
        tried.append(found)
        print(f"| {size} | {'yes' if found.fits else 'no'} | {peak_text(found)} |", flush=True)
        return found.fits

    # A micro-batch has no more images than there are.
    cap = max(SMALLEST, min(config.max_batch, known.images))
    largest = largest_fitting(fits, start=SMALLEST, cap=cap)
    if largest == 0:
        raise TrainingError(
            f"Not even {SMALLEST} images fit: {tried[-1].why}. A smaller --model or --image-size, "
            "--optimizer sgd or --freeze needs less."
        )
    near = "the most that was tried" if largest == cap else f"to one part in {RESOLUTION}"
    print(
        f"\nThe largest micro-batch that fits: {largest} images ({near}).\n{advice(train, largest)}"
    )
    return 0


def peak_text(found: Fit) -> str:
    """The peak in GiB, or why there is none."""
    if not found.fits:
        return found.why
    if found.reserved:
        return f"{found.allocated / GIB:.2f} GiB allocated, {found.reserved / GIB:.2f} reserved"
    return f"{found.resident / GIB:.2f} GiB"


def advice(train: TrainConfig, largest: int) -> str:
    """The flags to paste, for the same global batch, and what they change."""
    batch, now = train.optim.global_batch_size, train.optim.grad_accum_steps
    count = fewest_micro_batches(batch, largest)
    if count is None:
        sizes = range(SMALLEST, min(largest, batch) + 1)
        micro = max(sizes, key=lambda size: (batch // size * size, size))
        steps = batch // micro
        near = steps * micro
        return (
            f"Flags: --global-batch-size {near} --grad-accum-steps {steps}\n"
            f"A step of {batch} images cannot be split evenly into micro-batches that fit, so this "
            f"one has {near} images, which is another training."
        )
    flags = f"Flags: --global-batch-size {batch} --grad-accum-steps {count}"
    if count == now:
        return f"{flags}\nThat is what you have."
    return (
        f"{flags}\nThe step stays one of {batch} images and learns the same; BatchNorm sees "
        f"{batch // count} images at a time, in place of {batch // now}."
    )


def fit(config: TrainConfig, micro_batch: int) -> Fit:
    """Try training steps with micro-batches of this size."""
    try:
        return Fit(**_run(config, "fit", {"micro_batch": micro_batch}))
    except Killed as error:
        return Fit(fits=False, why=str(error))


def _run(config: TrainConfig, work: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The answer of `work` on `config`. Raises Killed, ConfigError, TrainingError."""
    request = json.dumps({"work": work, "settings": flatten(config), "arguments": arguments})
    with subprocess.Popen(
        [sys.executable, "-m", "amptrain.find_batch.trial"],
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
