"""The step of training, on made images and through the loader, without what a run has around it."""

import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any

import torch

from amptrain.checkpoint.state import TrainState
from amptrain.config import TrainConfig
from amptrain.data.datasets import Dataset
from amptrain.data.feed import Feed
from amptrain.data.loader import Batch, DeviceBatches, FakeBatches
from amptrain.data.order import Order, TrainBatches
from amptrain.distributed import Processes
from amptrain.loss import make_loss
from amptrain.report.log import RunLog
from amptrain.signals import StopSignal
from amptrain.step import MicroBatch, PendingOutcome, backward, update
from amptrain.trials.process import Effort
from amptrain.trials.search import SMALLEST

ENDLESS = 10**6
"""Steps; nobody waits for so many."""
LEARNING_RATE = 1e-6
"""So small that a step on noise spoils no weight."""
EMA_DECAY = 0.999
MOST_SKIPS = 20
"""Steps in which an fp16 loss scale comes down to what a new model takes."""


class Session:
    """A model in training on this process's device."""

    def __init__(self, config: TrainConfig, task: Dataset, processes: Processes) -> None:
        """Raises ConfigError for settings that cannot be."""
        self.config, self.task, self.processes = config, task, processes
        self.device = processes.device
        torch.backends.cudnn.benchmark = not config.run.deterministic
        torch.use_deterministic_algorithms(config.run.deterministic)
        self.state = TrainState(config, task, 1, processes)
        if config.model.compile:
            self.state.model.compile()
        self.loss = make_loss(config.optim, task, self.device)
        self.kept: deque[Any] = deque(maxlen=2)
        """Training keeps as many micro-batches, for a diagnosis."""
        self.pending: PendingOutcome | None = None
        self.skipped = False
        """Whether the last step that was settled moved nothing."""

    def step(self, batches: Iterator[MicroBatch]) -> None:
        """The next step, of the micro-batches that `batches` gives up to its last one."""
        state = self.state
        state.model.train()
        for norm in state.frozen:
            norm.eval()
        gradients = backward(
            state.model,
            state.optimizer,
            state.precision,
            self._of_one_step(batches),
            loss_fn=self.loss,
            guard=state.guard,
        )
        self.settle()
        self.pending = update(
            state.optimizer,
            state.precision,
            gradients,
            guard=state.guard,
            learning_rate=LEARNING_RATE,
            max_grad_norm=self.config.optim.max_grad_norm,
        )
        if state.ema is not None:
            state.ema.update(state.model, EMA_DECAY, self.pending.found_inf)

    def settle(self) -> None:
        """Read the outcome of the last step, as training does one step later."""
        if self.pending is not None:
            outcome, self.pending = self.pending.read(), None
            self.skipped = outcome.skipped

    def _of_one_step(self, batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        last = False
        while not last:
            batch = next(batches)
            last = batch.last
            self.kept.append(batch.inputs)
            yield batch

    def try_step(self, micro_batch: int) -> None:
        """Steps until the optimizer has its state, then one of two micro-batches of this size: the
        peak of training, with gradients kept from one to the next."""
        # Compiled code is of one size.
        first = micro_batch if self.config.model.compile else SMALLEST
        for _ in repeat(None, MOST_SKIPS):
            self.step(self.noise([(first, True)]))
            self.settle()
            if not self.skipped:
                break
        self.step(self.noise([(micro_batch, False), (micro_batch, True)]))
        self.settle()

    def noise(self, sizes: Sequence[tuple[int, bool]]) -> Iterator[MicroBatch]:
        """One step's micro-batches (images, last), of noise that comes from the host, as images
        do."""
        made = (
            Batch(
                torch.randint(256, (images, *self.task.shape), dtype=torch.uint8),
                torch.randint(self.task.label_count, (images,)),
                (),
                1 / len(sizes),
                last,
            )
            for images, last in sizes
        )
        return iter(
            DeviceBatches(made, self.task, self.device, self.state.memory_format, lambda _: None)
        )

    def endless_noise(self) -> Iterator[MicroBatch]:
        """Micro-batches on the device: nothing is loaded."""
        order = self.order(2 * self.config.optim.global_batch_size)
        return iter(
            FakeBatches(
                TrainBatches(order, 0, ENDLESS, 0),
                self.task,
                self.device,
                self.state.memory_format,
                order.micro_batch,
            )
        )

    @contextmanager
    def loaded(self, data: Dataset) -> Iterator[Feed]:
        """Micro-batches of `data`, without end, through the loader that training has."""
        with tempfile.TemporaryDirectory() as folder:
            run = replace(self.config.run, runs=Path(folder), name="trial")
            config = replace(self.config, run=run)
            config.run_dir.mkdir()
            order = self.order(len(data.train))
            feed = Feed(config, data, order, self.processes, self.state.memory_format, StopSignal())
            feed.open(0, ENDLESS, RunLog(config.run_dir, ENDLESS, enabled=False))
            try:
                yield feed
            finally:
                feed.close()

    def order(self, images: int) -> Order:
        """The steps of a data set of so many images."""
        optim = self.config.optim
        return Order(images, optim.global_batch_size, seed=0, accumulate=optim.grad_accum_steps)


def timed(step: Callable[[], object], device: torch.device, effort: Effort) -> list[float]:
    """Seconds of each step after the warm-up: by events on CUDA, by the clock elsewhere."""
    began, steps = time.perf_counter(), 0
    while steps < 2 or time.perf_counter() - began < effort.warm_up_s:
        step()
        steps += 1
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)  # cuDNN's search for kernels is over
    began, marks = time.perf_counter(), [_mark(device)]
    while len(marks) <= effort.fewest_steps or time.perf_counter() - began < effort.measure_s:
        step()
        marks.append(_mark(device))
    if device.type != "cuda":
        return [float(after - before) for before, after in pairwise(marks)]
    torch.cuda.synchronize(device)
    return [before.elapsed_time(after) / 1000 for before, after in pairwise(marks)]


def _mark(device: torch.device) -> Any:
    """A moment: of the device on CUDA, of the host elsewhere."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
