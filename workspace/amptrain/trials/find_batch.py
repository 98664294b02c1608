"""`amptrain find-batch`: trials in processes of their own, a line for each, and the flags."""

from dataclasses import dataclass, field

from amptrain.config import TrainConfig, require
from amptrain.errors import TrainingError
from amptrain.trials.process import GIB, Fit, facts, fit, peak_text, require_alone
from amptrain.trials.search import RESOLUTION, SMALLEST, fewest_micro_batches, largest_fitting
from amptrain.words import counted


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


def find_batch(config: FindBatchConfig) -> int:
    """`amptrain find-batch`. Raises ConfigError, and TrainingError where nothing fits."""
    train = config.train
    require_alone("find-batch", train)
    known = facts(train)
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
    print(f"\nThe largest micro-batch that fits: {counted(largest, 'image')} ({near}).")
    print(advice(train, largest))
    return 0


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
            f"A step of {counted(batch, 'image')} cannot be split evenly into micro-batches that "
            f"fit, so this one has {near}, which is another training."
        )
    flags = f"Flags: --global-batch-size {batch} --grad-accum-steps {count}"
    if count == now:
        return f"{flags}\nThat is what you have."
    return (
        f"{flags}\nThe step stays one of {counted(batch, 'image')} and learns the same; BatchNorm "
        f"sees {counted(batch // count, 'image')} at a time, in place of {batch // now}."
    )
