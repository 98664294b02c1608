"""`amptrain evaluate`: how good a model is on labelled images, as numbers and as a picture."""

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import tyro
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from amptrain.config import SMALLEST_IMAGE, DataConfig
from amptrain.data.datasets import VALIDATION, Dataset, Images, open_dataset
from amptrain.errors import ConfigError
from amptrain.files import named, write_text
from amptrain.inference.model_file import ModelInfo, load_model
from amptrain.inference.multilabel import judge_labels, write_labels
from amptrain.inference.predict import chosen_device, described
from amptrain.loss import image_losses
from amptrain.metrics import Outputs, OwnMetrics, own_metrics_text
from amptrain.report.log import finite
from amptrain.words import counted

LARGEST_PICTURE = 100
"""Classes in a picture; more cannot be told apart, and the CSV has them all."""


@dataclass(frozen=True)
class EvaluateConfig:
    """Judge a trained model on the validation images of a data set."""

    model_file: Annotated[Path, tyro.conf.Positional]
    """A run directory, the name of a run in runs/, or a model file (.safetensors)."""
    data: str
    """As in training: digits, cifar10, imagefolder:PATH."""
    data_dir: Path = Path("data")
    """Directory in which cifar10 lies."""
    out: Path | None = None
    """Folder for evaluation.json, confusion.csv and confusion.png (where images have several
    labels, the first alone); the default is `evaluation` beside the model file."""
    batch_size: int = 64
    """Images computed at once."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Where to compute; auto takes CUDA if there is a device."""
    model: str | None = None
    """For a model of your own: file.py:function or module:function, as in training."""
    metrics: str | None = None
    """Metrics of your own, as in training; the default is none."""


@dataclass(frozen=True)
class Evaluation:
    """What a model did on labelled images."""

    loss: float
    """Mean cross-entropy; of a model trained with bce, binary cross-entropy."""
    confusion: NDArray[np.int64]
    """(classes, classes): images of the row's class that were taken for the column's."""
    right_in_5: int
    """Images whose class is among the five likeliest."""
    classes: tuple[str, ...]
    broken: tuple[str, ...] = ()
    """Images that could not be read; they are not counted."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Those of --metrics."""

    @property
    def images(self) -> int:
        return int(self.confusion.sum())

    @property
    def accuracy(self) -> float:
        return float(self.confusion.trace()) / self.images

    def per_class(self) -> dict[str, dict[str, float]]:
        """images, precision, recall and F1 of each class; 0 where there is nothing to divide by."""
        right = self.confusion.diagonal().astype(float)
        there, told = self.confusion.sum(1), self.confusion.sum(0)
        recall = right / np.maximum(there, 1)
        precision = right / np.maximum(told, 1)
        f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-12)
        return {
            name: {
                "images": int(there[place]),
                "precision": float(precision[place]),
                "recall": float(recall[place]),
                "f1": float(f1[place]),
            }
            for place, name in enumerate(self.classes)
        }


def main(arguments: Sequence[str]) -> int:
    """`amptrain evaluate`. Raises ConfigError."""
    config = tyro.cli(EvaluateConfig, prog="amptrain evaluate", args=list(arguments))
    metrics = None if config.metrics is None else OwnMetrics(config.metrics)
    model, info, path = load_model(config.model_file, config.model)
    task = open_as_trained(config, info)
    require_same_classes(info, task)
    if task.label_sets is not None and info.loss != "bce":
        raise ConfigError(
            f"{task.name} has images of several labels or none, and {path} was trained with one "
            "for each (--loss cross-entropy). Judge it on such images, or train with --loss bce."
        )
    device = chosen_device(config.device)
    images = counted(len(task.validation), "image")
    print(f"{path}: {described(info)}; judged on {images} of {task.name}")
    folder = config.out or path.parent / "evaluation"
    batches = _batches(task.validation, config.batch_size)
    if task.label_sets is not None:
        labelled = judge_labels(
            model.to(device), info, batches, task.label_sets, device=device, metrics=metrics
        )
        write_labels(folder, labelled, path)
        return 0
    result = evaluate(model.to(device), info, batches, device=device, metrics=metrics)
    write_evaluation(folder, result, path)
    _tell(result, folder)
    return 0


def open_as_trained(config: EvaluateConfig, info: ModelInfo) -> Dataset:
    """The data, with the images held out that the run held out: others it was trained on. Raises
    ConfigError."""
    size = max(info.shape[1], SMALLEST_IMAGE)
    data = DataConfig(data=config.data, data_dir=config.data_dir, image_size=size, augment="none")
    try:
        task = open_dataset(replace(data, val_fraction=info.val_fraction), info.seed)
    except ConfigError:  # other data, which has images for validation and needs no fraction
        task = open_dataset(data, info.seed)
    if task.validation.reading is not None:
        task.validation.reading = info.reading
    return task


def require_same_classes(info: ModelInfo, task: Dataset) -> None:
    """Raise ConfigError unless the data has the model's classes, in its order."""
    if task.classes == info.classes:
        return
    only_data = sorted(set(task.classes) - set(info.classes))
    only_model = sorted(set(info.classes) - set(task.classes))
    raise ConfigError(
        f"The model knows {counted(len(info.classes), 'class')} and {task.name} has "
        f"{len(task.classes)}. Only in the data: {', '.join(only_data[:5]) or 'none'}; only in the "
        f"model: {', '.join(only_model[:5]) or 'none'}."
    )


