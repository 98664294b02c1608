"""Weights to start from: torchvision's own, a file, or another run; and what of them fits."""

import dataclasses
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torchvision
import yaml
from torch import Tensor, nn

from amptrain.config import IMAGE_SIZE, SMALLEST_IMAGE, TrainConfig
from amptrain.data.datasets import Dataset
from amptrain.errors import ConfigError
from amptrain.inference.model_file import BEST, LAST, find_model, read_info, read_metadata
from amptrain.inference.model_file import read_tensors as read_safetensors
from amptrain.model import head_name
from amptrain.sharding import load_model
from amptrain.words import counted

ENDINGS = (".safetensors", ".pth", ".pt", ".bin", ".ckpt")
NESTED = ("state_dict_ema", "model_ema", "ema", "state_dict", "model_state_dict", "model")
"""Keys under which files of timm, torchvision's references, Lightning and amptrain hold the
weights; averaged ones first, as timm does."""
PREFIXES = ("module.", "_orig_mod.", "model.", "_forward_module.")
"""What DDP, torch.compile and Lightning put in front of each name."""


@dataclass(frozen=True, kw_only=True)
class StartWeights:
    """Where weights are, and what is known of them without reading them."""

    source: str
    """For people."""
    read: Callable[[], dict[str, Tensor]]
    """The tensors by name. Raises ConfigError."""
    classes: tuple[str, ...] | None = None
    image_size: int | None = None
    mean: tuple[float, ...] | None = None
    """Of each channel, in pixel values of 0 to 255, as the weights are used to."""
    std: tuple[float, ...] | None = None
    over_network: bool = False
    """Whether `read` may fetch a file: one process then does it before the others."""


def find_start(config: TrainConfig) -> StartWeights | None:
    """The weights that a run of `config` starts from, if there are some. Raises ConfigError."""
    asked = config.model.weights
    return None if asked is None else find_weights(asked, config.model_name)


def find_weights(asked: str, model: str) -> StartWeights:
    """The weights that `asked` means for `model`: a file, a run, or a name of torchvision's
    (DEFAULT, IMAGENET1K_V1). Raises ConfigError."""
    path = Path(asked).expanduser()
    runs = [folder for folder in (path, Path("runs") / path) if folder.is_dir()]
    if runs:
        return _file(find_model(runs[0]))
    if path.is_file():
        return _file(path)
    if asked.lower().endswith(ENDINGS) or "/" in asked:
        raise ConfigError(f"--weights: there is no file and no run {path}.")
    return _torchvision(asked, model)


def _torchvision(asked: str, model: str) -> StartWeights:
    try:
        known = torchvision.models.get_model_weights(model)
    except ValueError:
        raise ConfigError(
            f"--weights {asked}: torchvision has no weights for {model}. Give a file ({BEST}, "
            f"{LAST} or a state dict), or another run."
        ) from None
    name = asked.rpartition(".")[2]
    if name not in known.__members__:
        raise ConfigError(
            f"--weights {asked}: {model} has {', '.join(known.__members__)}; a file is a path."
        )
    weights: Any = known[name]
    transforms = weights.transforms()
    mean, std = transforms.mean, transforms.std
    if model in {"googlenet", "inception_v3"}:
        # Ported from TensorFlow, where pixels go from -1 to 1; torchvision converts inside the
        # model (transform_input), which is the same as these two numbers.
        mean = std = (0.5,) * 3
    return StartWeights(
        source=str(weights),
        read=lambda: _fetched(weights),
        classes=tuple(weights.meta["categories"]),
        image_size=int(transforms.crop_size[0]),
        mean=tuple(255 * value for value in mean),
        std=tuple(255 * value for value in std),
        over_network=True,
    )


def _fetched(weights: Any) -> dict[str, Tensor]:
    cache = Path(torch.hub.get_dir()) / "checkpoints" / Path(weights.url).name
    try:
        return dict(weights.get_state_dict(progress=False, check_hash=True))
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"The weights {weights} could not be fetched: {error}. Without a network, fetch "
            f"{weights.url} elsewhere and give the file with --weights FILE, or put it to {cache}."
        ) from None


def _file(path: Path) -> StartWeights:
    if path.suffix == ".safetensors":
        if "amptrain" not in read_metadata(path):
            return StartWeights(source=str(path), read=lambda: plain_names(read_safetensors(path)))
        info = read_info(path)
        scale = 255 / info.pixel_max
        return StartWeights(
            source=str(path),
            read=lambda: plain_names(read_safetensors(path)),
            classes=info.classes,
            image_size=info.shape[1],
            mean=tuple(scale * value for value in info.mean),
            std=tuple(scale * value for value in info.std),
        )
    return StartWeights(source=str(path), read=lambda: _unpickled(path))


