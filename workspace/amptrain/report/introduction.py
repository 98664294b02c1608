"""What a run says of itself before its first step."""

import torch

from amptrain.checkpoint.state import TrainState
from amptrain.config import TrainConfig
from amptrain.data.datasets import Dataset
from amptrain.data.order import Order
from amptrain.model import blocks
from amptrain.precision import Precision, has_bf16
from amptrain.schedule import total_steps
from amptrain.sharding import held
from amptrain.words import counted


def introduction(
    config: TrainConfig, task: Dataset, order: Order, state: TrainState, workers: int
) -> list[str]:
    """Sentences on data, precision, device and batch; `workers` are those of each process."""
    world, device = state.processes.world_size, state.processes.device
    steps = total_steps(config.optim, order.steps_per_epoch)
    part = order.micro_batch // world
    return [
        f"Run {config.run_dir}: {config.model_name} on {config.data.data}, "
        f"{counted(len(task.train), 'image')} to train on, {len(task.validation)} to validate "
        f"with; {counted(steps, 'step')}, {order.steps_per_epoch} an epoch.",
        f"Precision {state.precision.describe()}; device {device}, "
        f"{counted(torch.get_num_threads(), 'thread')}, "
        f"{counted(workers, 'loader worker')} in each process.",
        f"A step takes {counted(config.optim.global_batch_size, 'image')}: "
        f"{counted(world, 'process')} × {counted(config.optim.grad_accum_steps, 'micro-batch')} × "
        f"{counted(part, 'image')}.",
        *shared_out(state),
        rates(config),
        *mixed(config),
        *slow_on_cpu(config.precision.precision, state.precision, device),
    ]


def shared_out(state: TrainState) -> list[str]:
    """Of a sharded model, what each process holds."""
    if not state.is_sharded:
        return []
    own, whole = held(state.model)
    return [
        f"Parameters, gradients and optimizer values are shared out (FSDP) by "
        f"{counted(len(list(blocks(state.model))), 'block')} and the rest: this process holds "
        f"{own:,} of {whole:,} elements."
    ]


def rates(config: TrainConfig) -> str:
    """The learning rates, which may be nobody's choice."""
    optim = config.optim
    head = f", {optim.head_lr:g} for the head" if optim.head_lr else ""
    only = " (the rest is frozen)" if config.model.freeze else ""
    return f"Learning rate {optim.lr:g}{head}{only}, with {optim.optimizer}."


def mixed(config: TrainConfig) -> list[str]:
    """What the training loss means where images are mixed."""
    flags = [
        f"{name} {value:g}" for name in ("mixup", "cutmix") if (value := getattr(config.data, name))
    ]
    if not flags:
        return []
    return [
        f"Training images are mixed in pairs ({', '.join(flags)}): the training loss is that of "
        "mixed labels and stays above the validation loss, whose images are as they are."
    ]


def slow_on_cpu(asked: str, precision: Precision, device: torch.device) -> list[str]:
    """What a CPU does not do well, and what was taken in its place."""
    if device.type != "cpu" or (has_bf16(device) and precision.dtype != torch.float16):
        return []
    better = "bf16" if has_bf16(device) else "fp32"
    if asked == "auto":
        return [
            "This CPU has no bf16 (that takes AVX-512), and emulates it slowly: --precision auto "
            "is fp32 here."
        ]
    if precision.dtype is None:
        return []
    return [
        f"{precision.name} on this CPU is for trying it out: it is emulated, and very slow. "
        f"{better} is not."
    ]
