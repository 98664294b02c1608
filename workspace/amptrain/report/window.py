"""Counts up what happens in a window of steps, for one line of the log."""

import math
import time

import torch

from amptrain.distributed import Processes
from amptrain.report.log import Window
from amptrain.step import StepOutcome


class Clock:
    """Seconds of training in all parts of a run."""

    def __init__(self, before: float) -> None:
        """`before` are those of the parts before this one."""
        self.before = before
        self.start()

    def start(self) -> None:
        """This part begins now."""
        self.began = time.perf_counter()

    @property
    def seconds(self) -> float:
        return self.before + time.perf_counter() - self.began


class WindowMeter:
    """Of the steps since the last `close()`."""

    def __init__(self, processes: Processes) -> None:
        self.processes = processes
        self.restart()

    def restart(self) -> None:
        """Start a window now; time spent before (in validation, in a save) is not counted."""
        self.started = time.perf_counter()
        self.images = 0
        self.steps = 0
        self.waited = 0.0
        self.losses = 0.0
        self.skipped_steps: list[int] = []
        self.grad_norm = math.nan
        self.scale = math.nan
        if self.processes.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.processes.device)

    def add(self, step: int, images: int, outcome: StepOutcome) -> None:
        """Step `step` (1 is the first) over `images` images, of all processes, is over."""
        self.steps += 1
        self.images += images
        self.scale = outcome.scale_after
        if outcome.skipped:
            self.skipped_steps.append(step)
        else:
            self.losses += outcome.loss
            self.grad_norm = outcome.grad_norm

    def close(self, step: int, epoch: int, lr: float) -> Window:
        """The window that ends with `step`; the next one starts. All processes call this: losses
        are averaged."""
        elapsed = time.perf_counter() - self.started
        losses, waited = self.processes.sum([self.losses, self.waited])
        moved = self.steps - len(self.skipped_steps)
        waited = min(waited / self.processes.world_size, elapsed)
        cuda = self.processes.device.type == "cuda"
        window = Window(
            step=step,
            epoch=epoch,
            loss=losses / self.processes.world_size / moved if moved else math.nan,
            lr=lr,
            scale=self.scale,
            skips=len(self.skipped_steps),
            skipped_steps=tuple(self.skipped_steps),
            images_per_s=self.images / elapsed,
            images_per_s_compute=self.images / max(elapsed - waited, 1e-9),
            data_wait_share=waited / elapsed,
            memory_allocated=torch.cuda.max_memory_allocated(self.processes.device) if cuda else 0,
            memory_reserved=torch.cuda.max_memory_reserved(self.processes.device) if cuda else 0,
            grad_norm=self.grad_norm,
        )
        self.restart()
        return window