def _batches(images: Images, size: int) -> Iterable[tuple[Tensor, Tensor, list[str]]]:
    """(pixels, labels, what could not be read), in the order of the data set."""
    for start in range(0, len(images), size):
        keys = range(start, min(start + size, len(images)))
        samples = [images[(VALIDATION, index)] for index in keys]
        good = [sample for sample in samples if sample.label >= 0]
        broken = [text for sample in samples for text in sample.broken]
        pixels = torch.stack([sample.image for sample in good]) if good else torch.empty(0)
        yield pixels, torch.tensor([sample.label for sample in good]), broken


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    info: ModelInfo,
    batches: Iterable[tuple[Tensor, Tensor, list[str]]],
    *,
    device: torch.device,
    metrics: OwnMetrics | None = None,
) -> Evaluation:
    """Judge `model` in FP32 on batches of (uint8 pixels, labels, sentences on broken images).

    Raises ConfigError if no image could be read, TrainingError where `metrics` fails.
    """
    count = len(info.classes)
    confusion = np.zeros((count, count), dtype=np.int64)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (info.mean, info.std))
    loss, in_five, broken = 0.0, 0, []
    outputs: list[Outputs] = []
    for pixels, labels, unread in batches:
        broken += unread
        if not len(labels):
            continue
        logits = model(((pixels.float() - mean) / std).to(device)).float().cpu()
        if metrics is not None:
            outputs.append((logits, labels))
        if info.loss == "bce":
            loss += float(image_losses("bce", logits.double(), labels).sum())
        else:
            loss += float(cross_entropy(logits.double(), labels, reduction="sum"))
        np.add.at(confusion, (labels.numpy(), logits.argmax(1).numpy()), 1)
        likeliest = logits.topk(min(5, count)).indices
        in_five += int((likeliest == labels[:, None]).any(1).sum())
    if not confusion.sum():
        raise ConfigError(f"None of the images could be read: {'; '.join(broken[:3])}")
    return Evaluation(
        loss / confusion.sum(),
        confusion,
        in_five,
        info.classes,
        broken=tuple(broken),
        metrics={} if metrics is None else metrics(outputs),
    )


def write_evaluation(folder: Path, result: Evaluation, path: Path) -> None:
    """Write evaluation.json, confusion.csv and, for up to 100 classes, confusion.png."""
    folder.mkdir(parents=True, exist_ok=True)
    values: dict[str, Any] = {
        "model": str(path),
        "images": result.images,
        "broken_images": list(result.broken),
        "loss": result.loss,
        "top1": result.accuracy,
        "top5": result.right_in_5 / result.images,
        "metrics": {name: finite(value) for name, value in result.metrics.items()},
        "per_class": result.per_class(),
    }
    text = json.dumps(values, indent=2, ensure_ascii=False)
    write_text(folder / "evaluation.json", text + "\n")
    table = folder / "confusion.csv"
    with (
        named(table),
        table.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file,
    ):
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["class ↓ taken for →", *result.classes])
        for name, row in zip(result.classes, result.confusion.tolist(), strict=True):
            writer.writerow([name, *row])
    if len(result.classes) <= LARGEST_PICTURE:
        draw_confusion(result, folder / "confusion.png")


def draw_confusion(result: Evaluation, path: Path) -> None:
    """The confusion matrix as a picture: the part of each class that was taken for each."""
    from matplotlib.figure import Figure

    count = len(result.classes)
    side = min(2.5 + 0.45 * count, 20)
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    axes = figure.add_subplot()
    parts = result.confusion / np.maximum(result.confusion.sum(1, keepdims=True), 1)
    image = axes.imshow(parts, cmap="Blues", vmin=0, vmax=1)
    names = [name.encode("utf-8", "replace").decode() for name in result.classes]
    axes.set_xticks(range(count), names, rotation=90 if max(map(len, names)) > 3 else 0)
    axes.set_yticks(range(count), names)
    axes.set_xlabel("taken for")
    axes.set_ylabel("class")
    axes.set_title(f"accuracy {result.accuracy:.2%} of {counted(result.images, 'image')}")
    if count <= 20:
        for row, column in np.ndindex(count, count):
            if number := result.confusion[row, column]:
                color = "white" if parts[row, column] > 0.5 else "black"
                axes.text(column, row, str(number), ha="center", va="center", color=color)
    figure.colorbar(image, ax=axes, label="part of the class")
    with named(path):
        figure.savefig(path, dpi=120)


def _tell(result: Evaluation, folder: Path) -> None:
    top5 = result.right_in_5 / result.images
    own = own_metrics_text(result.metrics)
    print(f"loss {result.loss:.4f}, top-1 {result.accuracy:.2%}, top-5 {top5:.2%}{own}")
    worst = sorted(result.per_class().items(), key=lambda item: item[1]["recall"])[:10]
    width = max(len(name) for name, _ in worst)
    title = "class" if len(worst) == len(result.classes) else "the ten worst"
    print(f"{title:{width}}  images  precision  recall")
    for name, values in worst:
        numbers = f"{values['images']:6}  {values['precision']:9.2%}  {values['recall']:6.2%}"
        print(f"{name:{width}}  {numbers}")
    if result.broken:
        print(f"{counted(len(result.broken), 'image')} could not be read; see evaluation.json.")
    print(f"Written: {folder}/evaluation.json, confusion.csv, confusion.png")
