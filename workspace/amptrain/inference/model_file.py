"""A model as one file that can be used: the weights, and all that a user of them has to know.

The file is a safetensors file: it runs no code when it is read. What belongs to the weights stands
in its metadata under `amptrain`, as JSON: see ModelInfo.
"""

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from amptrain.data.decode import Reading
from amptrain.errors import ConfigError, TrainingError

FORMAT = "amptrain model 1"
LAST, BEST = "model.safetensors", "best.safetensors"


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """What one has to know to use the weights."""

    model: str
    """small_cnn, a name of torchvision, or `file.py:function` of a model of one's own."""
    classes: tuple[str, ...]
    """Name of each output, in order."""
    shape: tuple[int, int, int]
    """(channels, height, width) of the input."""
    mean: tuple[float, ...]
    """Of each channel, in pixel values from 0 to `pixel_max`."""
    std: tuple[float, ...]
    pixel_max: float = 255.0
    """The pixel value of white."""
    crop: float = 224 / 256
    """Part of the shorter side that is seen: the middle of the image is cut out as a square."""
    reading: Reading = field(default_factory=Reading)
    """How image files are read."""
    averaged: bool = False
    """Whether these are the averaged weights (EMA)."""
    step: int = 0
    epoch: int = 0
    precision: str = "fp32"
    """In which it was trained and judged."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of the validation images: loss; accuracy, or micro-F1 where they have several labels (0 to
    1); and those of --metrics."""
    loss: str = "cross-entropy"
    """With which it was trained: cross-entropy, where a softmax of the outputs gives the
    probabilities; or bce, where a sigmoid gives that of each class by itself."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of torch and torchvision."""
    seed: int = 0
    """Which images were held out for validation depends on it, and on the share of them:"""
    val_fraction: float | None = None
    """None where `--val-fraction` was not given."""


def write_model(path: Path, model: nn.Module, info: ModelInfo) -> None:
    """Write `model` with `info`, aside and then renamed: `path` is whole or as it was before.

    Raises TrainingError, with what to do, if it could not be written.
    """
    aside = path.with_suffix(".tmp")
    text = json.dumps({"format": FORMAT, **asdict(info)}, ensure_ascii=False)
    try:
        from safetensors.torch import save_model
    except ImportError:
        raise TrainingError(
            f"{path.name} is not written, because the package safetensors is missing; "
            "install it with pip install safetensors. The checkpoints are not touched by this."
        ) from None
    try:
        # safetensors makes a file of mode 0600; others may read this one as any new file.
        aside.touch()
        mode = stat.S_IMODE(aside.stat().st_mode)
        save_model(model, str(aside), metadata={"format": "pt", "amptrain": text})
        with aside.open("rb") as file:
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        aside.replace(path)
    except Exception as error:  # safetensors has an error type of its own for a full disk
        aside.unlink(missing_ok=True)
        raise TrainingError(f"The model {path} could not be written: {error}.") from error


def find_model(place: Path) -> Path:
    """The model file that `place` means: a file, a run directory, or the name of a run in runs/.

    In a run directory that is the model of the best epoch, or else the last. Raises ConfigError.
    """
    place = place.expanduser()
    places = (place, Path("runs") / place)  # a folder of images may have the run's name
    for folder in places:
        for path in (folder, folder / BEST, folder / LAST):
            if path.is_file():
                return path
    for folder in reversed(places):
        if folder.is_dir():
            raise ConfigError(
                f"{folder} has no {BEST} and no {LAST} yet. `amptrain train` writes them at the "
                "end of an epoch."
            )
    raise ConfigError(
        f"There is no file and no run {place}. Give a run directory, or a model file such as "
        f"runs/NAME/{BEST}."
    )


def read_info(path: Path) -> ModelInfo:
    """What stands in a model file, without its weights. Raises ConfigError."""
    found = read_metadata(path).get("amptrain")
    if found is None:
        raise ConfigError(
            f"{path} holds weights, but not what they are for: amptrain did not write it. "
            f"Train with --weights {path} first."
        )
    values = json.loads(found)
    if values.pop("format", None) != FORMAT:
        raise ConfigError(f"{path} was written by another version of amptrain.")
    known = {item.name for item in fields(ModelInfo)}
    for name in ("classes", "shape", "mean", "std"):
        values[name] = tuple(values[name])
    if "reading" in values:  # files of before lack it
        values["reading"] = Reading(**values["reading"])
    return ModelInfo(**{name: value for name, value in values.items() if name in known})


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file. Raises ConfigError."""
    with _opened(path) as file:
        return dict(file.metadata() or {})


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU. Raises ConfigError."""
    with _opened(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _opened(path: Path) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ConfigError(
            f"To read {path} the package safetensors is needed: pip install safetensors."
        ) from None
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be read as a safetensors file: {error}.") from None


def load_model(place: Path, own: str | None = None) -> tuple[nn.Module, ModelInfo, Path]:
    """The model that `place` means (see find_model), ready to be used, on the CPU.

    `own` is `file.py:function` for a model of one's own; a file alone names code and does not make
    this run it. Raises ConfigError.
    """
    from amptrain.model import is_own_model, new_model

    path = find_model(place)
    info = read_info(path)
    name = own or info.model
    if is_own_model(info.model) and own is None:
        raise ConfigError(
            f"{path} is of a model of one's own, {info.model}. Add --model {info.model}, if you "
            "trust that code."
        )
    model = new_model(name, shape=info.shape, classes=len(info.classes))
    try:
        from safetensors.torch import load_model as load_into

        load_into(model, str(path))
    except RuntimeError as error:
        raise ConfigError(f"The weights of {path} do not fit the model {name}: {error}") from None
    return model.eval(), info, path


def new_model_like(model: nn.Module, path: Path) -> nn.Module:
    """A copy of `model` with the weights that stand in the file `path`."""
    import copy

    from safetensors.torch import load_model as load_into

    other = copy.deepcopy(model)
    for parameter in other.parameters():
        torch.nn.init.zeros_(parameter)
    load_into(other, str(path))
    return other.eval()


def versions() -> dict[str, str]:
    """Of what makes the outputs."""
    import torchvision

    return {"torch": torch.__version__, "torchvision": torchvision.__version__}
