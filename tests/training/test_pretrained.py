"""Starting from weights: where they come from, what of them is taken, and how fast they learn."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
import yaml
from amptrain.checkpoint.store import CheckpointStore
from amptrain.cli import main
from amptrain.config import OptimConfig, TrainConfig, from_flat
from amptrain.errors import ConfigError
from amptrain.inference.evaluate import EvaluateConfig, open_as_trained
from amptrain.inference.images import read_image
from amptrain.inference.model_file import LAST, read_info
from amptrain.model import new_model
from amptrain.optim import build_optimizer, default_lr, with_learning_rates
from amptrain.pretrained import (
    StartWeights,
    begun_size,
    find_weights,
    load_weights,
    with_image_size,
)
from PIL import Image
from torch import nn

SQUARE = (3, 32, 32)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for part, count in (("train", 8), ("val", 2)):
        for channel, name in enumerate(("cat", "dog")):
            folder = root / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 90, (32, 32, 3), dtype=np.uint8)
                pixels[..., channel] += 120
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def given() -> nn.Module:
    torch.manual_seed(7)
    return torchvision.models.resnet18(num_classes=5)


@pytest.mark.parametrize(
    "pack",
    [
        lambda tensors: tensors,
        lambda tensors: {"model": {f"module._orig_mod.{k}": v for k, v in tensors.items()}},
        lambda tensors: {"state_dict": {f"model.{k}": v for k, v in tensors.items()}, "epoch": 3},
        lambda tensors: {"state_dict": {}, "state_dict_ema": tensors},
    ],
    ids=["plain", "ddp_compiled", "lightning", "timm_ema"],
)
def test_a_state_dict_of_any_program_is_taken_but_for_the_head(
    tmp_path: Path, given: nn.Module, pack: Callable[[dict[str, torch.Tensor]], object]
) -> None:
    torch.save(pack(given.state_dict()), tmp_path / "given.pth")
    model = new_model("resnet18", shape=SQUARE, classes=2)
    head = model.state_dict()["fc.weight"].clone()
    text = load_weights(model, find_weights(str(tmp_path / "given.pth"), "resnet18"), ("a", "b"))
    assert "120 of the model's 122 tensors" in text
    assert "the head (fc.weight, fc.bias) is new" in text
    for name, tensor in given.state_dict().items():
        if not name.startswith("fc."):
            assert torch.equal(model.state_dict()[name], tensor)
    assert torch.equal(model.state_dict()["fc.weight"], head)


def test_what_is_no_weights_for_this_model_is_refused(tmp_path: Path, given: nn.Module) -> None:
    torch.save(given.state_dict(), tmp_path / "given.pth")
    start = find_weights(str(tmp_path / "given.pth"), "squeezenet1_0")
    with pytest.raises(ConfigError, match="it is of another one"):
        load_weights(new_model("squeezenet1_0", shape=SQUARE, classes=2), start, ("a", "b"))
    with pytest.raises(ConfigError, match="resnet18 has IMAGENET1K_V1"):
        find_weights("IMAGENET", "resnet18")
    with pytest.raises(ConfigError, match="no file and no run"):
        find_weights("gone.pth", "resnet18")
    torch.save(given, tmp_path / "whole.pth")
    with pytest.raises(ConfigError, match="would run code"):
        find_weights(str(tmp_path / "whole.pth"), "resnet18").read()


def test_torchvisions_weights_bring_size_classes_and_normalisation() -> None:
    start = find_weights("DEFAULT", "inception_v3")
    assert (start.image_size, start.mean) == (299, (127.5,) * 3)
    assert len(start.classes or ()) == 1000


def small_vit(image_size: int) -> nn.Module:
    return torchvision.models.VisionTransformer(
        image_size,
        patch_size=8,
        num_layers=1,
        num_heads=2,
        hidden_dim=16,
        mlp_dim=16,
        num_classes=2,
    )


def test_position_embeddings_of_another_image_size_are_interpolated() -> None:
    given, model = small_vit(32), small_vit(48)
    text = load_weights(
        model, StartWeights(source="x", read=lambda: dict(given.state_dict())), ("a", "b")
    )
    assert "new" not in text
    one = given.state_dict()["encoder.pos_embedding"]
    assert torch.equal(model.state_dict()["encoder.pos_embedding"][:, 0], one[:, 0])


def test_fine_tuning_moves_the_head_alone_when_frozen(
    tmp_path: Path, photos: Path, given: nn.Module, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(given.state_dict(), tmp_path / "given.pth")
    flags = "--device cpu --precision fp32 --model resnet18 --image-size 32"
    flags += " --batch-size 8 --epochs 2"
    run = ["--runs", str(tmp_path), "--name", "r", "--data", f"imagefolder:{photos}", "--freeze"]
    words = [
        "train",
        *flags.split(),
        "--num-workers",
        "0",
        *run,
        "--weights",
        str(tmp_path / "given.pth"),
    ]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "120 of the model's 122 tensors" in said
    assert "for the head (the rest is frozen)" in said
    loaded = CheckpointStore(tmp_path / "r" / "checkpoints").load_latest()
    assert loaded is not None
    model: dict[str, torch.Tensor] = loaded.state["model"]  # type: ignore[assignment]
    for name, tensor in given.state_dict().items():
        if not name.startswith("fc."):
            assert torch.equal(model[name], tensor), name


def test_the_head_learns_ten_times_as_fast_and_no_embedding_is_decayed() -> None:
    config = from_flat({"model": "swin_t", "data": "fake:8", "weights": "DEFAULT", "lr": 1e-4})
    optim = with_learning_rates(config).optim
    assert optim.head_lr == pytest.approx(1e-3)
    models = [new_model(n, shape=(3, 32, 32), classes=2) for n in ("swin_t", "convnext_tiny")]
    for model in (*models, small_vit(32)):
        names = {id(parameter): key for key, parameter in model.named_parameters()}
        groups = build_optimizer(model, optim).param_groups
        assert sorted({group["lr"] for group in groups}) == pytest.approx([1e-4, 1e-3])
        assert sum(len(group["params"]) for group in groups) == len(names)
        decayed = [names[id(p)] for g in groups if g["weight_decay"] for p in g["params"]]
        kinds = ("bias", "bias_table", "embedding", "token", "layer_scale")
        assert not [key for key in decayed if key.endswith(kinds) or "norm" in key or "ln" in key]
        assert any(key.endswith("weight") for key in decayed)


def test_the_default_rate_follows_model_optimizer_and_batch() -> None:
    def rate(model: str, optimizer: str = "adamw", batch: int = 64, start: bool = False) -> float:
        return default_lr(model, optimizer, batch_size=batch, pretrained=start)

    assert (rate("small_cnn"), rate("resnet50"), rate("swin_t")) == (5e-3, 1e-3, 2e-4)
    assert rate("resnet50", batch=256) == 2e-3
    assert rate("resnet50", "sgd", batch=256) == 0.1
    assert rate("resnet50", start=True) == 3.3e-4
    assert with_learning_rates(TrainConfig(optim=OptimConfig(lr=0.3))).optim.lr == 0.3


def test_a_model_of_ones_own_trains(
    tmp_path: Path, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def net(num_classes, in_channels):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(in_channels * 1024, num_classes))\n"
        "def wrong(num_classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 1024, num_classes + 1))\n"
    )
    flags = "--device cpu --precision fp32 --image-size 32"
    flags += " --batch-size 8 --epochs 1 --num-workers 0"
    run = ["--runs", str(tmp_path), "--name", "own", "--data", f"imagefolder:{photos}"]
    for function, code, sentence in (
        ("net", 0, "accuracy"),
        ("wrong", 2, "one number for each class"),
        ("gone", 2, "has no function 'gone'; there are net, wrong"),
    ):
        words = ["train", *flags.split(), *run, "--model", f"{tmp_path}/mine.py:{function}"]
        if code:
            words[words.index("own")] = function
        assert main(words) == code
        said = capsys.readouterr()
        assert sentence in said.out + said.err
        assert (tmp_path / function).exists() is False
    image = str(photos / "val" / "cat" / "0.png")
    assert main(["predict", str(tmp_path / "own"), image]) == 2
    assert "if you trust that code" in capsys.readouterr().err
    own = f"{tmp_path}/mine.py:net"
    assert main(["predict", str(tmp_path / "own"), image, "--model", own]) == 0


@pytest.mark.parametrize("what", ["", "/best.safetensors"], ids=["a run", "its model file"])
def test_another_run_is_taken_with_its_head(what: str, tmp_path: Path) -> None:
    """What a run that diverged is told to do."""
    flags = ["train", "--device", "cpu", "--precision", "fp32", "--runs", str(tmp_path)]
    if not (tmp_path / "first").exists():
        assert main([*flags, "--name", "first", "--epochs", "2"]) == 0
    start = ["--weights", f"{tmp_path}/first{what}", "--lr", "1e-6", "--head-lr", "1e-6"]
    assert main([*flags, "--name", "second", "--epochs", "1", *start]) == 0
    first, second = (
        json.loads((tmp_path / name / "result.json").read_text()) for name in ("first", "second")
    )
    assert second["accuracy"] == pytest.approx(first["accuracy"], abs=0.01)


SMALL = ["--device", "cpu", "--precision", "fp32", "--model", "small_cnn", "--batch-size", "8",
         "--num-workers", "0"]  # fmt: skip


@pytest.fixture(scope="module")
def of_32_pixels(photos: Path) -> list[str]:
    """The flags of a run that starts from one whose images had 32 pixels, and says no size."""
    runs = photos.parent / "runs"
    flags = ["train", *SMALL, "--runs", str(runs), "--data", f"imagefolder:{photos}"]
    assert main([*flags, "--name", "first", "--image-size", "32", "--epochs", "1"]) == 0
    return [*flags, "--weights", str(runs / "first")]


def sizes_of(run: Path) -> list[int]:
    """What each file of a run says of the size of its images."""
    settings = yaml.safe_load((run / "config.yaml").read_text())
    result = json.loads((run / "result.json").read_text())
    return [settings["image_size"], result["image_size"], read_info(run / LAST).shape[1]]


def test_the_size_of_images_is_that_of_the_weights_unless_given(
    of_32_pixels: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*of_32_pixels, "--runs", str(tmp_path)]
    assert main([*flags, "--name", "own", "--epochs", "1"]) == 0
    assert "taken at 32×32 pixels, as these weights were trained with" in capsys.readouterr().out
    assert sizes_of(tmp_path / "own") == [32, 32, 32]
    other = [*flags, "--name", "other", "--image-size", "24"]
    assert main([*other, "--epochs", "1"]) == 0
    assert "--image-size 32 is what they are used to" in capsys.readouterr().out
    assert sizes_of(tmp_path / "other") == [24, 24, 24]


def test_a_run_that_goes_on_keeps_the_size_of_its_images(
    of_32_pixels: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that was begun with another size than that of its weights: so are those of before there
    was a choice, with 224."""
    flags = [*of_32_pixels, "--runs", str(tmp_path), "--name", "old"]
    assert main([*flags, "--image-size", "24", "--epochs", "1"]) == 0
    assert main([*flags, "--epochs", "1"]) == 0
    assert "is finished at step 2" in capsys.readouterr().out
    assert main([*flags, "--epochs", "2"]) == 0
    assert "Continuing at step 2 of 4" in capsys.readouterr().out
    assert sizes_of(tmp_path / "old") == [24, 24, 24]
    assert main([*flags, "--epochs", "3", "--image-size", "32"]) == 2
    assert "image_size 24 → 32" in capsys.readouterr().err


