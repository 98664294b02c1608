"""Autocast to bfloat16."""

import torch

from amptrain.precision import Precision


class Bf16(Precision):
    """Autocast to bfloat16. It has FP32's range, so it needs no scaler and never has one."""

    name = "bf16"
    dtype = torch.bfloat16
    tf32 = True
