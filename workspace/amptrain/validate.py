"""How good a model is on the images it was not trained on."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from amptrain.config import LossName
from amptrain.distributed import Processes
from amptrain.errors import TrainingError
from amptrain.loss import image_losses, is_told
from amptrain.metrics import ACCURACY, LOSS, Outputs, OwnMetrics, metrics_of_all
from amptrain.precision import Precision
from amptrain.step import MicroBatch


@dataclass(frozen=True)
class Validation:
    """How good a model is."""

    loss: float
    """Mean of the images."""
    accuracy: float
    """0 to 1; for images of several labels the micro-F1, see `parts_right`."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Those of one's own."""

    def value(self, name: str) -> float:
        """Of the metric `name`. Raises TrainingError if there is none."""
        known = {LOSS: self.loss, ACCURACY: self.accuracy, **self.metrics}
        if name not in known:
            raise TrainingError(
                f"--eval-metric {name} is not among what --metrics returns: "
                f"{', '.join(self.metrics) or 'nothing'}. Mend the function, and run the same "
                "command again."
            )
        return known[name]


@torch.no_grad()
def validate(
    model: nn.Module,
    precision: Precision,
    batches: Iterable[MicroBatch],
    *,
    max_batches: int,
    processes: Processes,
    stop_asked: Callable[[], bool],
    loss: LossName = "cross-entropy",
    idle: Tensor | None = None,
    metrics: OwnMetrics | None = None,
) -> Validation | None:
    """Judge `model` on the images of all processes, each counted once; None if asked to stop.

    Raises TrainingError, in all processes, if one meets an image that cannot be read, or where
    `metrics` fails.

    `idle` are images for a process that has no batch left, where the others compute only with it.

    Under the same autocast as training: in FP32 it would be slow, and measure another model.
    `max_batches` is the number of batches of the process that has the most; all ask for a stop that
    often, and tell each other of an image that cannot be read, so that none waits for an answer
    alone. Sums are FP64, on the device until the end.
    """
    model.eval()
    totals = torch.zeros(4, dtype=torch.float64, device=processes.device)
    outputs: list[Outputs] = []
    stream = iter(batches)
    for _ in range(max_batches):
        batch, broken = _next(stream)
        stop, lost = processes.sum([float(stop_asked()), float(broken is not None)])
        if lost:
            raise broken or TrainingError(
                "Another rank met an image that cannot be read; its message names it."
            )
        if stop:
            return None
        if batch is None or not len(batch.inputs):
            if idle is not None:
                with precision.autocast():
                    model(idle)
            continue
        with precision.autocast():
            logits = model(batch.inputs)
        if metrics is not None:
            outputs.append((logits.float().cpu(), batch.targets.cpu()))
        losses = image_losses(loss, logits.float(), batch.targets)
        right, of = parts_right(logits, batch.targets)
        images = torch.full_like(right, len(batch.targets))
        totals += torch.stack([losses.double().sum(), right, of, images])
    loss_sum, right_sum, of_sum, count = processes.sum(totals.tolist())
    if not count:
        raise TrainingError(
            "None of the images to validate with could be read; broken.txt in the run directory "
            "names them."
        )
    found: dict[str, float] | None = {}
    if metrics is not None and math.isfinite(loss_sum):  # else what diverged is told, no metric
        found = metrics_of_all(metrics, outputs, processes, stop_asked)
    if found is None:
        return None
    return Validation(loss_sum / count, right_sum / of_sum if of_sum else 0.0, found)


def parts_right(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Two sums over these images, FP64, whose quotient over all images is the measure.

    For targets (n,): the images whose class is the likeliest, and all; that is the accuracy. For
    targets (n, classes), 0 or 1: 2·TP and 2·TP + FP + FN over all images and classes, where a label
    is told from a probability of 0.5 on; that is the micro-averaged F1. The accuracy over images
    and classes would be near 1 already for a model that never tells a label.
    """
    if targets.ndim == 1:
        right = (logits.argmax(1) == targets).double().sum()
        return right, torch.full_like(right, len(targets))
    told, there = is_told(logits), targets > 0.5
    right = 2 * (told & there).double().sum()
    return right, told.double().sum() + there.double().sum()


def _next(stream: Iterator[MicroBatch]) -> tuple[MicroBatch | None, TrainingError | None]:
    """The next batch, None at the end; or why there is none."""
    try:
        return next(stream, None), None
    except TrainingError as error:
        return None, error
