"""`amptrain predict`: which class each image is of."""

import csv
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import batched
from pathlib import Path
from typing import Annotated, Literal, TextIO

import torch
import tyro
from torch import Tensor, nn

from amptrain.data.datasets import MICRO_F1
from amptrain.errors import ConfigError, TrainingError
from amptrain.files import named
from amptrain.inference.images import UNREADABLE, check_places, files_of, read_image
from amptrain.inference.model_file import ModelInfo, load_model
from amptrain.words import counted


@dataclass(frozen=True)
class PredictConfig:
    """Tell the class of images, with a trained model."""

    model_file: Annotated[Path, tyro.conf.Positional]
    """A run directory, the name of a run in runs/, or a model file (.safetensors)."""
    images: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Image files, folders, or - for a list on stdin, one path a line."""
    out: Path | None = None
    """File to write; the default is the terminal. Its ending (.csv or .json) chooses the format."""
    format: Literal["csv", "json"] | None = None
    """csv has one line an image; json is a list of objects."""
    top: int | None = None
    """Classes told of each image, the likeliest first; the default is 1, or all of a model that was
    trained with --loss bce."""
    batch_size: int = 32
    """Images computed at once."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Where to compute; auto takes CUDA if there is a device."""
    model: str | None = None
    """For a model of your own: file.py:function or module:function, as in training."""


@dataclass(frozen=True)
class Prediction:
    """What the model says of an image."""

    image: Path
    classes: tuple[tuple[str, float], ...] = ()
    """(class, probability from 0 to 1), the likeliest first."""
    labels: tuple[str, ...] = ()
    """Of a model trained with bce: the classes of probability 0.5 on, in the order of classes."""
    error: str | None = None
    """Why the image could not be read."""


def main(arguments: Sequence[str]) -> int:
    """`amptrain predict`. Returns 1 if an image could not be read. Raises ConfigError."""
    config = tyro.cli(PredictConfig, prog="amptrain predict", args=list(arguments))
    if not config.images:
        raise ConfigError("Which images? Give files, folders, or - for a list on stdin.")
    if (config.top is not None and config.top < 1) or config.batch_size < 1:
        raise ConfigError("--top and --batch-size need to be at least 1.")
    write = write_json if format_of(config) == "json" else write_csv
    model, info, path = load_model(config.model_file, config.model)
    check_places(config.images)
    print(f"{path}: {described(info)}", file=sys.stderr)
    top = min(config.top or (len(info.classes) if info.loss == "bce" else 1), len(info.classes))
    predictions = predict(
        model.to(chosen_device(config.device)),
        info,
        files_of(config.images),
        top=top,
        batch_size=config.batch_size,
    )
    several = info.loss == "bce"
    if config.out is None:
        return _told(write(sys.stdout, predictions, top, several))
    config.out.parent.mkdir(parents=True, exist_ok=True)
    with (
        named(config.out),
        config.out.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file,
    ):
        return _told(write(file, predictions, top, several))


def format_of(config: PredictConfig) -> str:
    """csv or json. Raises ConfigError for a file of another ending, unless --format chooses."""
    suffix = config.out.suffix[1:].lower() if config.out else "csv"
    if config.format is None and suffix not in ("csv", "json"):
        raise ConfigError(
            f"--out is {config.out}; its ending needs to be .csv or .json, or give --format."
        )
    return config.format or suffix


def predict(
    model: nn.Module,
    info: ModelInfo,
    files: Iterator[Path],
    *,
    top: int = 1,
    batch_size: int = 32,
) -> Iterator[Prediction]:
    """The prediction for each file, in order. The model computes in FP32, where it is."""
    for paths in batched(files, batch_size):
        images: list[Tensor] = []
        errors: dict[Path, str] = {}
        for path in paths:
            try:
                images.append(read_image(path, info))
            except UNREADABLE as error:
                errors[path] = str(error)
        found: Iterator[Tensor] = iter(_probabilities(model, info, images) if images else [])
        for path in paths:
            if path in errors:
                yield Prediction(path, error=errors[path])
                continue
            probabilities = next(found)
            values, places = probabilities.topk(top)
            pairs = zip(places.tolist(), values.tolist(), strict=True)
            classes = tuple((info.classes[place], value) for place, value in pairs)
            yield Prediction(path, classes, _labels(info, probabilities))


def _labels(info: ModelInfo, probabilities: Tensor) -> tuple[str, ...]:
    """The labels that a model trained with bce tells; see Prediction."""
    if info.loss != "bce":
        return ()
    told = (probabilities >= 0.5).tolist()
    return tuple(name for name, there in zip(info.classes, told, strict=True) if there)


@torch.inference_mode()
def _probabilities(model: nn.Module, info: ModelInfo, images: list[Tensor]) -> Tensor:
    """(n, classes), on the CPU, of the normalised images: that of each class among all, or with bce
    by itself."""
    place = next(model.parameters()).device
    logits: Tensor = model(torch.stack(images).to(place))
    logits = logits.float()
    return (logits.sigmoid() if info.loss == "bce" else logits.softmax(1)).cpu()


def write_csv(file: TextIO, predictions: Iterator[Prediction], top: int, several: bool) -> int:
    """One line an image: image, class, probability, and so on for the `top` classes; error at the
    end. With `several`, labels come before class, parted by | as in a table.

    Returns the number of images that could not be read.
    """
    writer, failed = csv.writer(file, lineterminator="\n"), 0
    names = [
        name for place in range(2, top + 1) for name in (f"class_{place}", f"probability_{place}")
    ]
    writer.writerow(["image", *["labels"] * several, "class", "probability", *names, "error"])
    for item in predictions:
        failed += item.error is not None
        told = [value for name, share in item.classes for value in (name, f"{share:.4f}")]
        labels = ["|".join(item.labels)] * several
        writer.writerow([item.image, *labels, *(told or [""] * 2 * top), item.error or ""])
        file.flush()
    return failed


def write_json(file: TextIO, predictions: Iterator[Prediction], top: int, several: bool) -> int:
    """A list of {"image", "predictions": [{"class", "probability"}]} or {"image", "error"}; with
    `several`, "labels" is a list beside "predictions". `top` is the length of that.

    Returns the number of images that could not be read.
    """
    failed = 0
    file.write("[")
    for number, item in enumerate(predictions):
        failed += item.error is not None
        told = [{"class": name, "probability": round(share, 6)} for name, share in item.classes]
        labels = {"labels": list(item.labels)} if several else {}
        what = {"error": item.error} if item.error else {**labels, "predictions": told}
        file.write(f"{',' if number else ''}\n  {json.dumps({'image': str(item.image), **what})}")
    file.write("\n]\n")
    return failed


def chosen_device(asked: str) -> torch.device:
    """auto is CUDA where there is a device. Raises ConfigError if what was asked is not there."""
    if asked == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda was given and torch finds no CUDA device; use cpu.")
    there = asked != "cpu" and torch.cuda.is_available()
    return torch.device("cuda" if there else "cpu")


def described(info: ModelInfo) -> str:
    """The model in a line."""
    kind = "averaged weights" if info.averaged else "weights"
    judged = "".join(
        f", {measure} {info.metrics[measure]:.2%} in validation"
        for measure in ("accuracy", MICRO_F1)
        if measure in info.metrics
    )
    height, width = info.shape[1:]
    return (
        f"{info.model}, {counted(len(info.classes), 'class')}, {height}×{width} pixels, {kind} of "
        f"epoch {info.epoch}{judged}"
    )


def _told(failed: int) -> int:
    if failed:
        raise TrainingError(
            f"{counted(failed, 'image')} could not be read; the column error says why."
        )
    return 0
