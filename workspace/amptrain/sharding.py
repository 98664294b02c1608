"""A model shared out over the processes (FSDP2, `torch.distributed.fsdp.fully_shard`): each holds
its part of every parameter, gradient and optimizer value. A block's parameters are gathered when it
computes, and freed after it.

Outside of the step, tensors are whole: checkpoints, model files and hashes hold what a process
alone would write, so a run may continue with or without sharding, on any number of processes.
"""

import copy
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from amptrain.distributed import Processes
from amptrain.errors import ConfigError
from amptrain.model import blocks
from amptrain.precision import Precision

NORMS = nn.modules.batchnorm._NormBase


def shard(model: nn.Module, precision: Precision, processes: Processes) -> None:
    """Share out `model`, in place, and move it to the device, a block at a time. All processes call
    this with the same values.

    Each block is a group of its own (see `amptrain.model.blocks`), and all that is in no block is
    one more. Raises ConfigError for a parameter that cannot be split.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            raise ConfigError(
                f"--parallel fsdp splits each parameter by its first dimension, and {name} has "
                "none: give it the shape (1,), or take --parallel ddp."
            )
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()  # FSDP takes no other memory format
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # takes a second

    is_cpu = processes.device.type == "cpu"
    if is_cpu:
        _complete_cpu_streams()
    mesh = init_device_mesh(processes.device.type, (processes.world_size,))
    parts = list(blocks(model))
    inside = {module for part in parts for module in part.modules()}
    rest = [module for module in model.modules() if module not in inside]
    for part, modules in [*((part, part.modules()) for part in parts), (model, rest)]:
        fully_shard(
            part,
            mesh=mesh,
            # On a CPU torch 2.6 counts a second gathering, for the backward pass, as a change of
            # the weights that autograd has kept: "modified by an inplace operation".
            reshard_after_forward=not is_cpu,
            mp_policy=MixedPrecisionPolicy(_gathered_as(modules, precision), torch.float32),
        )
    if not _averages(mesh):
        _divide_gradients(model, processes.world_size)


def _gathered_as(modules: Iterable[nn.Module], precision: Precision) -> torch.dtype | None:
    """The type in which parameters are gathered: that which autocast computes in. Gradients are
    summed in FP32.

    Autocast stays on: it keeps softmax, norms and losses in FP32 where it does without sharding
    (torchtitan#700). Alone it would do too, but would keep its own casts of all parameters until
    the backward pass. A group with BatchNorm is gathered in FP32 and left to autocast: its weights
    have to be of the type of its running statistics (torchtitan#674).
    """
    has_statistics = any(isinstance(m, NORMS) and m.track_running_stats for m in modules)
    return None if has_statistics else precision.dtype


def _complete_cpu_streams() -> None:
    """torch 2.6's stand-in for a CPU's stream lacks two methods that FSDP2 calls. There is nothing
    for them to do (pytorch#145935, in torch 2.7)."""
    for name in ("record_event", "wait_event"):
        if not hasattr(torch.cpu.Stream, name):
            setattr(torch.cpu.Stream, name, lambda *_: None)
    # Said by distribute_tensor; no random number is drawn for a sharded tensor here.
    warnings.filterwarnings("ignore", "DTensor random operators may not have complete support")


def _averages(mesh: DeviceMesh) -> bool:
    """Whether a reduce-scatter that is asked for the mean gives it: gloo gives the sum, and says
    nothing (pytorch#162338)."""
    ones = torch.ones(mesh.size(), device=mesh.device_type)
    mean = torch.empty(1, device=mesh.device_type)
    dist.reduce_scatter_tensor(mean, ones, op=dist.ReduceOp.AVG, group=mesh.get_group())
    return mean.item() == 1


def _divide_gradients(model: nn.Module, by: int) -> None:
    def divide(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.div_(by)

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(divide)


def outline(model: nn.Module) -> nn.Module:
    """A copy of `model` without values (on the meta device), which takes no memory."""
    tensors = {
        id(tensor): nn.Parameter(tensor.to("meta"), requires_grad=tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else tensor.to("meta")
        for tensor in [*model.parameters(), *model.buffers()]
    }
    return copy.deepcopy(model, tensors)


def gathered(value: Any, keep: bool) -> Any:
    """A copy of `value`, a state dict, with each tensor whole and on the CPU, which the next step
    does not change; nothing in the place of tensors where `keep` is false. All processes call this;
    one tensor at a time is whole on the device."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True) if keep else None
    if isinstance(value, Mapping):
        return {name: gathered(item, keep) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(gathered(item, keep) for item in value)
    return value


def emptied(state: Mapping[str, Any]) -> dict[str, Any]:
    """`state` with only the shapes of its tensors of one dimension and more: what processes are
    told that take their parts of rank 0's tensors."""
    return {
        name: emptied(item)
        if isinstance(item, Mapping)
        else item.to("meta")
        if isinstance(item, Tensor) and item.ndim
        else item
        for name, item in state.items()
    }


def _part(whole: Tensor, own: Tensor) -> Tensor:
    """Of rank 0's `whole`, what this process holds; laid out as `own` is."""
    if whole.is_meta:
        whole = torch.zeros(whole.shape, dtype=whole.dtype, device=own.device)
    if isinstance(own, DTensor):
        return distribute_tensor(whole, own.device_mesh, own.placements)
    return whole


def load_model(model: nn.Module, state: Mapping[str, Tensor], *, strict: bool = True) -> None:
    """`model.load_state_dict` with whole tensors, of which rank 0's count where the model is shared
    out. Buffers of other processes are left to the caller."""
    own = model.state_dict()
    parts = {
        name: _part(whole, own[name]) if name in own else whole for name, whole in state.items()
    }
    model.load_state_dict(parts, strict=strict)


def load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """`optimizer.load_state_dict` with whole tensors, of which rank 0's count where the parameters
    are shared out."""
    owners = [owner for group in optimizer.param_groups for owner in group["params"]]
    parts = {
        index: {
            name: _part(value, owners[index]) if isinstance(value, Tensor) and value.ndim else value
            for name, value in values.items()
        }
        for index, values in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": parts})


def held(model: nn.Module) -> tuple[int, int]:
    """Elements of parameters that this process holds, and all."""
    own = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return sum(p.numel() for p in own), sum(p.numel() for p in model.parameters())
