"""When memory runs out: how one sees it, and the settings that need less."""

import torch

from amptrain.config import TrainConfig
from amptrain.errors import TrainingError

CPU_ALLOCATOR = ("can't allocate memory", "not enough memory")
"""How torch's allocators for the CPU say it, in a plain RuntimeError."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that a GPU's memory, or the host's, did not suffice."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in CPU_ALLOCATOR)


def out_of_memory(error: BaseException, config: TrainConfig, world_size: int) -> TrainingError:
    """What to raise in its place: what was found, and what to set, with what that changes."""
    optim = config.optim
    found = (str(error).strip().splitlines() or ["the host has no memory left"])[0]
    more = next_accumulation(optim.global_batch_size, optim.grad_accum_steps, world_size)
    same = (
        f"--grad-accum-steps {more} gives the same step, with less of it in memory at a time. "
        if more is not None
        else ""
    )
    return TrainingError(
        f"Out of memory: {found} {same}"
        f"A smaller --global-batch-size (now {optim.global_batch_size}), --image-size or --model "
        "needs less and "
        "gives another result. The newest checkpoint is kept; the same command continues from it."
    )


def next_accumulation(batch_size: int, accumulate: int, world_size: int) -> int | None:
    """The next larger number of micro-batches that splits the step evenly, with two images for each
    rank; None if there is none."""
    for more in range(accumulate + 1, batch_size // (2 * world_size) + 1):
        if batch_size % (more * world_size) == 0:
            return more
    return None
