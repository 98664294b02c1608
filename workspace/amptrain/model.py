"""The models, and what belongs to one: optimizer, hash of the weights."""

import hashlib

import torch
import torchvision
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from amptrain.config import OptimConfig
from amptrain.data.datasets import Task
from amptrain.errors import ConfigError


class SmallCNN(nn.Module):
    """Three convolutions for images of 8×8 to 32×32 pixels. Input (n, channels, h, w), output (n,
    classes) logits."""

    def __init__(self, channels: int, classes: int, width: int = 32) -> None:
        super().__init__()

        def block(inputs: int, outputs: int) -> list[nn.Module]:
            return [
                nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
                nn.BatchNorm2d(outputs),
                nn.ReLU(),
            ]

        self.features = nn.Sequential(
            *block(channels, width),
            *block(width, 2 * width),
            nn.MaxPool2d(2),
            *block(2 * width, 2 * width),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(4 * 2 * width, classes))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(images))
        return logits


def build_model(name: str, task: Task) -> nn.Module:
    """The model `name` with random weights for `task`. Raises ConfigError for a name that
    torchvision does not have."""
    channels = task.shape[0]
    if name == "small_cnn":
        return SmallCNN(channels, len(task.classes))
    known = torchvision.models.list_models(module=torchvision.models)
    if name not in known:
        raise ConfigError(f"There is no model {name!r}. Known are small_cnn, {', '.join(known)}.")
    if channels != 3:
        raise ConfigError(
            f"--model {name} takes images of 3 channels, those of {task.name} have {channels}."
        )
    # Both also train a second classifier by default, and give back more than logits.
    plain = (
        {"aux_logits": False, "init_weights": True} if name in {"googlenet", "inception_v3"} else {}
    )
    model: nn.Module = torchvision.models.get_model(
        name, weights=None, num_classes=len(task.classes), **plain
    )
    return model


def build_optimizer(model: nn.Module, config: OptimConfig) -> Optimizer:
    """SGD with Nesterov momentum, or AdamW; biases and the parameters of norms are not decayed."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.optimizer == "adamw":
        return AdamW(groups, lr=config.lr, fused=config.fused)
    optimizer = SGD(
        groups,
        lr=config.lr,
        momentum=config.momentum,
        nesterov=config.momentum > 0,
        fused=config.fused,
    )
    if config.momentum > 0:
        # Fused SGD makes these at its first step, without filling them; if that step is skipped
        # they stay unset memory, and the next step adds them. From zeros the first step is the same
        # as torch's own first step.
        for parameter in parameters:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def weights_sha256(model: nn.Module) -> str:
    """Hash of all parameters and buffers, bit for bit, by name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
