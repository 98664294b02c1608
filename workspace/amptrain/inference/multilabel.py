"""How good a model is on images of several labels each, as numbers."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from amptrain.errors import ConfigError
from amptrain.files import write_text
from amptrain.inference.model_file import ModelInfo
from amptrain.loss import image_losses, is_told
from amptrain.metrics import OwnMetrics, own_metrics_text
from amptrain.report.log import finite
from amptrain.words import counted


@dataclass(frozen=True)
class LabelEvaluation:
    """What a model told of images of several labels."""

    loss: float
    """Mean binary cross-entropy over images and classes."""
    logits: NDArray[np.float32]
    """(images, classes)."""
    there: NDArray[np.bool_]
    """(images, classes): the labels of each image."""
    told: NDArray[np.bool_]
    """(images, classes): the labels of probability 0.5 on."""
    classes: tuple[str, ...]
    broken: tuple[str, ...] = ()
    """Images that could not be read; they are not counted."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Those of --metrics."""

    @property
    def micro_f1(self) -> float:
        """2·TP / (2·TP + FP + FN), over all images and classes; 0 where there is no label."""
        count = int(self.there.sum() + self.told.sum())
        return 2 * int((self.there & self.told).sum()) / max(count, 1)

    @property
    def mean_average_precision(self) -> float:
        """Mean over the classes that an image has; NaN where no image has a label."""
        known = [values["average_precision"] for values in self.per_class().values()]
        known = [value for value in known if not math.isnan(value)]
        return sum(known) / len(known) if known else math.nan

    def per_class(self) -> dict[str, dict[str, float]]:
        """images, precision, recall, F1 and average precision of each class; 0 where there is
        nothing to divide by, and NaN for the average precision of a class without an image."""
        right = (self.there & self.told).sum(0)
        there, told = self.there.sum(0), self.told.sum(0)
        return {
            name: {
                "images": int(there[place]),
                "precision": float(right[place] / max(told[place], 1)),
                "recall": float(right[place] / max(there[place], 1)),
                "f1": float(2 * right[place] / max(told[place] + there[place], 1)),
                "average_precision": average_precision(self.logits[:, place], self.there[:, place]),
            }
            for place, name in enumerate(self.classes)
        }


def average_precision(scores: NDArray[np.float32], there: NDArray[np.bool_]) -> float:
    """Σ_n (R_n - R_{n-1}) · P_n over the thresholds n, each a score that there is, from the highest
    on; precision P and recall R of what is at or above it. NaN without a positive.

    As scikit-learn defines it: without interpolation, and the same for any order of equal scores.
    """
    if not there.any():
        return math.nan
    order = np.argsort(-scores, kind="stable")
    right = np.cumsum(there[order])
    last_of_equals = np.append(np.diff(scores[order]) != 0, True)
    precision = (right / np.arange(1, len(right) + 1))[last_of_equals]
    recall = (right / right[-1])[last_of_equals]
    return float((np.diff(recall, prepend=0.0) * precision).sum())


@torch.inference_mode()
def judge_labels(
    model: nn.Module,
    info: ModelInfo,
    batches: Iterable[tuple[Tensor, Tensor, list[str]]],
    label_sets: NDArray[np.bool_],
    *,
    device: torch.device,
    metrics: OwnMetrics | None = None,
) -> LabelEvaluation:
    """Judge `model` in FP32 on batches of (uint8 pixels, rows of `label_sets`, sentences on broken
    images).

    Raises ConfigError if no image could be read, TrainingError where `metrics` fails.
    """
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (info.mean, info.std))
    outputs: list[Tensor] = []
    rows: list[Tensor] = []
    broken: list[str] = []
    for pixels, labels, unread in batches:
        broken += unread
        if len(labels):
            outputs.append(model(((pixels.float() - mean) / std).to(device)).float().cpu())
            rows.append(labels)
    if not outputs:
        raise ConfigError(f"None of the images could be read: {'; '.join(broken[:3])}")
    logits, there = torch.cat(outputs), torch.from_numpy(label_sets)[torch.cat(rows)]
    return LabelEvaluation(
        float(image_losses("bce", logits.double(), there).mean()),
        logits.numpy(),
        there.numpy(),
        is_told(logits).numpy(),
        info.classes,
        broken=tuple(broken),
        metrics={} if metrics is None else metrics([(logits, there.float())]),
    )


def write_labels(folder: Path, result: LabelEvaluation, path: Path) -> None:
    """Write evaluation.json, and say the most of it; a number that there is not is null."""
    folder.mkdir(parents=True, exist_ok=True)
    per_class = result.per_class()
    values: dict[str, Any] = {
        "model": str(path),
        "images": len(result.there),
        "broken_images": list(result.broken),
        "loss": result.loss,
        "micro_f1": result.micro_f1,
        "mean_average_precision": finite(result.mean_average_precision),
        "metrics": {name: finite(value) for name, value in result.metrics.items()},
        "per_class": {
            name: {key: finite(value) for key, value in of_class.items()}
            for name, of_class in per_class.items()
        },
    }
    text = json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False)
    write_text(folder / "evaluation.json", text + "\n")
    print(
        f"loss {result.loss:.4f}, micro-F1 {result.micro_f1:.2%}, mean average precision "
        f"{result.mean_average_precision:.2%}{own_metrics_text(result.metrics)}"
    )
    worst = sorted(per_class.items(), key=lambda item: item[1]["f1"])[:10]
    width = max(len(name) for name, _ in worst)
    title = "class" if len(worst) == len(result.classes) else "the ten worst"
    print(f"{title:{width}}  images  precision  recall      F1      AP")
    for name, of_class in worst:
        numbers = f"{of_class['images']:6}  {of_class['precision']:9.2%}  {of_class['recall']:6.2%}"
        scores = f"{of_class['f1']:6.2%}  {of_class['average_precision']:6.2%}"
        print(f"{name:{width}}  {numbers}  {scores}")
    if result.broken:
        print(f"{counted(len(result.broken), 'image')} could not be read; see evaluation.json.")
    print(f"Written: {folder}/evaluation.json")
