"""The optimizer of a model: which parameters are decayed, and how fast each group learns."""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from amptrain.config import OptimConfig, TrainConfig
from amptrain.errors import ConfigError
from amptrain.model import head_name

NORMS = (
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
)
NEVER_DECAYED = (
    "bias",
    "pos_embedding",
    "position_embedding",
    "pos_embed",
    "relative_position_bias_table",
    "class_token",
    "cls_token",
    "layer_scale",
    "gamma",
)
"""Ends of names of parameters that are no matrices of a linear map: torchvision's and timm's
position and class embeddings and layer scales (pytorch/vision#5671, facebookresearch/deit#48)."""


def build_optimizer(model: nn.Module, config: OptimConfig) -> Optimizer:
    """SGD with Nesterov momentum, or AdamW, over the parameters that are not frozen.

    Biases, norms, position and class embeddings and layer scales are not decayed. The head learns
    at `config.head_lr`, if that is given; each group's `lr_scale` holds its factor, which `update`
    multiplies the schedule's rate with. Raises ConfigError if all parameters are frozen.
    """
    if config.lr is None:
        raise ConfigError("The learning rate is not chosen yet; give --lr.")
    lr, head_scale = config.lr, (config.head_lr or config.lr) / config.lr
    decayed = {id(parameter) for parameter in _decayed(model)}
    head = head_name(model) if head_scale != 1 else None
    groups: list[dict[str, Any]] = [
        {
            "params": list(_parameters(model, decayed, head, decay=decay, of_head=of_head)),
            "weight_decay": config.weight_decay if decay else 0.0,
            "lr": lr * scale,
            "lr_scale": scale,
        }
        for scale, of_head in ((1.0, False), (head_scale, True))
        for decay in (True, False)
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise ConfigError("All parameters of the model are frozen; there is nothing to train.")
    if config.optimizer == "adamw":
        return AdamW(groups, lr=lr, fused=config.fused)
    momentum = config.momentum
    optimizer = SGD(groups, lr=lr, momentum=momentum, nesterov=momentum > 0, fused=config.fused)
    if momentum > 0:
        # Fused SGD makes these at its first step, without filling them; if that step is skipped
        # they stay unset memory, and the next step adds them. From zeros the first step is the same
        # as torch's own first step.
        for group in groups:
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def _parameters(
    model: nn.Module, decayed: Iterable[int], head: str | None, *, decay: bool, of_head: bool
) -> Iterator[nn.Parameter]:
    for name, parameter in model.named_parameters():
        in_head = name.rpartition(".")[0] == head
        if parameter.requires_grad and (id(parameter) in decayed) == decay and in_head == of_head:
            yield parameter


def _decayed(model: nn.Module) -> Iterator[nn.Parameter]:
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not isinstance(module, NORMS) and parameter.ndim > 1 and not never_decayed(name):
                yield parameter


def never_decayed(name: str) -> bool:
    """Whether a parameter of this name is no matrix of a linear map."""
    return name.endswith(NEVER_DECAYED)


TRANSFORMERS = ("vit_", "swin_", "maxvit")
BASE_BATCH = 64


def with_learning_rates(config: TrainConfig) -> TrainConfig:
    """`config` with a learning rate, and one for the head where weights are given; and with the
    name of its run, which is made of what was given."""
    optim, given = config.optim, config.model.weights is not None
    lr = optim.lr or default_lr(
        config.model_name, optim.optimizer, batch_size=optim.global_batch_size, pretrained=given
    )
    head_lr = optim.head_lr or (10 * lr if given else None)
    return dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, name=config.run_dir.name),
        optim=dataclasses.replace(optim, lr=lr, head_lr=head_lr),
    )


def default_lr(model: str, optimizer: str, *, batch_size: int, pretrained: bool) -> float:
    """The peak learning rate that is taken if none is given.

    small_cnn with AdamW 5e-3. Others at 64 images a step: AdamW 1e-3 for convolutions and 2e-4 for
    transformers (that of DeiT, arXiv:2012.12877, scaled down); SGD 0.025 (torchvision's 0.1 at
    256). A third of it for the backbone of pretrained weights. For another batch size the rate of
    SGD grows with the batch (Goyal et al., arXiv:1706.02677), and that of AdamW with its square
    root (Malladi et al., arXiv:2205.10287); but no higher than at 4096 images.
    """
    ratio = min(batch_size, 4096) / BASE_BATCH
    if optimizer == "sgd":
        rate = 0.025 * ratio
    else:
        rate = (2e-4 if model.startswith(TRANSFORMERS) else 1e-3) * math.sqrt(ratio)
    if (model, optimizer) == ("small_cnn", "adamw"):
        rate = 5e-3
    return float(f"{rate * (1 / 3 if pretrained else 1):.2g}")
