"""`amptrain advise`: the fastest settings for one model on this machine, found one after the
other."""

import shlex
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from amptrain.config import TrainConfig, flatten, require
from amptrain.errors import TrainingError
from amptrain.precisions import precision_names
from amptrain.trials.process import QUICK, Effort, Facts, Speed, facts, require_alone, speed
from amptrain.trials.table import spread
from amptrain.words import counted

GAIN = 1.02
"""A setting is changed only for more than this; less is noise, or not worth a flag."""
MUCH_WAITING = 0.05
"""Share of the time waiting for images from which on other numbers of workers are tried."""


@dataclass(frozen=True, kw_only=True)
class AdviseConfig:
    """Find the fastest settings for one model on this machine, as a command line."""

    train: TrainConfig = field(default_factory=TrainConfig)
    repeats: int = 2
    """Processes for each try."""
    quick: bool = False
    """One short process for each try."""

    def __post_init__(self) -> None:
        require(self.repeats >= 1, f"--repeats is {self.repeats}; it needs at least 1.")


@dataclass(frozen=True)
class Tried:
    """Settings, and what they gave."""

    train: TrainConfig
    rates: tuple[float, ...]
    """Images/s of each process."""


def advise(config: AdviseConfig) -> int:
    """`amptrain advise`. Raises ConfigError, and TrainingError where nothing runs."""
    require_alone("advise", config.train)
    known = facts(config.train)
    step = counted(config.train.optim.global_batch_size, "image")
    print(
        f"{config.train.model_name} on {known.device}, {step} a step.\n\n"
        "| try | images/s | |\n| --- | ---: | --- |",
        flush=True,
    )
    best = fastest(config, known)
    best = with_workers(config, best, known)
    print(f"\nThe fastest here:\n\n    {command(best)}\n\n{hint(known)}")
    return 0


def fastest(config: AdviseConfig, known: Facts) -> TrainConfig:
    """The fastest precision, then memory format, then compile, each with what was chosen before."""
    best: Tried | None = None

    def consider(label: str, train: TrainConfig) -> None:
        nonlocal best
        found = try_settings(config, train, lambda one: one.images_per_s, label, best)
        best = found or best

    for name in precision_names():
        if name not in known.emulated:
            consider(f"--precision {name}", _with(config.train, "precision", precision=name))
    if best is None:
        raise TrainingError("No precision could be tried; the lines above say why.")
    model = best.train.model
    other = not model.channels_last
    consider(_flag("channels_last", other), _with(best.train, "model", channels_last=other))
    if not (model.compile or model.grad_checkpointing):  # the two do not go together
        consider("--compile", _with(best.train, "model", compile=True))
    return best.train


def with_workers(config: AdviseConfig, train: TrainConfig, known: Facts) -> TrainConfig:
    """Another number of loader workers, where training waits for images and it waits less."""
    if known.is_made:
        return train
    waits: list[float] = []
    workers: list[int] = []

    def rate(found: Speed) -> float:
        waits.append(found.data_wait or 0.0)
        workers.append(found.workers or 0)
        return found.data_images_per_s or 0.0

    best = try_settings(config, train, rate, "with loading", None, with_data=True)
    if best is None or statistics.median(waits) < MUCH_WAITING:
        return train
    had = workers[0]
    for number in sorted({1, max(1, had // 2), 2 * had, known.cpus} - {had, 0}):
        tried = _with(best.train, "data", num_workers=number)
        found = try_settings(config, tried, rate, f"--num-workers {number}", best, with_data=True)
        best = found or best
    return best.train


def try_settings(
    config: AdviseConfig,
    train: TrainConfig,
    rate: Callable[[Speed], float],
    label: str,
    best: Tried | None,
    *,
    with_data: bool = False,
) -> Tried | None:
    """Measure, and say so in a line. Gives what was tried if it is faster than `best`."""
    rates: list[float] = []
    effort = QUICK if config.quick else Effort()
    try:
        for _ in range(1 if config.quick else config.repeats):
            rates.append(rate(speed(train, effort, photos=None, with_data=with_data)))
    except TrainingError as error:
        print(f"| {label} | - | {error} |", flush=True)
        return None
    is_better = best is None or (
        statistics.median(rates) > GAIN * statistics.median(best.rates)
        and min(rates) > max(best.rates)
    )
    print(f"| {label} | {spread(rates)} | {'taken' if is_better else ''} |", flush=True)
    return Tried(train, tuple(rates)) if is_better else None


def command(train: TrainConfig) -> str:
    """The command line of `amptrain train` for these settings: those that differ from the
    defaults."""
    default = flatten(TrainConfig())
    words = [
        word
        for name, value in flatten(train).items()
        if value != default[name]
        for word in _flag(name, value).split(" ", 1)
    ]
    return shlex.join(["amptrain", "train", *words])


def hint(known: Facts) -> str:
    """What else makes a step faster, and is another training."""
    where = "A GPU" if known.is_cuda else "A CPU"
    return (
        f"{where} may do more in larger steps, which are another training: `amptrain find-batch` "
        "tells what fits."
    )


def _with(train: TrainConfig, group: str, **settings: object) -> TrainConfig:
    changed = replace(getattr(train, group), **settings)
    return replace(train, **{group: changed})


def _flag(name: str, value: object) -> str:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag} {value}"
