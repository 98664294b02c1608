"""What a run consists of between two steps: all that is saved, and built from the settings before
it is loaded."""

import copy
import math
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from amptrain.checkpoint.resume import (
    check_changes,
    check_world_size,
    rng_state,
    seed_all,
    set_rng_state,
)
from amptrain.config import TrainConfig, flatten
from amptrain.data.datasets import Dataset
from amptrain.distributed import Processes
from amptrain.ema import Ema
from amptrain.errors import ConfigError
from amptrain.grad_checkpointing import checkpoint_gradients
from amptrain.model import build_model, freeze_backbone, frozen_norms
from amptrain.optim import build_optimizer
from amptrain.precision import resolve_precision
from amptrain.pretrained import StartWeights, load_weights
from amptrain.sharding import emptied, gathered, load_model, load_optimizer, outline, shard
from amptrain.step import BufferGuard


@dataclass
class Progress:
    """How far a run is."""

    step: int = 0
    """Steps done, skipped ones too: the place in the data."""
    optimizer_steps: int = 0
    """Steps that moved the weights: the place in the learning rate's schedule."""
    consecutive_skips: int = 0
    epoch_skips: int = 0
    validated_step: int = 0
    """The step after which the model was last validated."""
    accuracy: float = math.nan
    loss: float = math.nan
    """Of the last validation, as `accuracy`."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Those of one's own, of the last validation."""
    best_value: float | None = None
    """Of --eval-metric."""
    best_step: int = 0
    seconds: float = 0.0
    """Of all parts of the run."""


@dataclass
class OpenWindow:
    """What the steps since the last line of the log add up to, in this process. It is saved, so
    that the line after a kill is of all its steps."""

    steps: int = 0
    images: int = 0
    """Of all processes."""
    losses: float = 0.0
    """Sum over the steps that were not skipped."""
    skipped_steps: list[int] = field(default_factory=list)
    grad_norm: float = math.nan
    """Of the last step that was not skipped."""
    lr: float = math.nan
    scale: float = math.nan
    """Of the last step, as `lr`."""
    waited: float = 0.0
    """Seconds for data."""
    seconds: float = 0.0
    """In all, up to where they were last added up."""


def progress_of(saved: dict[str, Any]) -> Progress:
    """What a checkpoint holds; one from before --eval-metric has the best accuracy."""
    today = dict(saved)
    if "best_accuracy" in today:
        today["best_value"] = today.pop("best_accuracy")
    return Progress(**today)


