"""Counts up what happens in a window of steps, for one line of the log."""

import math
import time

import torch

from amptrain.checkpoint.state import OpenWindow, TrainState
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
    """Of the steps since the last `close()`. The counts are `state.window`, which is saved."""

    def __init__(self, state: TrainState) -> None:
        self.state, self.processes = state, state.processes
        self.restart(state.window)

    def restart(self, window: OpenWindow | None = None) -> None:
        """Start a window now, or go on with one; time spent before, in validation, is not
        counted."""
        self.state.window = OpenWindow() if window is None else window
        self.go_on()
        if self.processes.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.processes.device)

    def pause(self) -> None:
        """What comes now, such as a save, is no training."""
        self.state.window.seconds = time.perf_counter() - self.started

    def go_on(self) -> None:
        """The pause is over."""
        self.started = time.perf_counter() - self.state.window.seconds

    def add(self, step: int, images: int, lr: float, outcome: StepOutcome) -> None:
        """Step `step` (1 is the first) over `images` images, of all processes, is over."""
        window = self.state.window
        window.steps += 1
        window.images += images
        window.lr = lr
        window.scale = outcome.scale_after
        if outcome.skipped:
            window.skipped_steps.append(step)
        else:
            window.losses += outcome.loss
            window.grad_norm = outcome.grad_norm

    def close(self, step: int, epoch: int) -> Window:
        """The window that ends with `step`; the next one starts. All processes call this: losses
        are averaged."""
        self.pause()
        counts, cuda = self.state.window, self.processes.device.type == "cuda"
        elapsed = counts.seconds
        losses, waited = self.processes.sum([counts.losses, counts.waited])
        moved = counts.steps - len(counts.skipped_steps)
        waited = min(waited / self.processes.world_size, elapsed)
        window = Window(
            step=step,
            epoch=epoch,
            loss=losses / self.processes.world_size / moved if moved else math.nan,
            lr=counts.lr,
            scale=counts.scale,
            skips=len(counts.skipped_steps),
            skipped_steps=tuple(counts.skipped_steps),
            images_per_s=counts.images / elapsed,
            images_per_s_compute=counts.images / max(elapsed - waited, 1e-9),
            data_wait_share=waited / elapsed,
            memory_allocated=torch.cuda.max_memory_allocated(self.processes.device) if cuda else 0,
            memory_reserved=torch.cuda.max_memory_reserved(self.processes.device) if cuda else 0,
            grad_norm=counts.grad_norm,
        )
        self.restart()
        return window
