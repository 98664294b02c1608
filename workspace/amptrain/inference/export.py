"""`amptrain export`: a model for programs that do not have amptrain, checked by running it."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from torch import Tensor, nn

from amptrain.errors import ConfigError, TrainingError
from amptrain.inference.model_file import ModelInfo, load_model, new_model_like, write_model
from amptrain.inference.predict import described

Runner = Callable[[Tensor], Tensor]
TOLERANCE = 1e-3
"""Largest difference of a logit from torch's own, over the largest logit: FP32 sums in another
order, through some hundred layers."""


@dataclass(frozen=True)
class ExportConfig:
    """Write a model for other programs, and check that it computes the same."""

    model_file: Annotated[Path, tyro.conf.Positional]
    """A run directory, the name of a run in runs/, or a model file (.safetensors)."""
    format: Literal["onnx", "torch", "safetensors"] | None = None
    """onnx; torch (torch.export, .pt2); safetensors (weights). The default is what --out ends
    in."""
    out: Path | None = None
    """File to write; the default is beside the model file."""
    model: str | None = None
    """For a model of your own: file.py:function or module:function, as in training."""


ENDINGS = {"onnx": ".onnx", "torch": ".pt2", "safetensors": ".safetensors"}


def main(arguments: Sequence[str]) -> int:
    """`amptrain export`. Raises ConfigError, and TrainingError if the outputs differ."""
    config = tyro.cli(ExportConfig, prog="amptrain export", args=list(arguments))
    by_ending = {ending: name for name, ending in ENDINGS.items()}
    suffix = config.out.suffix.lower() if config.out else ""
    kind = config.format or by_ending.get(suffix)
    if kind is None:
        raise ConfigError(
            "Which format? Give --format onnx, torch or safetensors, or an --out that ends in "
            ".onnx, .pt2 or .safetensors."
        )
    model, info, path = load_model(config.model_file, config.model)
    out = config.out or path.with_name(f"{path.stem}-exported{ENDINGS[kind]}")
    out.parent.mkdir(parents=True, exist_ok=True)
    export = {"onnx": export_onnx, "torch": export_torch, "safetensors": export_safetensors}[kind]
    largest = compare(model, export(model, info, out), info)
    print(f"{path}: {described(info)}")
    print(
        f"Written: {out}. Run on 1 and on 3 images its outputs are those of the model, up to "
        f"{largest:.1e} of the largest. It takes float32 of (n, "
        f"{', '.join(map(str, info.shape))}), "
        f"normalised; classes, mean and std are in its metadata, under `amptrain`."
    )
    return 0


def compare(model: nn.Module, run: Runner, info: ModelInfo) -> float:
    """Run both on 1 and on 3 images of noise. Returns the largest difference over the largest
    output. Raises TrainingError if it is above TOLERANCE."""
    generator = torch.Generator().manual_seed(0)
    largest = 0.0
    for count in (1, 3):
        images = torch.randn(count, *info.shape, generator=generator)
        with torch.no_grad():
            wanted, got = model(images), run(images)
        if wanted.shape != got.shape:
            raise TrainingError(f"The exported model gives {got.shape}, not {wanted.shape}.")
        difference = float((wanted - got).abs().max() / wanted.abs().max().clamp(min=1e-12))
        largest = max(largest, difference)
    if not largest <= TOLERANCE:
        raise TrainingError(
            f"The exported model does not compute the same: its outputs differ by {largest:.1%} of "
            "the largest. Do not use the file."
        )
    return largest


def export_safetensors(model: nn.Module, info: ModelInfo, out: Path) -> Runner:
    """The weights, with their ModelInfo as metadata."""
    write_model(out, model, info)
    return new_model_like(model, out)


def export_torch(model: nn.Module, info: ModelInfo, out: Path) -> Runner:
    """What torch.export.load reads: the graph and the weights, for any number of images."""
    example = torch.randn(2, *info.shape)
    # Without a largest number swin and ViT fail: "not all values satisfy != 2**63 - 1".
    shapes = ({0: torch.export.Dim("images", max=2**16)},)
    try:
        program = torch.export.export(model, (example,), dynamic_shapes=shapes)
    except Exception as error:  # it has many types of error, all about the model's code
        first = str(error).strip().splitlines()[0]
        raise TrainingError(f"torch.export cannot take this model: {first}") from error
    torch.export.save(program, out, extra_files={"amptrain": as_json(info)})
    loaded: Runner = torch.export.load(out).module()
    return loaded


def export_onnx(model: nn.Module, info: ModelInfo, out: Path) -> Runner:
    """An ONNX file for any number of images, run by onnxruntime, or else by ONNX's reference."""
    try:
        import onnx
    except ImportError:
        raise ConfigError(
            "--format onnx needs the package onnx: pip install onnx. With onnxruntime too, the "
            "check is faster."
        ) from None
    axes = {"images": {0: "n"}, "logits": {0: "n"}}
    torch.onnx.export(
        model,
        (torch.randn(2, *info.shape),),
        str(out),
        input_names=["images"],
        output_names=["logits"],
        dynamic_axes=axes,
        dynamo=False,
    )
    content = onnx.load(str(out))
    onnx.helper.set_model_props(content, {"amptrain": as_json(info)})
    onnx.checker.check_model(content)
    onnx.save(content, str(out))
    return _onnx_runner(out)


def _onnx_runner(out: Path) -> Runner:
    session: Any
    try:
        import onnxruntime

        session = onnxruntime.InferenceSession(str(out), providers=["CPUExecutionProvider"])
    except ImportError:
        from onnx.reference import ReferenceEvaluator

        session = ReferenceEvaluator(str(out))
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


def as_json(info: ModelInfo) -> str:
    """`info` for the metadata of a file."""
    return json.dumps(asdict(info), ensure_ascii=False)
