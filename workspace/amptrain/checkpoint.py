"""Checkpoints: written aside, made durable, renamed into place; read with weights_only, the newest good one first."""

import os
from dataclasses import dataclass, field
from pathlib import Path

import torch

from amptrain.errors import CheckpointError

__all__ = ["CheckpointError", "CheckpointStore", "Loaded"]


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A checkpoint that was read."""

    state: dict[str, object]
    step: int
    path: Path
    messages: list[str] = field(default_factory=list)
    """Sentences for the person reading: files that were damaged and passed over."""


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(self, directory: Path, keep: int = 2) -> None:
        self.directory = directory
        self.keep = keep

    def save(self, state: dict[str, object], step: int) -> Path:
        """Write `state`, which holds tensors and plain types only. Raises CheckpointError."""
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"step-{step:09d}.pt"
        aside = path.with_suffix(".tmp")
        with aside.open("wb") as file:
            torch.save({"step": step, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
        for old in sorted(self.directory.glob("step-*.pt"))[: -self.keep]:
            old.unlink()
        return path

    def load_latest(self) -> Loaded | None:
        """The newest checkpoint, or None where there is none. Raises CheckpointError."""
        paths = sorted(self.directory.glob("step-*.pt"))
        if not paths:
            return None
        state = torch.load(paths[-1], map_location="cpu", weights_only=True)
        return Loaded(state=state, step=int(state["step"]), path=paths[-1])
