"""Why steps are skipped: the first thing that is not finite, on the way from the input to the
gradients."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from amptrain.precision import Precision
from amptrain.words import counted


@torch.no_grad()
def diagnose(model: nn.Module, precision: Precision, images: Tensor, parameter: str | None) -> str:
    """One sentence: whether an input, a weight, an activation or only the gradient of `parameter`
    is not finite.

    `images` is a batch as the model gets it. The host waits for the device many times here; the run
    ends with it.
    """
    bad = (~torch.isfinite(images)).sum().item()
    if bad:
        return (
            f"The input is not finite: {bad} of {counted(images.numel(), 'value')} of the batch. "
            "Look at the data."
        )
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        # All processes would have to compute together, and this may be the only one.
        return (
            f"The input of this process is finite; the gradient of {parameter} is not. Use a lower "
            "--lr or --max-grad-norm 1, or --precision bf16 or fp32. (With --parallel ddp it is "
            "told where it began.)"
        )
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        if not torch.isfinite(weight).all():
            return (
                f"The weight {name} is not finite. "
                "Start from the best epoch, if there was one: "
                "--weights runs/NAME/best.safetensors, another --name and a lower --lr."
            )
    with _first_nonfinite(model) as found, precision.autocast():
        model.forward(images)  # not model(...): a compiled model would not call the hooks
    if found:
        limit = torch.finfo(precision.dtype or torch.float32).max
        return (
            f"The activation of layer {found[0]} is not finite: it exceeds {limit:.3g}, the "
            "largest number of "
            f"{precision.name}. Use --precision bf16 or fp32, or a lower --lr."
        )
    return (
        f"Input, weights and activations are finite; the gradient of {parameter} is not. Use a "
        "lower --lr or "
        "--max-grad-norm 1, or --precision bf16 or fp32."
    )


@contextmanager
def _first_nonfinite(model: nn.Module) -> Iterator[list[str]]:
    """While entered, names of layers whose output is not finite are added, in the order in which
    they ran."""
    found: list[str] = []

    def look(name: str) -> None:
        def hook(module: nn.Module, inputs: object, output: object) -> None:
            if isinstance(output, Tensor) and not torch.isfinite(output).all():
                found.append(name)

        handles.append(layer.register_forward_hook(hook))

    handles: list[torch.utils.hooks.RemovableHandle] = []
    for name, layer in model.named_modules():
        if not list(layer.children()):
            look(name)
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
