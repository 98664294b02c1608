"""One optimizer step in mixed precision, in two halves, `backward` and `update`; and how one learns
what it did without making the host wait."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from amptrain.precision import Precision


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """A part of what one step learns from, on the device."""

    inputs: Any
    """What the model is called with, as one argument: for images float32, (n, channels, height,
    width); a model of one's own may take a tuple or a dict."""
    targets: Any
    """What the loss compares the model's output with: for classes int64, (n,)."""
    loss_weight: float
    """Weight of this part's mean loss in the step's: its samples over the step's, times the world
    size, because DDP takes the mean over the ranks. Right also where the last step of an epoch is a
    short one."""
    last: bool
    """Whether the step's gradients are complete with this one."""


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """What one optimizer step did."""

    skipped: bool
    """Whether a gradient was not finite, and therefore nothing moved."""
    scale_before: float
    scale_after: float
    grad_norm: float
    """Norm of the true (unscaled, unclipped) gradient; inf or NaN if skipped."""
    loss: float
    """This process's part of the step's loss."""
    nonfinite_parameter: str | None
    """If skipped, the first parameter whose gradient is not finite."""


class PendingOutcome:
    """A StepOutcome still on the device. `read()` waits until this step, but nothing queued after
    it, is done."""

    def __init__(self, found_inf: Tensor, values: Tensor, names: Sequence[str]) -> None:
        self.found_inf = found_inf
        self._names = names
        self._values = values.to("cpu", non_blocking=True)
        self._ready = torch.cuda.Event() if values.is_cuda else None
        if self._ready is not None:
            self._ready.record()

    def read(self) -> StepOutcome:
        """The outcome, as plain numbers."""
        if self._ready is not None:
            self._ready.synchronize()
        found_inf, before, after, norm, loss, *norms = self._values.tolist()
        skipped = found_inf != 0
        return StepOutcome(
            skipped=skipped,
            scale_before=before,
            scale_after=after,
            grad_norm=norm,
            loss=loss,
            nonfinite_parameter=self._first_nonfinite(norms) if skipped else None,
        )

    def _first_nonfinite(self, norms: Sequence[float]) -> str:
        """The largest, where each is finite and the norm of them all is not."""
        largest = norms.index(max(norms))
        index = next((i for i, norm in enumerate(norms) if not math.isfinite(norm)), largest)
        return self._names[index]


class BufferGuard:
    """Puts a model's buffers back after a skipped step.

    The forward pass of a step that overflows has already written inf into BatchNorm's running
    statistics, where it would stay for ever (pytorch#90342). The choice between old and new is made
    on the device.
    """

    def __init__(self, model: nn.Module) -> None:
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for buffer in model.buffers():
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
        self._groups = list(by_dtype.values())
        self._saved: list[Tensor] = []

    def save(self) -> None:
        """Remember the buffers as they are."""
        self._saved = [_flat(group) for group in self._groups]

    @torch.no_grad()
    def restore(self, found_inf: Tensor) -> None:
        """The remembered values where `found_inf` (0-d) is not 0."""
        for group, saved in zip(self._groups, self._saved, strict=True):
            kept = torch.where(found_inf != 0, saved, _flat(group)).split(
                [buffer.numel() for buffer in group]
            )
            torch._foreach_copy_(
                group, [part.view_as(buffer) for part, buffer in zip(kept, group, strict=True)]
            )
        self._saved = []

    def undo(self) -> None:
        """The remembered values, if a step is under way."""
        if self._saved:
            self.restore(torch.ones((), device=self._saved[0].device))


def _flat(group: list[Tensor]) -> Tensor:
    return torch.cat([buffer.flatten() for buffer in group])


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """What the backward half of a step leaves for its other half; all tensors are on the device."""

    names: Sequence[str]
    """Names of the optimizer's parameters that have a gradient, in the model's order."""
    parameters: Sequence[nn.Parameter]
    """These parameters."""
    norms: Tensor
    """Norm of each true gradient, (len(names),)."""
    norm: Tensor
    """Norm of them all, 0-d."""
    found_inf: Tensor
    """0-d, 1 where some gradient is not finite."""
    loss: Tensor
    """This process's part of the step's loss, 0-d."""