def _unpickled(path: Path) -> dict[str, Tensor]:
    """The state dict in what torch.save wrote, tensors and plain types only."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise ConfigError(
            f"--weights {path} holds more than tensors and plain types, and reading that would run "
            "code. Save model.state_dict() of it, where it was made."
        ) from None
    except (OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        first = str(error).splitlines()[0]
        raise ConfigError(f"--weights {path} cannot be read as weights: {first}.") from None
    return plain_names(_state_dict(content, path))


def _state_dict(content: object, path: Path) -> dict[str, Tensor]:
    if isinstance(content, Mapping):
        for key in NESTED:
            if isinstance(content.get(key), Mapping):
                return _state_dict(content[key], path)
        tensors = {key: value for key, value in content.items() if isinstance(value, Tensor)}
        if tensors:
            return tensors
    raise ConfigError(f"--weights {path} holds no state dict (tensors by name).")


def plain_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` without the prefixes that all names carry."""
    found = dict(tensors)
    while prefix := next((p for p in PREFIXES if all(name.startswith(p) for name in found)), None):
        found = {name.removeprefix(prefix): tensor for name, tensor in found.items()}
    return found


def load_weights(model: nn.Module, start: StartWeights, classes: tuple[str, ...]) -> str:
    """Put the weights into `model`, whose outputs are `classes`. Returns a sentence on what was
    left out. Raises ConfigError if they are of another model.

    The head stays random where the classes are others, or others in number.
    """
    given, own = start.read(), model.state_dict()
    head = head_name(model)
    given = _resized_positions(model, given)
    others = start.classes is not None and start.classes != classes
    taken = {
        name: tensor
        for name, tensor in given.items()
        if name in own
        and own[name].shape == tensor.shape
        and not (others and name.rpartition(".")[0] == head)
    }
    body = {name for name in own if name.rpartition(".")[0] != head}
    if len(body & taken.keys()) * 2 < len(body):
        raise ConfigError(
            f"{start.source} fits {len(body & taken.keys())} of this model's "
            f"{counted(len(body), 'tensor')}: it is of another one. It has "
            f"{', '.join(list(given)[:3])}, …; the model has {', '.join(list(own)[:3])}, …"
        )
    load_model(model, taken, strict=False)
    return _sentence(start.source, taken, given, own, head)


def _sentence(
    source: str,
    taken: Mapping[str, Tensor],
    given: Mapping[str, Tensor],
    own: Mapping[str, Tensor],
    head: str,
) -> str:
    random = [name for name in own if name not in taken]
    unused = [name for name in given if name not in taken and name not in own]
    tensors = counted(len(own), "tensor")
    text = f"Starting from {source}, which has {len(taken)} of the model's {tensors}"
    heads = [name for name in random if name.rpartition(".")[0] == head]
    if heads:
        text += f"; the head ({', '.join(heads)}) is new, since the classes are others"
    if rest := [name for name in random if name not in heads]:
        text += f"; new are also {_few(rest)}"
    if unused:
        text += f"; without use are {_few(unused)}"
    return text + "."


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _resized_positions(model: nn.Module, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """torchvision's ViT at another image size: its position embeddings are interpolated."""
    name = "encoder.pos_embedding"
    own = model.state_dict().get(name)
    if not isinstance(model, torchvision.models.VisionTransformer) or own is None:
        return given
    if name not in given or given[name].shape == own.shape:
        return given
    from collections import OrderedDict

    from torchvision.models.vision_transformer import interpolate_embeddings

    return dict(interpolate_embeddings(model.image_size, model.patch_size, OrderedDict(given)))


def as_trained(task: Dataset, start: StartWeights) -> Dataset:
    """`task`, its images normalised as the weights are used to, where that is known."""
    if start.mean is None or start.std is None or len(start.mean) != task.shape[0]:
        return task
    scale = task.pixel_max / 255
    mean, std = (tuple(scale * value for value in values) for values in (start.mean, start.std))
    return dataclasses.replace(task, mean=mean, std=std)


def with_image_size(
    config: TrainConfig, start: StartWeights | None, begun: int | None = None
) -> TrainConfig:
    """`config` with the size of its images: as given, else `begun`, that of the run so far, else
    that of the weights, else 224."""
    own = (start and start.image_size) or IMAGE_SIZE
    size = config.data.image_size or begun or max(own, SMALLEST_IMAGE)
    return dataclasses.replace(config, data=dataclasses.replace(config.data, image_size=size))


def begun_size(run_dir: Path) -> int | None:
    """The size of images that the run in `run_dir` has been trained with; None for a new run. An
    older run has 224, whatever its weights were trained with."""
    if not any((run_dir / "checkpoints").glob("step-*.pt")):
        return None
    try:
        saved = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
        return int(saved["image_size"])
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return None  # what can be told of that is told where checkpoints are read


def size_text(task: Dataset, start: StartWeights, asked: int | None) -> list[str]:
    """A sentence where the weights chose the size, or were made with images of another one."""
    size, wanted = task.shape[1], start.image_size
    if wanted == size and asked is None and size != IMAGE_SIZE:
        return [
            f"Images are taken at {size}×{size} pixels, as these weights were trained with; "
            "--image-size changes that."
        ]
    if wanted is None or wanted == size:
        return []
    return [
        f"These weights were trained with images of {wanted}×{wanted} pixels, and these have "
        f"{size}×"
        f"{size}; --image-size {wanted} is what they are used to."
    ]
