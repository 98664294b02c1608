"""What a run says and writes while it goes: lines for people, metrics.jsonl for programs,
TensorBoard's event files.

metrics.jsonl has one JSON object a line: `"kind": "window"` with the fields of Window, or `"kind":
"epoch"` with those of EpochRecord; what is not a finite number is null. Each line is written whole
at once. A run that continues at step N first drops all lines after N, and that of a window which a
stop cut off at N; the window is in the checkpoint and goes on. So each line is there once, and says
what it would say if the run had never been stopped.
"""

import dataclasses
import json
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amptrain.files import atomic_write, named
from amptrain.report.terminal import logger, terminal

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

METRICS = "metrics.jsonl"


@dataclass(frozen=True, kw_only=True)
class Window:
    """A window of steps that is over; `step` is the last one in it."""

    step: int
    epoch: int
    loss: float
    """Mean training loss of the window; of its steps that were not skipped."""
    lr: float
    scale: float
    """Loss scale after the last step; 1 without a scaler."""
    skips: int
    """Skipped steps in this window."""
    skipped_steps: tuple[int, ...]
    """Which ones."""
    images_per_s: float
    images_per_s_compute: float
    """Without the time the host waited for data."""
    data_wait_share: float
    """Time the host waited for data, over the window's time; 0 to 1."""
    memory_allocated: int
    """Peak of the device's memory in use, in bytes; 0 on CPU."""
    memory_reserved: int
    """Peak of the device's memory held by torch, in bytes; 0 on CPU."""
    grad_norm: float
    """Norm of the true gradient at the last step that was not skipped, before clipping; NaN if all
    were."""
    gpu_utilisation: float | None = None
    """Per cent of time in which a kernel ran on rank 0's GPU; None where it was not measured."""


@dataclass(frozen=True, kw_only=True)
class EpochRecord:
    """An epoch that is over."""

    epoch: int
    step: int
    val_loss: float
    val_accuracy: float
    """0 to 1."""
    skips: int
    """Skipped steps in this epoch."""
    seconds: float
    """Training and validation together."""
    measure: str = "accuracy"
    """What `val_accuracy` is: micro-F1 where images have several labels."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Those of --metrics; in metrics.jsonl and TensorBoard they stand beside the other values."""


