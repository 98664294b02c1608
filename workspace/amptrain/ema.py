"""Exponential moving average of a model's weights."""

import copy

import torch
from torch import Tensor, nn


class Ema:
    """A copy of `model` whose parameters follow it slowly. Buffers are taken over as they are."""

    def __init__(self, model: nn.Module) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False).eval()

    @torch.no_grad()
    def update(self, model: nn.Module, decay: float, found_inf: Tensor) -> None:
        """Move towards `model` by 1 - decay, or not at all where `found_inf` (0-d, on the device)
        is not 0."""
        averages: list[Tensor] = list(self.model.parameters())
        weights: list[Tensor] = list(model.parameters())
        steps = torch._foreach_sub(weights, averages)
        # A skipped step leaves the weights finite, so 0 times the distance is 0.
        torch._foreach_mul_(steps, (1.0 - decay) * (found_inf == 0).float())
        torch._foreach_add_(averages, steps)
        buffers = list(self.model.buffers())
        if buffers:
            torch._foreach_copy_(buffers, list(model.buffers()))
