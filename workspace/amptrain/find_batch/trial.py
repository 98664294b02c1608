"""What runs in the process of a trial: a request from stdin, an answer to stdout, as JSON."""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
import torch.utils.tensorboard.writer  # so that as much is loaded as in training

import amptrain.train  # noqa: F401
from amptrain.checkpoint.state import TrainState
from amptrain.config import TrainConfig, from_flat
from amptrain.data.datasets import Dataset, open_dataset
from amptrain.data.loader import Batch, DeviceBatches
from amptrain.distributed import Processes
from amptrain.find_batch.search import SMALLEST
from amptrain.limits import memory_free
from amptrain.loss import make_loss
from amptrain.memory import held, is_out_of_memory, told_at
from amptrain.optim import with_learning_rates
from amptrain.step import MicroBatch, backward, update

LEARNING_RATE = 1e-6
"""So small that a step on noise spoils no weight."""
MOST_SKIPS = 20
"""Steps in which an fp16 loss scale comes down to what a new model takes."""

Answer = dict[str, Any]


def main(_: Sequence[str]) -> int:
    """Do what is asked for on stdin."""
    with contextlib.suppress(OSError):
        # Where the kernel has to kill for memory, it is to be this process and no other.
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what anything prints meanwhile is no answer
    request = json.load(sys.stdin)
    config = with_learning_rates(from_flat(request["settings"]))
    answer = WORK[request["work"]](config, **request["arguments"])
    with answers:
        json.dump(answer, answers)
    return 0


def facts(config: TrainConfig) -> Answer:
    """See command.Facts."""
    processes = Processes(config.run.device)
    device, is_cuda = processes.device, processes.device.type == "cuda"
    task = open_dataset(config.data, config.run.seed)
    return {
        "device": torch.cuda.get_device_name(device) if is_cuda else "the CPU",
        "memory": torch.cuda.mem_get_info(device)[0] if is_cuda else memory_free(),
        "images": len(task.train),
        "shape": task.shape,
    }


def fit(config: TrainConfig, micro_batch: int) -> Answer:
    """See command.Fit."""
    processes = Processes(config.run.device)
    is_cpu = processes.device.type == "cpu"
    try:
        # On a CPU: fail above what is free now, rather than be killed for it.
        with told_at(memory_free() + held("RssAnon") if is_cpu else None):
            task = open_dataset(config.data, config.run.seed)
            try_steps(config, task, processes, micro_batch)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return {"fits": False, "why": (str(error).strip().splitlines() or ["no memory left"])[0]}
    if is_cpu:
        return {"fits": True, "resident": held("VmHWM")}
    return {
        "fits": True,
        "allocated": torch.cuda.max_memory_allocated(processes.device),
        "reserved": torch.cuda.max_memory_reserved(processes.device),
    }


def try_steps(config: TrainConfig, task: Dataset, processes: Processes, micro_batch: int) -> None:
    """Steps until the optimizer has its state, then one of two micro-batches of this size: the peak
    of training, with gradients kept from one to the next."""
    torch.backends.cudnn.benchmark = not config.run.deterministic
    state = TrainState(config, task, 1, processes)
    if config.model.compile:
        state.model.compile()
    loss_fn = make_loss(config.optim, task, processes.device)
    kept: list[Any] = []

    def step(sizes: Sequence[tuple[int, bool]]) -> bool:
        """One step of micro-batches (images, last); whether it was skipped."""
        state.model.train()
        for norm in state.frozen:
            norm.eval()

        def batches() -> Iterator[MicroBatch]:
            for batch in made_batches(task, state, processes, sizes):
                kept[:] = [*kept[-1:], batch.inputs]  # training keeps as many, for a diagnosis
                yield batch

        gradients = backward(
            state.model,
            state.optimizer,
            state.precision,
            batches(),
            loss_fn=loss_fn,
            guard=state.guard,
        )
        outcome = update(
            state.optimizer,
            state.precision,
            gradients,
            guard=state.guard,
            learning_rate=LEARNING_RATE,
            max_grad_norm=config.optim.max_grad_norm,
        )
        if state.ema is not None:
            state.ema.update(state.model, 0.999, outcome.found_inf)
        return outcome.read().skipped

    first = micro_batch if config.model.compile else SMALLEST  # compiled code is of one size
    for _ in repeat(None, MOST_SKIPS):
        if not step([(first, True)]):
            break
    step([(micro_batch, False), (micro_batch, True)])


def made_batches(
    task: Dataset, state: TrainState, processes: Processes, sizes: Sequence[tuple[int, bool]]
) -> Iterator[MicroBatch]:
    """Noise that comes from the host, as images do."""
    made = (
        Batch(
            torch.randint(256, (images, *task.shape), dtype=torch.uint8),
            torch.randint(task.label_count, (images,)),
            (),
            1 / len(sizes),
            last,
        )
        for images, last in sizes
    )
    return iter(DeviceBatches(made, task, processes.device, state.memory_format, lambda _: None))


WORK: dict[str, Callable[..., Answer]] = {"facts": facts, "fit": fit}

if __name__ == "__main__":
    from amptrain.cli import run

    raise SystemExit(run(main, []))
