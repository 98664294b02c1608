"""How good a model is on the images it was not trained on."""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from amptrain.distributed import Processes
from amptrain.errors import TrainingError
from amptrain.precision import Precision
from amptrain.step import MicroBatch


@torch.no_grad()
def validate(
    model: nn.Module,
    precision: Precision,
    batches: Iterable[MicroBatch],
    *,
    max_batches: int,
    processes: Processes,
    stop_asked: Callable[[], bool],
) -> tuple[float, float] | None:
    """(mean loss, accuracy) over the images of all processes, each counted once; None if asked to
    stop.

    Raises TrainingError, in all processes, if one meets an image that cannot be read.

    Under the same autocast as training: in FP32 it would be slow, and measure another model.
    `max_batches` is the number of batches of the process that has the most; all ask for a stop that
    often, and tell each other of an image that cannot be read, so that none waits for an answer
    alone. Sums are FP64, on the device until the end.
    """
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64, device=processes.device)
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
            continue
        with precision.autocast():
            logits = model(batch.inputs)
        loss = cross_entropy(logits.float(), batch.targets, reduction="none")
        correct = (logits.argmax(1) == batch.targets).double().sum()
        totals += torch.stack(
            [loss.double().sum(), correct, torch.ones_like(correct) * len(batch.targets)]
        )
    loss_sum, right, count = processes.sum(totals.tolist())
    if not count:
        raise TrainingError(
            "None of the images to validate with could be read; broken.txt in the run directory "
            "names them."
        )
    return loss_sum / count, right / count


def _next(stream: Iterator[MicroBatch]) -> tuple[MicroBatch | None, TrainingError | None]:
    """The next batch, None at the end; or why there is none."""
    try:
        return next(stream, None), None
    except TrainingError as error:
        return None, error
