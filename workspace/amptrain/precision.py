"""What all precisions have in common, and which one a run takes. Parameters are FP32 in all; what
differs is the arithmetic and, for fp16, the loss scale. The classes are in `precisions/`, one file
each."""

import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amptrain.config import PrecisionConfig
from amptrain.errors import ConfigError


class Precision:
    """Base of the precisions: no autocast, no scaler. `configure()` sets torch's global TF32
    switches to `tf32`."""

    name: ClassVar[str]
    dtype: ClassVar[torch.dtype | None] = None
    """What autocast computes in; None is no autocast."""
    tf32: ClassVar[bool] = False
    """Whether FP32 multiplications may use TF32; with autocast, those that it leaves in FP32."""
    has_scaler: ClassVar[bool] = False
    """Whether the loss is scaled, so that its scale can collapse."""

    def __init__(self, device: torch.device, config: PrecisionConfig) -> None:
        self.device = device
        self.one = torch.ones((), device=device)

    @classmethod
    def check(cls, device: torch.device) -> None:
        """Raise ConfigError where `device` cannot compute so."""

    def configure(self) -> None:
        """Set both TF32 switches: by default torch has it off for matmul and on for cuDNN, which is
        no FP32 at all."""
        if hasattr(
            torch.backends.cuda.matmul, "fp32_precision"
        ):  # torch 2.9 and later warn of the switches below
            mode = "tf32" if self.tf32 else "ieee"
            torch.backends.cuda.matmul.fp32_precision = mode
            cudnn: Any = torch.backends.cudnn  # torch 2.6 does not know its parts
            cudnn.conv.fp32_precision = mode
            cudnn.rnn.fp32_precision = mode
        else:
            torch.backends.cuda.matmul.allow_tf32 = self.tf32
            torch.backends.cudnn.allow_tf32 = self.tf32

    def convert(self, model: nn.Module) -> nn.Module:
        """The model as this precision trains it: as it is, with FP32 parameters.

        Raises:
            ConfigError: a floating-point parameter is not FP32.
        """
        require_fp32(model)
        return model

    def autocast(self) -> AbstractContextManager[Any]:
        """Where the forward pass runs, in training and in validation."""
        if self.dtype is None:
            return nullcontext()
        # The type is always given: autocast's own default on CUDA is fp16, which without a scaler
        # goes wrong silently.
        return torch.autocast(self.device.type, dtype=self.dtype)

    @property
    def loss_scale(self) -> Tensor:
        """What the loss is multiplied with; a 0-d tensor on the device."""
        return self.one

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call backward on."""
        return loss

    def unscale(self, optimizer: Optimizer) -> Tensor | None:
        """Make the gradients true ones. Returns the scaler's found_inf (0-d, 1 for an overflow),
        None without one."""
        return None

    def step(self, optimizer: Optimizer, found_inf: Tensor) -> None:
        """The optimizer's step, unless `found_inf` is 1: a gradient that is not finite is no use in
        any precision."""
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            # What GradScaler does: fused kernels look at found_inf on the device, so the host need
            # not wait for it.
            extras: Any = optimizer
            extras.grad_scale, extras.found_inf = None, found_inf
            try:
                optimizer.step()
            finally:
                del extras.grad_scale, extras.found_inf
        elif not found_inf.item():
            optimizer.step()

    def update(self) -> None:
        """Adapt the scale to what the last step found."""

    def state_dict(self) -> dict[str, Any]:
        """Plain types, to continue from; empty without a scaler."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""

    def describe(self) -> str:
        """For people and results, such as `bf16 (autocast bfloat16, parameters FP32, TF32 on)`."""
        arithmetic = (
            "no autocast"
            if self.dtype is None
            else f"autocast {str(self.dtype).removeprefix('torch.')}"
        )
        return f"{self.name} ({arithmetic}, parameters FP32, TF32 {'on' if self.tf32 else 'off'})"


def precision_class(name: str) -> type[Precision]:
    """The class of `precisions/<name>.py`, which is named for its file."""
    module = importlib.import_module(f"amptrain.precisions.{name}")
    found: type[Precision] = getattr(module, name.capitalize())
    return found


def precision_name(asked: str, device: torch.device) -> str:
    """`asked`; for auto bf16 where the hardware has it, else fp16 on a GPU, and fp32 on a CPU."""
    if asked != "auto":
        return asked
    if has_bf16(device):
        return "bf16"
    return "fp16" if device.type == "cuda" else "fp32"


def has_bf16(device: torch.device) -> bool:
    """Whether the device computes in bf16, rather than emulate it.

    A T4 or V100 says True to the plain question. On an x86 CPU it takes AVX-512: with AVX2 alone a
    product of matrices in bf16 took 28 times as long as in FP32, and training digits 10 times
    (docs/measurements.md).
    """
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return torch.backends.mkldnn.is_available() and bool(
        torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def resolve_precision(config: PrecisionConfig, device: torch.device) -> Precision:
    """The precision of `config` on `device`.

    Raises ConfigError where the device cannot do what was asked for.
    """
    kind = precision_class(precision_name(config.precision, device))
    kind.check(device)
    return kind(device, config)


def require_fp32(model: nn.Module) -> None:
    """Raise ConfigError unless all floating-point parameters are FP32, which GradScaler and all
    updates rely on."""
    for name, parameter in _floating(model):
        if parameter.dtype != torch.float32:
            raise ConfigError(
                f"The parameter {name} is {str(parameter.dtype).removeprefix('torch.')}; mixed "
                "precision needs FP32 "
                "parameters (autocast casts copies of them): leave out .half() and .bfloat16() on "
                "the model."
            )


def _floating(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return (
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point()
    )
