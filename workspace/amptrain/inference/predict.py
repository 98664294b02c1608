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

from amptrain.errors import ConfigError, TrainingError
from amptrain.inference.images import UNREADABLE, files_of, read_image
from amptrain.inference.model_file import ModelInfo, load_model


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
    top: int = 1
    """Classes told of each image, the likeliest first."""
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
    error: str | None = None
    """Why the image could not be read."""


def main(arguments: Sequence[str]) -> int:
    """`amptrain predict`. Returns 1 if an image could not be read. Raises ConfigError."""
    config = tyro.cli(PredictConfig, prog="amptrain predict", args=list(arguments))
    if not config.images:
        raise ConfigError("Which images? Give files, folders, or - for a list on stdin.")
    if config.top < 1 or config.batch_size < 1:
        raise ConfigError("--top and --batch-size need to be at least 1.")
    model, info, path = load_model(config.model_file, config.model)
    print(f"{path}: {described(info)}", file=sys.stderr)
    predictions = predict(
        model.to(chosen_device(config.device)),
        info,
        files_of(config.images),
        top=min(config.top, len(info.classes)),
        batch_size=config.batch_size,
    )
    suffix = config.out.suffix[1:].lower() if config.out else "csv"
    write = write_json if (config.format or suffix) == "json" else write_csv
    if config.out is None:
        return _told(write(sys.stdout, predictions))
    with config.out.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
        return _told(write(file, predictions))


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
        found: Iterator[Tensor] = iter(_probabilities(model, images) if images else [])
        for path in paths:
            if path in errors:
                yield Prediction(path, error=errors[path])
                continue
            values, places = next(found).topk(top)
            pairs = zip(places.tolist(), values.tolist(), strict=True)
            yield Prediction(path, tuple((info.classes[place], value) for place, value in pairs))


@torch.inference_mode()
def _probabilities(model: nn.Module, images: list[Tensor]) -> Tensor:
    """(n, classes), on the CPU, of the normalised images."""
    place = next(model.parameters()).device
    logits: Tensor = model(torch.stack(images).to(place))
    return logits.float().softmax(1).cpu()


def write_csv(file: TextIO, predictions: Iterator[Prediction]) -> int:
    """One line an image: image, class, probability, and so on for --top; error at the end.

    Returns the number of images that could not be read.
    """
    writer, failed, header = csv.writer(file, lineterminator="\n"), 0, False
    for item in predictions:
        failed += item.error is not None
        if not header:
            many = range(2, len(item.classes) + 1)
            more = [name for place in many for name in (f"class_{place}", f"probability_{place}")]
            writer.writerow(["image", "class", "probability", *more, "error"])
            header = True
        told = [value for name, share in item.classes for value in (name, f"{share:.4f}")]
        writer.writerow([item.image, *(told or ["", ""]), item.error or ""])
        file.flush()
    return failed


def write_json(file: TextIO, predictions: Iterator[Prediction]) -> int:
    """A list of {"image", "predictions": [{"class", "probability"}]} or {"image", "error"}.

    Returns the number of images that could not be read.
    """
    failed = 0
    file.write("[")
    for number, item in enumerate(predictions):
        failed += item.error is not None
        told = [{"class": name, "probability": round(share, 6)} for name, share in item.classes]
        what = {"error": item.error} if item.error else {"predictions": told}
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
    accuracy = info.metrics.get("accuracy")
    judged = "" if accuracy is None else f", accuracy {accuracy:.2%} in validation"
    height, width = info.shape[1:]
    return (
        f"{info.model}, {len(info.classes)} classes, {height}×{width} pixels, {kind} of epoch "
        f"{info.epoch}{judged}"
    )


def _told(failed: int) -> int:
    if failed:
        raise TrainingError(f"{failed} images could not be read; the column error says why.")
    return 0