class RunLog:
    """Says and writes the records of rank 0; with `enabled=False` nothing.

    Where standard output is a terminal, a bar below the lines tells how far the run is and when it
    will be done.
    """

    def __init__(
        self,
        run_dir: Path,
        total_steps: int,
        enabled: bool,
        start_step: int = 0,
        window_goes_on: bool = False,
    ) -> None:
        """Continuing at `start_step` drops the records after it, and where the window goes on the
        one that ends with it."""
        self.run_dir, self.total_steps, self.enabled = run_dir, total_steps, enabled
        self.path = run_dir / METRICS
        self.half_written = False
        self.writer: SummaryWriter | None = None
        self.excepthook = threading.excepthook
        self.failing = False
        if not enabled:
            return
        # A window that goes on ended at no epoch's end, so no other record is of that step.
        kept = start_step - window_goes_on
        drop_after(self.path, kept)
        self._try(lambda: self._open_tensorboard(kept))
        terminal().start_bar(run_dir.name, completed=start_step, total=total_steps)

    def window(self, record: Window) -> None:
        """A window of steps is over."""
        if not self.enabled:
            return
        self._write("window", record)
        self.message(window_line(record, self.total_steps))
        terminal().advance(record.step)

    def epoch(self, record: EpochRecord) -> None:
        """An epoch is over, with its validation."""
        if not self.enabled:
            return
        self._write("epoch", record)
        self.message(epoch_line(record))

    def message(self, text: str) -> None:
        """A sentence for the person watching."""
        if self.enabled:
            logger.info("%s", text)

    def close(self) -> None:
        """Nothing more comes."""
        if self.enabled:
            terminal().stop_bar()
        if self.writer is not None:
            self._try(self._close_tensorboard)
            self.writer = None
            threading.excepthook = self.excepthook

    def _open_tensorboard(self, kept: int) -> None:
        from torch.utils.tensorboard.writer import (
            SummaryWriter,
        )  # half a second, which only rank 0 spends

        threading.excepthook = self._hear_thread
        # With purge_step TensorBoard drops what a killed run had written after the last step that
        # is kept.
        self.writer = SummaryWriter(str(self.run_dir / "tensorboard"), purge_step=kept + 1)

    def _hear_thread(self, args: threading.ExceptHookArgs) -> None:
        """TensorBoard's thread keeps its error for the next write, where `_try` says it in one
        sentence, and then raises it again for Python to print in forty lines."""
        ours = type(args.thread).__module__.startswith("tensorboard.")
        if not (ours and isinstance(args.exc_value, OSError)):
            self.excepthook(args)

    def _close_tensorboard(self) -> None:
        if self.writer is not None:
            try:
                self.writer.flush()  # raises what the thread met since; close doesn't
            finally:
                self.writer.close()

    def _write(self, kind: str, record: Window | EpochRecord) -> None:
        fields = dataclasses.asdict(record)
        fields |= fields.pop("metrics", {})
        values = {name: finite(value) for name, value in fields.items()}
        self._try(lambda: self._append(json.dumps({"kind": kind, **values}, allow_nan=False)))
        self._try(lambda: self._tensorboard("train" if kind == "window" else "validation", values))

    def _append(self, line: str) -> None:
        """`line`, whole, or an OSError; what a full disk left of the one before is then ended
        first."""
        data = f"{chr(10) if self.half_written else ''}{line}\n".encode()
        with named(self.path), self.path.open("ab", buffering=0) as file:
            self.half_written = True
            if file.write(data) != len(data):
                raise OSError(f"{self.path}: only a part of a line could be written")
            self.half_written = False

    def _tensorboard(self, group: str, values: dict[str, Any]) -> None:
        if self.writer is None:
            return
        for name, value in values.items():
            if isinstance(value, int | float) and name != "step":
                self.writer.add_scalar(f"{group}/{name}", value, values["step"])
        self.writer.flush()

    def _try(self, write: Callable[[], None]) -> None:
        """A log that cannot be written is said once, and ends no run."""
        try:
            write()
        except OSError as error:
            if not self.failing:
                self.message(
                    f"The metrics of this run cannot be written: {error}. Training goes on without "
                    "them."
                )
            self.failing = True


def finite(value: Any) -> Any:
    """`value`; None for NaN and infinity, for which JSON has no word."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def window_line(window: Window, total_steps: int) -> str:
    """The one line of a window, for people."""
    skips = f"  skips {window.skips}" if window.skips == 0 else f"  SKIPS {window.skips}"
    parts = [
        f"step {window.step:>{len(str(total_steps))}}/{total_steps}  epoch {window.epoch}",
        f"  loss {window.loss:.4f}  lr {window.lr:.2e}  scale {window.scale:g}{skips}",
        f"  {window.images_per_s:.0f} images/s ({window.images_per_s_compute:.0f} without waiting "
        "for data)",
        f"  data wait {window.data_wait_share:.0%}",
    ]
    if window.memory_reserved:
        allocated, reserved = window.memory_allocated / 2**30, window.memory_reserved / 2**30
        parts.append(f"  memory {allocated:.2f} GiB allocated, {reserved:.2f} GiB reserved")
    if window.gpu_utilisation is not None:
        parts.append(f"  GPU busy {window.gpu_utilisation:.0f}%")
    return "".join(parts)


def epoch_line(record: EpochRecord) -> str:
    """The one line of an epoch, for people."""
    return (
        f"epoch {record.epoch} done: validation loss {record.val_loss:.4f}, "
        f"{record.measure} {record.val_accuracy:.2%}, "
        f"{''.join(f'{name} {value:.4f}, ' for name, value in record.metrics.items())}"
        f"skipped steps {record.skips}, {record.seconds:.1f} s since the start"
    )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl, also while it is written: a line that is not whole yet is
    left out.

    Raises OSError if it cannot be read.
    """
    return [
        record for line in path.read_bytes().splitlines() if (record := _record(line)) is not None
    ]


def drop_after(path: Path, step: int) -> None:
    """Drop the records after `step`, and a half line a kill left. The old file lives until the new
    one is whole."""
    if not path.exists():
        return
    lines = [
        line
        for line in path.read_bytes().splitlines()
        if (record := _record(line)) and record["step"] <= step
    ]
    atomic_write(path, b"".join(line + b"\n" for line in lines))


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:  # cut off by a kill or a full disk, or not written whole yet
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None
