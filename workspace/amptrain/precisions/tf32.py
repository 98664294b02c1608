"""TF32, a mode of tensor cores."""

import torch

from amptrain.errors import ConfigError
from amptrain.precision import Precision


class Tf32(Precision):
    """FP32 whose matrix multiplications and convolutions round their inputs to TF32's 10 bits."""

    name = "tf32"
    tf32 = True

    @classmethod
    def check(cls, device: torch.device) -> None:
        if device.type != "cuda":
            raise ConfigError(
                "--precision tf32 needs a CUDA device: TF32 is a mode of tensor cores. Use fp32 on "
                "a CPU."
            )
        if torch.cuda.get_device_capability(device) < (8, 0):
            raise ConfigError(
                "--precision tf32 needs an Ampere GPU or newer; "
                f"{torch.cuda.get_device_name(device)} has none. Use fp32."
            )
