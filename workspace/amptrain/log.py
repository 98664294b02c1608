"""What a run writes while it goes: one line of JSON in metrics.jsonl for each window of steps and each epoch."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path


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
    """Norm of the true gradient at the last step that was not skipped, before clipping; NaN if all were."""


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


class RunLog:
    """Writes the records of rank 0; with `enabled=False` nothing. Continuing at `start_step` drops records after it."""

    def __init__(self, run_dir: Path, total_steps: int, enabled: bool, start_step: int = 0) -> None:
        self.path = run_dir / "metrics.jsonl"
        self.enabled = enabled
        self.total_steps = total_steps
        if enabled and self.path.exists():
            lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if json.loads(line)["step"] <= start_step]
            self.path.write_text("".join(kept), encoding="utf-8")

    def window(self, record: Window) -> None:
        """A window of steps is over."""
        self._write("window", record)

    def epoch(self, record: EpochRecord) -> None:
        """An epoch is over, with its validation."""
        self._write("epoch", record)

    def message(self, text: str) -> None:
        """A sentence for the person watching."""
        if self.enabled:
            print(text, flush=True)

    def close(self) -> None:
        """Nothing more comes."""

    def _write(self, kind: str, record: Window | EpochRecord) -> None:
        if self.enabled:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"kind": kind, **dataclasses.asdict(record)}) + "\n")
