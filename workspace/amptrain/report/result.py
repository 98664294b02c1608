"""What a finished run leaves: result.json, and a line for people."""

import json
from typing import Any

import torch
import torchvision

from amptrain.checkpoint.state import TrainState
from amptrain.config import TrainConfig
from amptrain.data.order import Order
from amptrain.model import weights_sha256
from amptrain.report.log import RunLog


def finish(config: TrainConfig, order: Order, state: TrainState, broken: int, log: RunLog) -> None:
    """Write `result.json` and say how the run went. For rank 0."""
    progress = state.progress
    device = state.processes.device
    seen = order.images_until(progress.step)
    result: dict[str, Any] = {
        "data": config.data.data,
        "model": config.model_name,
        "accuracy": progress.accuracy,
        "epochs": progress.step / order.steps_per_epoch,
        "steps": progress.step,
        "skipped_steps": progress.step - progress.optimizer_steps,
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
        "weights_sha256": weights_sha256(state.model),
    }
    (config.run_dir / "result.json").write_text(
        json.dumps(result, indent=2) + "\n", encoding="utf-8"
    )
    left_out = f" {broken} images could not be read, see broken.txt." if broken else ""
    log.message(
        f"{config.data.data}: accuracy {progress.accuracy:.2%} in {progress.seconds:.1f} s, "
        f"{result['images_per_s']:.0f} images/s with validation, precision {state.precision.describe()}.{left_out}"
    )
