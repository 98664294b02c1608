"""What a finished run leaves: result.json, and a line for people."""

import json
import math
from typing import Any

import torch
import torchvision
import yaml

from amptrain.checkpoint.state import Progress, TrainState
from amptrain.checkpoint.store import damage
from amptrain.config import TrainConfig, flatten, renamed
from amptrain.data.datasets import Dataset
from amptrain.data.order import Order
from amptrain.errors import ConfigError, TrainingError
from amptrain.files import atomic_write
from amptrain.metrics import ACCURACY, shown
from amptrain.model import weights_sha256
from amptrain.optim import with_learning_rates
from amptrain.precision import precision_class, precision_name
from amptrain.report.log import RunLog, finite
from amptrain.words import counted

RESULT = "result.json"
NO_INFLUENCE = {
    *(
        "name",
        "runs",
        "data",
        "data_dir",
        "num_workers",
        "prefetch_factor",
        "log_every",
        "save_every",
        "async_checkpoint",
    ),
    *("keep_checkpoints", "device", "skip_broken", "grad_checkpointing", "metrics"),
    "parallel",
}
"""Settings that change nothing in a run that is over. `data` is among them since the same data may
lie at another path."""
LOSS_SCALE = {
    *("init_scale", "growth_factor", "backoff_factor", "growth_interval", "min_scale"),
    "max_consecutive_skips",
}
LENGTH = {"epochs", "max_steps", "early_stop_patience"}
"""Settings that say when a run ends; more of them continue it."""


def finish(
    config: TrainConfig, task: Dataset, order: Order, state: TrainState, broken: int, log: RunLog
) -> None:
    """Write `result.json` and say how the run went. All processes call this; rank 0 writes.

    Raises TrainingError, with what is safe, if it could not be written."""
    weights = state.whole(state.model)
    if not state.processes.is_main:
        return
    progress = state.progress
    device = state.processes.device
    seen = order.images_until(progress.step)
    result: dict[str, Any] = {
        "data": config.data.data,
        "model": config.model_name,
        "image_size": task.shape[1],
        "measure": task.measure,
        "accuracy": progress.accuracy,
        "metrics": {name: finite(value) for name, value in progress.metrics.items()},
        "epochs": progress.step / order.steps_per_epoch,
        "steps": progress.step,
        "skipped_steps": progress.step - progress.optimizer_steps,
        "stopped_early": state.is_stopped_early,
        "eval_metric": config.optim.eval_metric,
        "best_value": progress.best_value,
        "best_epoch": progress.best_step / order.steps_per_epoch,
        "seconds": progress.seconds,
        "images_per_s": seen / progress.seconds,
        "precision": state.precision.name,
        "precision_details": state.precision.describe(),
        "tf32": state.precision.tf32,
        "broken_images": broken,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "world_size": state.processes.world_size,
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "weights_sha256": weights_sha256(weights),
    }
    path = config.run_dir / RESULT
    try:
        atomic_write(path, json.dumps(result, indent=2) + "\n")
    except OSError as error:
        raise TrainingError(
            f"The training is done and its last checkpoint is written, but {path} could not be: "
            f"{error.strerror}. Make room on that disk, or let it be written to; the same command "
            "then writes it, without training anything again."
        ) from error
    log.message(result_line(result))


def result_line(result: dict[str, Any]) -> str:
    """The one line of a finished run, for people."""
    broken = result["broken_images"]
    left_out = f" {counted(broken, 'image')} could not be read, see broken.txt." if broken else ""
    return (
        f"{result['data']}: {result.get('measure', 'accuracy')} {result['accuracy']:.2%} in "
        f"{result['seconds']:.1f} s, "
        f"{result['images_per_s']:.0f} images/s with validation, "
        f"precision {result['precision_details']}.{left_out}"
    )


def finished(config: TrainConfig, device: torch.device) -> list[str]:
    """Sentences about the run if there is nothing left to train; empty if there is.

    Reads config.yaml and result.json only, and changes no file. More epochs continue a finished
    run.

    Raises:
        ConfigError: the run is finished and was trained with other settings; the sentence has the
            name of a new run.
    """
    directory = config.run_dir
    try:
        result = json.loads((directory / RESULT).read_text(encoding="utf-8"))
        before = yaml.safe_load((directory / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return []
    newest = max((directory / "checkpoints").glob("step-*.pt"), default=None)
    if newest is None or damage(newest) is not None:
        return []  # what can be told of that is told where checkpoints are read
    now = {
        **flatten(with_learning_rates(config)),
        "precision": precision_name(config.precision.precision, device),
    }
    before = renamed(before)
    if now["image_size"] is None:  # a run that goes on keeps its size
        now["image_size"] = before.get("image_size")
    before["precision"] = result["precision"]
    other = [
        name
        for name in now
        if name in before and before[name] != now[name] and name not in NO_INFLUENCE
    ]
    if not precision_class(result["precision"]).has_scaler and "precision" not in other:
        other = [name for name in other if name not in LOSS_SCALE]
    if set(other) <= LENGTH and is_longer(before, now, result.get("stopped_early", False)):
        return []
    if other:
        changes = ", ".join(f"{name} {before[name]} → {now[name]}" for name in other)
        name = f"{directory.name}-" + "-".join(f"{name}{now[name]}" for name in other)
        raise ConfigError(
            f"The run {directory} is finished, and its settings were others: {changes}. "
            f"Nothing is trained. For a new run with these: --name {name.replace('/', '_')}"
        )
    return [
        f"The run {directory} is finished at step {result['steps']}: there is nothing to train. "
        "To train it further give more --epochs; for another run another --name.",
        result_line(result),
    ]


def early_stop_text(config: TrainConfig, progress: Progress, order: Order, task: Dataset) -> str:
    """The sentence on a run that ends before its last epoch."""
    optim, best = config.optim, progress.best_value
    name = task.measure if optim.eval_metric == ACCURACY else optim.eval_metric
    patience = counted(optim.early_stop_patience or 0, "epoch")
    than = "any" if best is None else f"{shown(optim.eval_metric, best)}, which was that"
    return (
        f"Ended early at step {progress.step}: {patience} without a better validation {name} "
        f"(--early-stop-patience) than {than} of epoch "
        f"{progress.best_step // order.steps_per_epoch}."
    )


def is_longer(before: dict[str, Any], now: dict[str, Any], stopped_early: bool) -> bool:
    """Whether a run of the settings `now` may have steps left after one of `before`."""
    patience = [flat.get("early_stop_patience") or math.inf for flat in (before, now)]
    if stopped_early:
        return patience[1] > patience[0]
    steps = [flat.get("max_steps") or math.inf for flat in (before, now)]
    return bool(now["epochs"] > before["epochs"] or steps[1] > steps[0])
