"""When memory runs out: how one sees it, and the settings that need less."""

import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from amptrain.config import TrainConfig
from amptrain.errors import TrainingError

CPU_ALLOCATOR = ("can't allocate memory", "not enough memory", "bad_alloc", "could not create a")
"""How torch, C++ and oneDNN say it for the CPU, in a plain RuntimeError."""


@contextmanager
def told_at(most: int | None) -> Iterator[None]:
    """Let an allocation that would take this process above `most` bytes fail, with an error one
    can tell; None sets no limit.

    A container's limit is kept otherwise: the kernel kills the process, and nobody learns why.
    What is mapped and not used, such as the stacks of threads, counts for RLIMIT_DATA
    (setrlimit(2)) and is added.
    """
    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if most is None or before != resource.RLIM_INFINITY:
        yield
        return
    soft = most + held("VmData") - held("RssAnon")
    resource.setrlimit(resource.RLIMIT_DATA, (soft if hard < 0 else min(soft, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))


def held(name: str) -> int:
    """Bytes of this process by a name of proc_pid_status(5), such as VmHWM, its peak."""
    status = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
    found = re.search(rf"^{name}:\s*(\d+) kB", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


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
    if world_size > 1 and config.model.parallel == "ddp":
        same += "--parallel fsdp shares parameters and optimizer values out over the processes. "
    return TrainingError(
        f"Out of memory: {found} {same}"
        f"A smaller --global-batch-size (now {optim.global_batch_size}), --image-size or --model "
        "needs less and gives another result. `amptrain find-batch` with the same flags finds the "
        "largest micro-batch that fits. The newest checkpoint is kept; the same command continues "
        "from it."
    )


def next_accumulation(batch_size: int, accumulate: int, world_size: int) -> int | None:
    """The next larger number of micro-batches that splits the step evenly, with two images for each
    rank; None if there is none."""
    for more in range(accumulate + 1, batch_size // (2 * world_size) + 1):
        if batch_size % (more * world_size) == 0:
            return more
    return None