def test_a_run_that_left_no_checkpoint_has_no_size_to_keep(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("image_size: 48\n")
    assert begun_size(tmp_path) is None
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/step-000000001.pt").touch()
    assert begun_size(tmp_path) == 48
    assert with_image_size(TrainConfig(), None).data.image_size == 224


def test_a_model_is_judged_and_used_at_the_size_of_its_images(
    of_32_pixels: list[str], photos: Path
) -> None:
    first = photos.parent / "runs/first"
    config = EvaluateConfig(first, data=f"imagefolder:{photos}")
    assert open_as_trained(config, read_info(first / LAST)).shape == SQUARE
    assert read_image(photos / "val/cat/0.png", read_info(first / LAST)).shape == SQUARE


def test_224_given_and_not_given_is_the_same_run() -> None:
    """Its name too: there are runs of before, whose default was 224."""
    given = from_flat({"data": "fake:8", "image_size": 224})
    assert given.run_dir == from_flat({"data": "fake:8"}).run_dir
    assert "image_size32" in from_flat({"data": "fake:8", "image_size": 32}).run_dir.name


def test_models_of_one_size_get_that_of_the_images() -> None:
    model = new_model("vit_b_16", shape=(3, 64, 64), classes=2)
    with torch.no_grad():
        assert model.eval()(torch.zeros(1, 3, 64, 64)).shape == (1, 2)
    with pytest.raises(ConfigError, match="maxvit_t cannot take images of 3×64×64"):
        new_model("maxvit_t", shape=(3, 64, 64), classes=2)
