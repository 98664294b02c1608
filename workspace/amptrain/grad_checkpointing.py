"""Gradient checkpointing: what a block computes inside is not kept for the backward pass but
computed again there. Less memory for some more time, and the same gradients."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from amptrain.errors import ConfigError
from amptrain.model import blocks


def checkpoint_gradients(model: nn.Module) -> int:
    """Let `model`'s blocks compute again in the backward pass; returns how many there are. The
    names of its parameters stay.

    Where there are no blocks, as in VGG, each Sequential of n layers is cut into √n parts (Chen et
    al., arXiv:1604.06174). Raises ConfigError for a model with neither.
    """
    found = list(blocks(model))
    for block in found:
        _replace_forward(block, _recomputed(block.forward, [block]))
    if found:
        return len(found)
    chains = [module for module in model.modules() if isinstance(module, nn.Sequential)]
    parts = 0
    for chain in (chain for chain in chains if len(chain) >= 4):
        layers = list(chain)
        each = math.ceil(len(layers) / round(math.sqrt(len(layers))))
        cut = [layers[start : start + each] for start in range(0, len(layers), each)]
        again = [_recomputed(partial(_run, part), part) for part in cut]
        _replace_forward(chain, partial(_run, again))
        parts += len(cut)
    if not parts:
        raise ConfigError(
            "--grad-checkpointing finds no blocks in this model: no nn.Sequential or nn.ModuleList "
            "of modules. Put its blocks into one, or leave the flag out."
        )
    return parts


def _replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """In place, so that names in checkpoints stay the same."""
    module.forward = forward


def _run(steps: Sequence[Callable[[Any], Any]], value: Any) -> Any:
    for step in steps:
        value = step(value)
    return value


def _recomputed(function: Callable[..., Any], modules: Sequence[nn.Module]) -> Callable[..., Any]:
    """`function`, which runs `modules`, computed again in the backward pass: with the same dropout,
    and without a second count of its batch in BatchNorm's running statistics."""

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _statistics_kept(modules)

    def forward(*inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*inputs, **named)
        return checkpoint(function, *inputs, use_reentrant=False, context_fn=contexts, **named)

    return forward


@contextmanager
def _statistics_kept(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Norms that are trained count on copies of their running statistics, which are thrown away."""
    kept = [
        (norm, dict(norm._buffers))
        for module in modules
        for norm in module.modules()
        if isinstance(norm, nn.modules.batchnorm._NormBase) and norm.training
    ]
    for norm, buffers in kept:
        norm._buffers.update(
            {name: None if value is None else value.clone() for name, value in buffers.items()}
        )
    try:
        yield
    finally:
        for norm, buffers in kept:
            norm._buffers.update(buffers)