def backward(
    model: nn.Module,
    optimizer: Optimizer,
    precision: Precision,
    batches: Iterable[MicroBatch],
    *,
    loss_fn: Callable[[Any, Any], Tensor],
    guard: BufferGuard,
) -> Gradients:
    """The first half of a step: the true gradients of all its micro-batches. Weights stay as they
    are.

    `loss_fn(outputs, targets)` gives a mean, 0-d; it runs under autocast, as the model does.

    All work is queued and nothing is waited for. What the host has to wait for, such as the outcome
    of the step before, is best read between this and `update`: the device has work meanwhile.
    """
    optimizer.zero_grad(set_to_none=True)
    guard.save()
    losses = []
    for batch in batches:
        # Processes exchange gradients once, with the last micro-batch.
        sync = getattr(model, "set_requires_gradient_sync", None)
        if sync is not None:  # an FSDPModule, whose import takes a second
            sync(batch.last)
        alone = isinstance(model, DistributedDataParallel) and not batch.last
        with model.no_sync() if alone else nullcontext():  # type: ignore[operator]
            with precision.autocast():
                loss = loss_fn(model(batch.inputs), batch.targets) * batch.loss_weight
            precision.scale(loss).backward()
        losses.append(loss.detach())

    overflow = precision.unscale(optimizer)
    names, parameters = _with_gradient(model, optimizer)
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            # Of `nn.Embedding(sparse=True)`: until then a row stands there once for each use.
            parameter.grad = parameter.grad.coalesce()
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norms = _norms(gradients)
    norm = torch.linalg.vector_norm(norms)
    return Gradients(
        names=names,
        parameters=parameters,
        norms=norms,
        norm=norm,
        # A norm is 0 or more, inf or NaN; isfinite() is four operations.
        found_inf=(norm < math.inf).logical_not().float() if overflow is None else overflow,
        loss=reduce(torch.add, losses),
    )


def update(
    optimizer: Optimizer,
    precision: Precision,
    gradients: Gradients,
    *,
    guard: BufferGuard,
    learning_rate: float,
    max_grad_norm: float | None = None,
) -> PendingOutcome:
    """The second half of a step: clip, move the weights, adapt the loss scale. If a gradient is not
    finite nothing moves, in any precision.

    Each parameter group takes `learning_rate` times its `lr_scale`, 1 where it has none (the key is
    timm's).
    """
    if max_grad_norm is not None:
        _clip(gradients, max_grad_norm)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get("lr_scale", 1.0)
    scale_before = precision.loss_scale.clone()
    precision.step(optimizer, gradients.found_inf)
    precision.update()
    guard.restore(gradients.found_inf)

    values = [
        gradients.found_inf,
        scale_before,
        precision.loss_scale,
        gradients.norm,
        gradients.loss,
    ]
    # All in one copy to the host.
    told = torch.cat([torch.stack(values), gradients.norms])
    return PendingOutcome(gradients.found_inf, told, gradients.names)


def _clip(gradients: Gradients, max_grad_norm: float) -> None:
    """Scale the gradients so that their norm is `max_grad_norm` at most."""
    sparse = [p for p in gradients.parameters if p.grad is not None and p.grad.is_sparse]
    dense = [p for p in gradients.parameters if p.grad is not None and not p.grad.is_sparse]
    torch.nn.utils.clip_grads_with_norm_(dense, max_grad_norm, gradients.norm)
    if sparse:  # whose rows torch does not clip: the factor is that of clip_grads_with_norm_
        factor = (max_grad_norm / (gradients.norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([_held(p.grad) for p in sparse if p.grad is not None], factor)


def _held(gradient: Tensor) -> Tensor:
    """What of a gradient this process holds: its part of a sharded one, the rows of a sparse one,
    which has to be coalesced."""
    held = gradient
    if isinstance(gradient, DTensor):
        held = gradient.to_local()
    elif gradient.is_sparse:
        held = gradient.values()
    return held


def _norms(gradients: list[Tensor]) -> Tensor:
    """Norm of each whole gradient, (len(gradients),). Of a sharded model each process has a part
    of each, and all take part."""
    parts = [_held(gradient) for gradient in gradients]
    norms = torch.stack(torch._foreach_norm(parts))
    if isinstance(gradients[0], DTensor):
        norms.square_()
        dist.all_reduce(norms, group=gradients[0].device_mesh.get_group())
        norms.sqrt_()
    return norms


def _with_gradient(model: nn.Module, optimizer: Optimizer) -> tuple[list[str], list[nn.Parameter]]:
    """Names and parameters, in the model's order, that have a gradient and are the optimizer's:
    with two optimizers, as for a GAN, each step looks at its own."""
    module = model.module if isinstance(model, DistributedDataParallel) else model
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    pairs = [
        (name, parameter)
        for name, parameter in module.named_parameters()
        if parameter.grad is not None and id(parameter) in own
    ]
    return [name for name, _ in pairs], [parameter for _, parameter in pairs]
