"""Metrics of one's own beside loss and accuracy: a function, by --metrics.

    def metrics(logits, targets):
        return {"auc": roc_auc_score(targets, logits.softmax(1)[:, 1])}

It gets all validation images at once, since the mean over batches is another number for most
metrics, and is called by rank 0 alone.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from amptrain.distributed import Processes
from amptrain.errors import ConfigError, TrainingError
from amptrain.own import failure, own_function
from amptrain.report.log import EpochRecord
from amptrain.threads import in_background

ACCURACY, LOSS = "accuracy", "loss"
TAKEN = {"kind", LOSS, ACCURACY, "micro-F1", *(entry.name for entry in fields(EpochRecord))}
"""Names that already mean something in a record or a model file."""
POLL_S = 0.1

Outputs = tuple[Tensor, Tensor]
"""Logits (images, classes) FP32, and targets: (images,) classes, or (images, classes) of 0 and 1;
on the CPU."""


class OwnMetrics:
    """The function that `name` means (`file.py:function` or `module:function`)."""

    def __init__(self, name: str) -> None:
        """Raises ConfigError if there is no such function of two arguments."""
        self.name, self.function = name, own_function(name, "--metrics")
        try:
            inspect.signature(self.function).bind(None, None)
        except TypeError as error:
            raise ConfigError(
                f"--metrics {name}: {error}. It is called with (logits, targets)."
            ) from None
        except ValueError:  # a function in C, which tells no signature
            pass

    def __call__(self, parts: Sequence[Outputs]) -> dict[str, float]:
        """The metrics of all images of `parts`.

        Raises TrainingError, with the line of the function that failed, or for what is no mapping
        of names to numbers.
        """
        logits, targets = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        try:
            found = self.function(logits, targets)
        except Exception as error:
            place = self.name.rpartition(":")[0]
            raise TrainingError(
                f"--metrics {self.name} failed: {failure(error, place)}. Mend it, and run the same "
                "command again."
            ) from error
        if not isinstance(found, Mapping):
            raise self._refused(f"returned {type(found).__name__}")
        return {str(name): self._number(str(name), value) for name, value in found.items()}

    def _number(self, name: str, value: Any) -> float:
        if name in TAKEN:
            raise self._refused(f"returned a value named {name}, which is another's name")
        try:
            return float(value)
        except (TypeError, ValueError):
            raise self._refused(f"returned {value!r} as {name}") from None

    def _refused(self, found: str) -> TrainingError:
        return TrainingError(
            f"--metrics {self.name} {found}. It needs to return names with one number each, such "
            'as {"auc": 0.93}. Mend it, and run the same command again.'
        )


def metrics_of_all(
    metrics: OwnMetrics,
    outputs: list[Outputs],
    processes: Processes,
    stop_asked: Callable[[], bool],
) -> dict[str, float] | None:
    """The metrics of the `outputs` of all processes; None if asked to stop. Raises TrainingError,
    in all processes.

    The others ask every moment whether rank 0 is done, as long as it takes.
    """
    gathered = processes.gather_to_main(outputs)
    work: Future[dict[str, float]] | None = None
    if gathered is not None:
        parts = [part for of_process in gathered for part in of_process]
        work = in_background(lambda: metrics(parts))

    def is_working() -> bool:
        if work is not None:
            wait([work], POLL_S)
        return work is not None and not work.done()

    while True:
        working, stop = processes.sum([float(is_working()), float(stop_asked())])
        if not working:
            break
        if stop:
            return None
    answer = processes.broadcast_object(None if work is None else _answer(work))
    if isinstance(answer, TrainingError):
        raise answer
    found: dict[str, float] = answer
    return found


def _answer(work: "Future[dict[str, float]]") -> dict[str, float] | TrainingError:
    try:
        return work.result()
    except TrainingError as error:
        return error


def is_better(name: str, value: float, best: float | None) -> bool:
    """Whether `value` of the metric `name` is better than the best so far: lower for the loss,
    higher for all others."""
    if math.isnan(value):
        return False
    return best is None or (value < best if name == LOSS else value > best)


def own_metrics_text(metrics: Mapping[str, float]) -> str:
    """`, auc 0.9312, recall 0.8000`, for the end of a line."""
    return "".join(f", {name} {value:.4f}" for name, value in metrics.items())


def shown(name: str, value: float) -> str:
    """The metric as people read it."""
    return f"{value:.2%}" if name == ACCURACY else f"{value:.4f}"