class TrainState:
    """Model, optimizer, EMA, precision, progress and open window of this process."""

    def __init__(
        self, config: TrainConfig, task: Dataset, steps_per_epoch: int, processes: Processes
    ) -> None:
        """As at the start of a run. Raises ConfigError for settings that cannot be."""
        self.config, self.steps_per_epoch, self.processes = config, steps_per_epoch, processes
        self.precision = resolve_precision(config.precision, processes.device)
        self.precision.configure()
        torch.manual_seed(config.run.seed)  # the same initial weights in all processes
        self.memory_format = (
            torch.channels_last if config.model.channels_last else torch.contiguous_format
        )
        self.model = build_model(config.model_name, task)
        self.frozen: list[nn.Module] = []
        if config.model.freeze:
            freeze_backbone(self.model)
            self.frozen = frozen_norms(self.model)
        if config.model.sync_batchnorm and processes.world_size > 1:
            if processes.device.type != "cuda":
                raise ConfigError("--sync-batchnorm needs CUDA devices; torch has none for CPUs.")
            self.model = nn.SyncBatchNorm.convert_sync_batchnorm(self.model)
        self.model = self.precision.convert(self.model)
        self.is_sharded = config.model.parallel == "fsdp" and processes.world_size > 1
        self._outline = outline(self.model) if self.is_sharded else None
        if self.is_sharded:
            shard(self.model, self.precision, processes)
        else:
            self.model.to(processes.device)
            self.model.to(memory_format=self.memory_format)  # type: ignore[call-overload]  # torch's stub lacks it
        seed_all(config.run.seed, processes.rank)
        self.ema = Ema(self.model) if config.optim.ema_decay is not None else None
        if config.model.grad_checkpointing:  # after the averaged model, which is not trained
            checkpoint_gradients(self.model)
        self.optimizer = build_optimizer(self.model, config.optim)
        self.guard = BufferGuard(self.model)
        self.progress = Progress()
        self.window = OpenWindow()
        self.rate_before: float | None = None
        """The last learning rate of a checkpoint with other settings."""

    @property
    def judged(self) -> nn.Module:
        """The model that is validated, and used afterwards: the averaged one, if there is one."""
        return self.model if self.ema is None else self.ema.model

    def whole(self, model: nn.Module) -> nn.Module:
        """`model`, or of a sharded one a copy with whole weights on the CPU: for rank 0, all
        processes call this."""
        if self._outline is None:
            return model
        keep = self.processes.is_main
        state = gathered(model.state_dict(), keep)
        whole = copy.deepcopy(self._outline)
        if keep:
            whole.load_state_dict(state, assign=True)
        return whole

    def idle_images(self, shape: tuple[int, int, int]) -> Tensor | None:
        """What a sharded model is called with in a process that has no images: the others gather
        its parameters from it."""
        return torch.zeros(1, *shape, device=self.processes.device) if self.is_sharded else None

    @property
    def is_stopped_early(self) -> bool:
        """Whether the last validation is so many epochs after the best as --early-stop-patience
        allows. It follows from what is saved anyway, so a run that continues ends where it would
        have ended."""
        patience, progress = self.config.optim.early_stop_patience, self.progress
        if patience is None or progress.step == 0 or progress.validated_step != progress.step:
            return False
        return progress.step - progress.best_step >= patience * self.steps_per_epoch

    def start_from(self, start: StartWeights, classes: tuple[str, ...]) -> str:
        """Take over weights before the first step. Returns a sentence on what was left out."""
        if start.over_network:  # rank 0 fetches them for all of this machine
            if self.processes.is_main:
                start.read()
            self.processes.any(False)
        text = load_weights(self.model, start, classes)
        if self.ema is not None:
            self.ema.model.load_state_dict(self.model.state_dict())
        return text

    def broadcast_buffers(self) -> None:
        """Rank 0's BatchNorm statistics for all: they are what a checkpoint holds, and what is to
        be validated."""
        self.processes.broadcast_tensors(list(self.model.buffers()))
        if self.ema is not None:
            self.processes.broadcast_tensors(list(self.ema.model.buffers()))

    def state_dict(self, *, copy: bool = False) -> dict[str, object]:
        """All that the next steps depend on, as tensors and plain types. With `copy` rank 0's is a
        copy on the CPU, and the next step may begin. All processes call this."""
        self.broadcast_buffers()
        model, optimizer = self.model.state_dict(), self.optimizer.state_dict()
        ema = None if self.ema is None else self.ema.model.state_dict()
        if copy or self.is_sharded:
            keep = self.processes.is_main
            model, ema, optimizer = (gathered(part, keep) for part in (model, ema, optimizer))
        return {
            "model": model,
            "ema": ema,
            "optimizer": optimizer,
            "precision": self.precision.name,
            "scaler": self.precision.state_dict(),
            "progress": asdict(self.progress),
            "window": self.processes.gather(asdict(self.window)) if self.window.steps else None,
            "rng": self.processes.gather(rng_state(self.processes.device)),
            "world_size": self.processes.world_size,
            "steps_per_epoch": self.steps_per_epoch,
            "config": flatten(self.config),
        }

    def told_to_others(self, state: dict[str, Any]) -> dict[str, Any]:
        """What other processes than rank 0 need of a checkpoint: all, but of what is sharded the
        shapes, as they get their parts one by one."""
        if not self.is_sharded:
            return state
        return {**state, **{name: emptied(state[name]) for name in ("model", "optimizer")}}

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Continue from `state_dict()`. Returns sentences about what is not as it was; ConfigError
        if it cannot."""
        messages = check_changes(state["config"], flatten(self.config))
        if messages:
            group = state["optimizer"]["param_groups"][0]
            self.rate_before = group["lr"] / group.get("lr_scale", 1.0)
        messages += check_world_size(
            state["world_size"],
            self.processes.world_size,
            saved_steps=state["steps_per_epoch"],
            steps=self.steps_per_epoch,
        )
        load_model(self.model, state["model"])
        if self.ema is not None:
            self.ema.model.load_state_dict(state["ema"])
        settings = [
            {k: v for k, v in group.items() if k != "params"}
            for group in self.optimizer.param_groups
        ]
        load_optimizer(self.optimizer, state["optimizer"])
        for group, setting in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(setting)  # those of today, which are announced if they changed
        if state["precision"] == self.precision.name:
            self.precision.load_state_dict(state["scaler"])
        else:
            messages.append(
                f"The precision changes from {state['precision']} to {self.precision.describe()}. "
                "From here on this is "
                "another run than before."
            )
        self.progress = progress_of(state["progress"])
        self.window = self._own_window(state.get("window"))
        if self.processes.rank < len(state["rng"]):
            set_rng_state(state["rng"][self.processes.rank], self.processes.device)
        if self.is_sharded:
            self.broadcast_buffers()
        return messages

    def _own_window(self, saved: list[dict[str, Any]] | None) -> OpenWindow:
        """That of this process; of another number of processes, what gives the same mean loss."""
        if saved is None:  # closed at that step, or of a checkpoint from before windows were saved
            return OpenWindow()
        windows = [OpenWindow(**window) for window in saved]
        if len(windows) == self.processes.world_size:
            return windows[self.processes.rank]
        for part in ("losses", "waited"):
            mean = sum(getattr(window, part) for window in windows) / len(windows)
            setattr(windows[0], part, mean)
        return windows[0]
