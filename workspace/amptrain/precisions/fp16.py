"""Autocast to float16, with a scaler."""

from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from amptrain.config import PrecisionConfig
from amptrain.precision import Precision


class Fp16(Precision):
    """Autocast to float16, always with a scaler: small gradients would vanish without one."""

    name = "fp16"
    dtype = torch.float16
    tf32 = True
    has_scaler = True

    def __init__(self, device: torch.device, config: PrecisionConfig) -> None:
        super().__init__(device, config)
        self.scaler = GradScaler(
            device.type,
            init_scale=config.init_scale,
            growth_factor=config.growth_factor,
            backoff_factor=config.backoff_factor,
            growth_interval=config.growth_interval,
        )
        self.scaler.scale(
            self.one
        )  # makes the scaler's own tensors, which it otherwise makes at its first loss

    @property
    def loss_scale(self) -> Tensor:
        scale = self.scaler._get_scale_async()  # get_scale() would make the host wait
        assert scale is not None
        return scale

    def scale(self, loss: Tensor) -> Tensor:
        return self.scaler.scale(loss)

    def unscale(self, optimizer: Optimizer) -> Tensor | None:
        self.scaler.unscale_(optimizer)
        found = self.scaler._found_inf_per_device(optimizer)
        return torch.stack([value.to(self.device) for value in found.values()]).amax()

    def step(self, optimizer: Optimizer, found_inf: Tensor) -> None:
        self.scaler.step(optimizer)

    def update(self) -> None:
        self.scaler.update()

    def state_dict(self) -> dict[str, Any]:
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        place = {"scale": state["scale"], "_growth_tracker": state["_growth_tracker"]}
        self.scaler.load_state_dict(
            {**self.scaler.state_dict(), **place}
        )  # factors and interval stay those of today
