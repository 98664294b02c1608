"""The models: made by name or by a function of one's own, and checked against the images."""

import difflib
import hashlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.func import functional_call  # type: ignore[attr-defined]  # it is not in __all__
from torch.nn import functional

from amptrain.data.datasets import Dataset
from amptrain.errors import ConfigError
from amptrain.own import call_own, own_function

SMALL_CNN = "small_cnn"


class QuarterMeans(nn.Module):
    """The mean of each quarter of an image: (n, channels, h, w) to (n, channels, 2, 2).

    That is AdaptiveAvgPool2d(2), whose backward pass on CUDA deterministic algorithms do not have.
    """

    def forward(self, images: Tensor) -> Tensor:
        # Tracing, as an export does it, has no numbers for the sizes that the other way needs.
        tracing: bool = torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]
        if tracing or not torch.are_deterministic_algorithms_enabled():
            return functional.adaptive_avg_pool2d(images, 2)
        height, width = images.shape[-2:]
        means = functional.avg_pool2d(
            images,
            kernel_size=((height + 1) // 2, (width + 1) // 2),
            stride=(max(height // 2, 1), max(width // 2, 1)),
        )
        return means.expand(-1, -1, 2, 2)  # of a single row or column, both halves are the same


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
            QuarterMeans(),
            nn.Flatten(),
        )
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(4 * 2 * width, classes))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(images))
        return logits


def build_model(name: str, task: Dataset) -> nn.Module:
    """The model `name` with random weights for `task`. Raises ConfigError where the two do not
    fit."""
    if name != SMALL_CNN and not is_own_model(name):
        require_known(name)
        if task.shape[0] != 3:
            raise ConfigError(
                f"--model {name} takes images of 3 channels, those of {task.name} have "
                f"{task.shape[0]}."
            )
    return new_model(name, shape=task.shape, classes=len(task.classes))


def new_model(name: str, *, shape: tuple[int, int, int], classes: int) -> nn.Module:
    """A model with random weights for images of `shape` (channels, height, width).

    `name` is small_cnn, a name of torchvision, or `file.py:function` or `module:function` of a
    model of one's own. Raises ConfigError for a name that is not known, with the nearest ones, and
    for images that the model cannot take.
    """
    if name == SMALL_CNN:
        return SmallCNN(shape[0], classes)
    if is_own_model(name):
        model = _own_model(name, shape, classes)
    else:
        require_known(name)
        model = _torchvision_model(name, shape, classes)
    _require_fit(name, model, shape, classes)
    return model


def require_known(name: str) -> None:
    """Raise ConfigError, with the nearest names, unless torchvision has a classifier `name`."""
    known = torchvision.models.list_models(module=torchvision.models)
    if name in known:
        return
    plain = {item.replace("_", ""): item for item in [SMALL_CNN, *known]}
    asked = name.lower().replace("-", "").replace("_", "")
    near = [plain[item] for item in difflib.get_close_matches(asked, plain, n=4, cutoff=0.6)]
    if near:
        raise ConfigError(f"There is no model {name!r}. The nearest are {', '.join(near)}.")
    raise ConfigError(
        f"There is no model {name!r}. Known are {SMALL_CNN}, {', '.join(known)}, and "
        "file.py:function "
        "for a model of your own."
    )


def is_own_model(name: str) -> bool:
    """Whether `name` means a function of one's own."""
    return ":" in name


def head_name(model: nn.Module) -> str:
    """Name of the layer that gives the classes: the last linear layer or convolution."""
    kinds = (nn.Linear, nn.Conv2d)
    names = [name for name, module in model.named_modules() if isinstance(module, kinds)]
    if not names:
        raise ConfigError(
            "The model has no linear layer and no convolution that could be its head."
        )
    return str(names[-1])


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules with children of an nn.Sequential or nn.ModuleList: ResNet's
    bottlenecks, ViT's encoder blocks. What is done to a model block by block goes by this."""
    containers = (nn.Sequential, nn.ModuleList)
    for child in model.children():
        is_block = isinstance(model, containers) and not isinstance(child, containers)
        if is_block and any(child.children()):
            yield child
        else:
            yield from blocks(child)


def freeze_backbone(model: nn.Module) -> None:
    """Fix all but the head: its parameters get no gradient."""
    head = head_name(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.rpartition(".")[0] == head)


def frozen_norms(model: nn.Module) -> list[nn.Module]:
    """BatchNorm layers whose parameters are all fixed: their statistics have to stay too, or the
    backbone that was to be kept drifts."""
    return [
        module
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        and list(module.parameters())
        and not any(parameter.requires_grad for parameter in module.parameters())
    ]


def _torchvision_model(name: str, shape: tuple[int, int, int], classes: int) -> nn.Module:
    options: dict[str, Any] = {}
    if name in {"googlenet", "inception_v3"}:
        # Both also train a second classifier by default, and give back more than logits.
        options = {"aux_logits": False, "init_weights": True}
    elif name.startswith("vit_"):
        options = {"image_size": shape[1]}
    elif name.startswith("maxvit"):
        options = {"input_size": shape[1:]}
    try:
        model: nn.Module = torchvision.models.get_model(
            name, weights=None, num_classes=classes, **options
        )
    except (ValueError, AssertionError) as error:
        raise ConfigError(_unfit(name, shape, error)) from None
    return model


def _require_fit(name: str, model: nn.Module, shape: tuple[int, int, int], classes: int) -> None:
    """Try two images of `shape` on the meta device, where they take neither memory nor time."""
    tensors = {
        key: tensor.to("meta")
        for key, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    try:
        with torch.no_grad():
            logits = functional_call(model, tensors, (torch.empty(2, *shape, device="meta"),))
    except (
        NotImplementedError
    ):  # a model of one's own may look at values; then its first step tells
        return
    except (RuntimeError, ValueError, AssertionError, TypeError) as error:
        raise ConfigError(_unfit(name, shape, error)) from None
    found = getattr(logits, "shape", None)
    if found != (2, classes):
        raise ConfigError(
            f"--model {name} gives {type(logits).__name__} of shape {tuple(found or ())} for 2 "
            "images; "
            f"it needs to give a tensor of (2, {classes}): one number for each class."
        )


def _unfit(name: str, shape: tuple[int, int, int], error: Exception) -> str:
    channels, height, width = shape
    why = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".!")
    usual = usual_size(name)
    advice = f"--image-size {usual} fits it" if usual else "Give another --image-size"
    return (
        f"--model {name} cannot take images of {channels}×{height}×{width} (channels, height, "
        f"width): {why}. {advice}."
    )


def usual_size(name: str) -> int | None:
    """Height and width that torchvision made the weights of `name` for; None for other models."""
    try:
        weights = torchvision.models.get_model_weights(name)
        return int(weights["DEFAULT"].transforms().crop_size[0])
    except (ValueError, KeyError, AttributeError):
        return None


def _own_model(name: str, shape: tuple[int, int, int], classes: int) -> nn.Module:
    """What the function gives; it is called with those of num_classes, in_channels and image_size
    that it takes."""
    function = own_function(name, "--model")
    given = {"num_classes": classes, "in_channels": shape[0], "image_size": shape[1]}
    takes = inspect.signature(function).parameters
    all_of_them = any(item.kind is item.VAR_KEYWORD for item in takes.values())
    wanted = {key: value for key, value in given.items() if key in takes or all_of_them}
    model = call_own(name, "--model", **wanted)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"--model {name} gives a {type(model).__name__}; it needs to give a torch.nn.Module."
        )
    return model


def weights_sha256(model: nn.Module) -> str:
    """Hash of all parameters and buffers, bit for bit, by name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
