"""What a run says of itself before its first step."""

import torch

from amptrain.config import TrainConfig
from amptrain.data import Task
from amptrain.order import Order
from amptrain.precision import Fp16
from amptrain.state import TrainState


def introduction(config: TrainConfig, task: Task, order: Order, state: TrainState, workers: int) -> list[str]:
    """Sentences on data, precision, device and batch; `workers` are those of each process."""
    world, device = state.processes.world_size, state.processes.device
    total = order.steps_per_epoch * config.optim.epochs
    steps = min(total, config.optim.max_steps or total)
    part = order.micro_batch // world
    slow = isinstance(state.precision, Fp16) and device.type == "cpu"
    return [
        f"Run {config.run_dir}: {config.model_name} on {config.data.data}, {len(task.train)} images to train on, "
        f"{len(task.validation)} to validate with; {steps} steps, {order.steps_per_epoch} an epoch.",
        f"Precision {state.precision.describe()}; device {device}, {torch.get_num_threads()} threads, "
        f"{workers} loader workers in each process.",
        f"A step takes {config.optim.batch_size} images: {world} processes × {config.optim.accumulate} "
        f"micro-batches × {part} images.",
        *(["fp16 on a CPU is for trying it out: it is very slow there. bf16 is not."] if slow else []),
    ]
