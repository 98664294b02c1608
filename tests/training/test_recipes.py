"""Augmentation, mixing, schedules, early stop, class weights, gradient checkpointing: each does
what it is called, and a run with it continues bit for bit."""

import json
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from amptrain.cli import parse_config
from amptrain.config import DataConfig, OptimConfig, from_flat
from amptrain.data.datasets import Dataset, open_dataset
from amptrain.data.loader import BatchReader, DeviceBatches, collate, make_loader
from amptrain.data.mixing import Mixer, make_mixer
from amptrain.data.order import Order, TrainBatches
from amptrain.errors import ConfigError
from amptrain.grad_checkpointing import checkpoint_gradients
from amptrain.loss import balanced_weights, make_loss, weighted_cross_entropy
from amptrain.model import SmallCNN
from amptrain.report.result import finished
from amptrain.schedule import make_schedule
from amptrain.train import train
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from torchvision.transforms import v2

from .support import Make, records
from .test_resume import assert_same, everything, run_to

AUGMENTS: list[dict[str, Any]] = [
    {"augment": "randaugment"},
    {"augment": "trivialaugment"},
    {"augment": "none", "random_erasing": 1.0},
    {"augment": "none", "color_jitter": 0.5},
]


def digits(**settings: Any) -> Dataset:
    return open_dataset(DataConfig(**settings), seed=0)


# Augmentation


@pytest.mark.parametrize("settings", AUGMENTS, ids=str)
def test_an_augmented_image_is_a_function_of_seed_epoch_and_index(settings: dict[str, Any]) -> None:
    plain = digits(augment="none").train
    images, again = digits(**settings).train, digits(**settings).train
    keys = [(epoch, index) for epoch in (0, 1) for index in range(20)]
    made = [images[key].image for key in keys]
    torch.rand(3)  # what is drawn elsewhere has no influence, in whatever order they are read
    backwards = [again[key].image for key in reversed(keys)][::-1]
    assert all(torch.equal(one, other) for one, other in zip(made, backwards, strict=True))
    changed = sum(
        not torch.equal(plain[key].image, image) for key, image in zip(keys, made, strict=True)
    )
    assert changed > 20
    assert any(not torch.equal(made[i], made[i + 20]) for i in range(20))  # another epoch
    assert max(int(image.max()) for image in made) <= 16  # white, for digits
    before = torch.stack([plain[key].image for key in keys]).float().mean()
    assert (
        torch.stack(made).float().mean() > before / 2
    )  # operations that look at colours know that 16 is white


@pytest.mark.parametrize("settings", AUGMENTS, ids=str)
def test_augmentation_leaves_the_generators_of_the_run_alone(settings: dict[str, Any]) -> None:
    images = digits(**settings).train
    before = torch.get_rng_state()
    images[(0, 0)]
    assert torch.equal(torch.get_rng_state(), before)


def test_validation_is_not_augmented() -> None:
    plain, other = digits(augment="none"), digits(augment="randaugment", random_erasing=1.0)
    assert torch.equal(plain.validation[(-1, 3)].image, other.validation[(-1, 3)].image)


def test_an_erased_part_has_the_mean(image_task: Dataset) -> None:
    image = image_task.train[(0, 0)].image
    mean = torch.tensor([round(value) for value in image_task.mean]).view(-1, 1, 1)
    share = float((image == mean).all(0).float().mean())
    assert 0.02 <= share <= 0.34


@pytest.fixture
def image_task(tmp_path: Path) -> Dataset:
    """Two classes of noise as files, with a part erased."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(3):
            pixels = rng.integers(0, 256, (40, 40, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{number}.png")
    data = f"imagefolder:{tmp_path}/images"
    return open_dataset(DataConfig(data=data, image_size=32, random_erasing=1.0), seed=0)


@pytest.mark.parametrize(
    ("flags", "augment"),
    [
        ([], "flip"),
        (["--no-augment"], "none"),
        (["--augment", "--epochs", "3"], "flip"),
        (["--augment", "trivialaugment"], "trivialaugment"),
    ],
    ids=str,
)
def test_the_flags_of_before_still_mean_the_same(flags: list[str], augment: str) -> None:
    assert parse_config(flags, "x").data.augment == augment


def test_settings_of_before_still_mean_the_same() -> None:
    assert [from_flat({"augment": on}).data.augment for on in (True, False)] == ["flip", "none"]


def test_augmentation_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"change images of 8 bits, and fake:9 gives none"):
        open_dataset(DataConfig(data="fake:9", augment="randaugment"), seed=0)
    own = tmp_path / "floats.py"
    own.write_text(
        "import torch\n"
        "class Floats:\n"
        "    classes = ['a', 'b']\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, i): return torch.zeros(3, 8, 8), i % 2\n"
        "def floats(): return Floats(), Floats()\n"
    )
    with pytest.raises(ConfigError, match=r"--color-jitter change images of 8 bits"):
        open_dataset(DataConfig(data=f"{own}:floats", color_jitter=0.1), seed=0)
    assert open_dataset(DataConfig(data=f"{own}:floats"), seed=0).train.augment is None


# Mixing


def mixed_step(
    step: int, accumulate: int = 1, world_size: int = 1, **settings: Any
) -> tuple[Tensor, Tensor]:
    """All images and targets of one step, in the order of its images."""
    config = DataConfig(**settings)
    task = open_dataset(config, seed=0)
    mixer = make_mixer(config, task, seed=0)
    split = {"accumulate": accumulate, "world_size": world_size}
    order = Order(len(task.train), 64, seed=0, pairs=True, **split)
    whole = Order(len(task.train), 64, seed=0, pairs=True).step(step)[1].tolist()
    images: dict[int, tuple[Tensor, Tensor]] = {}
    for rank in range(world_size):
        keys = TrainBatches(order, step, step + 1, rank)
        loader = make_loader(task.train, keys, 0, 2, pin_memory=False, mixer=mixer)
        device = torch.device("cpu")
        batches = DeviceBatches(
            loader, task, device, torch.contiguous_format, lambda broken: None, mixer
        )
        for micro, asked in zip(batches, keys, strict=True):
            indices = [index for _, index in asked.keys]
            images |= dict(zip(indices, zip(micro.inputs, micro.targets, strict=True), strict=True))
    rows = [images[index] for index in whole]
    return torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows])


@pytest.mark.parametrize("split", [(4, 1), (1, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("step", [0, 22])
def test_mixing_does_not_depend_on_how_a_step_is_split(step: int, split: tuple[int, int]) -> None:
    """Step 22 is the short last one of an epoch."""
    whole = mixed_step(step, mixup=0.4, cutmix=1.0)
    parts = mixed_step(step, *split, mixup=0.4, cutmix=1.0)
    assert torch.equal(whole[0], parts[0])
    assert torch.equal(whole[1], parts[1])


@pytest.mark.parametrize(
    ("settings", "theirs"),
    [({"mixup": 0.5}, v2.MixUp), ({"cutmix": 1.0}, v2.CutMix)],
    ids=["mixup", "cutmix"],
)
def test_a_pair_is_mixed_as_torchvision_does_it(settings: dict[str, float], theirs: Any) -> None:
    """Its `roll` by one swaps the two of a batch of two; its numbers are given."""
    task = digits()
    mixer = Mixer(DataConfig(**settings), task, seed=0)
    images, labels = torch.randn(2, 1, 8, 8), torch.tensor([3, 7])
    for index in range(20):
        drawn = mixer.draw([(0, index), (0, 99)])
        ours = mixer.mix(images, labels, drawn)
        transform = theirs(num_classes=10)
        params = {
            "labels": labels,
            "batch_size": 2,
            "lam": float(drawn.share[0]),
            "lam_adjusted": float(drawn.share[0]),
            "box": tuple(drawn.box[0].tolist()),
        }
        expected = [transform.transform(part, params) for part in (images, labels)]
        torch.testing.assert_close(ours[0], expected[0])
        torch.testing.assert_close(ours[1], expected[1])


def test_shares_follow_what_is_seen_and_sum_to_one() -> None:
    mixer = Mixer(DataConfig(cutmix=1.0), digits(), seed=0)
    images = torch.stack([torch.zeros(1, 8, 8), torch.ones(1, 8, 8)])
    shares = []
    for index in range(200):
        mixed, targets = mixer.mix(images, torch.tensor([0, 1]), mixer.draw([(0, index), (0, 0)]))
        torch.testing.assert_close(mixed.mean((1, 2, 3)), targets[:, 1])
        torch.testing.assert_close(targets.sum(1), torch.ones(2))
        shares.append(float(targets[0, 0]))
    assert len(set(shares)) > 8
    both = Mixer(DataConfig(cutmix=1.0, mixup=1.0), digits(), seed=0)
    drawn = [both.draw([(0, index), (0, 0)]) for index in range(200)]
    assert 60 < sum(float(draw.blend[0]) == 1 for draw in drawn) < 140  # half and half


def test_label_smoothing_and_mixed_labels_go_together() -> None:
    logits, labels = torch.randn(4, 10), torch.tensor([1, 2, 3, 4])
    loss = make_loss(OptimConfig(label_smoothing=0.1), digits(), torch.device("cpu"))
    hot = nn.functional.one_hot(labels, 10).float()
    torch.testing.assert_close(loss(logits, hot), loss(logits, labels))


def test_an_unreadable_image_takes_its_pair_along() -> None:
    class Hole:
        def __init__(self, images: Any) -> None:
            self.images = images

        def __getitem__(self, key: tuple[int, int]) -> Any:
            sample = self.images[key]
            return sample._replace(label=-1, broken=("x",)) if key[1] == 2 else sample

    task = digits()
    mixer = Mixer(DataConfig(mixup=0.2), task, seed=0)
    order = Order(len(task.train), 8, seed=0, pairs=True)
    keys = order.micro_batches(0)[0]._replace(keys=[(0, index) for index in range(6)])
    batch = BatchReader(Hole(task.train), mixer)[keys]  # type: ignore[arg-type]
    assert batch.mixes is not None
    assert (
        batch.labels.tolist() == collate([task.train[(0, i)] for i in (0, 1, 4, 5)]).labels.tolist()
    )
    assert_same(list(batch.mixes), list(mixer.draw([(0, 0), (0, 1), (0, 4), (0, 5)])))
    assert batch.broken == ("x",)


@pytest.mark.parametrize("images", range(40, 60))
def test_a_split_parts_no_pair(images: int) -> None:
    order = Order(images, 24, seed=0, accumulate=2, world_size=3, pairs=True)
    for step in range(order.steps_per_epoch):
        of_step = order.step(step)[1].tolist()
        pairs = {tuple(of_step[i : i + 2]) for i in range(0, len(of_step), 2)}
        parts = [order.micro_batches(step, rank) for rank in range(3)]
        for part in (part for rank in parts for part in rank):
            indices = [index for _, index in part.keys]
            assert 2 <= len(indices) <= 4
            assert {tuple(indices[i : i + 2]) for i in range(0, len(indices), 2)} <= pairs


def test_mixing_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs to be an even number there, such as 12 in all"):
        Order(100, 9, seed=0, accumulate=3, pairs=True)
    task = digits()
    with pytest.raises(ConfigError, match="--mixup mixes labels, and digits has one class"):
        Mixer(DataConfig(mixup=0.1), replace(task, classes=("one",)), seed=0)
    with pytest.raises(ConfigError, match=r"those of digits are of 1×1. Use --mixup"):
        Mixer(DataConfig(cutmix=0.1), replace(task, shape=(64, 1, 1)), seed=0)


# Schedules


def rates(total: int, **settings: Any) -> list[float]:
    config = OptimConfig(**{"lr": 0.4, "warmup_epochs": 2.0, **settings})
    schedule = make_schedule(config, steps_per_epoch=4, total=total)
    return [schedule.rate(step) for step in range(total)]


def torch_rates(kind: Any, total: int, **settings: Any) -> list[float]:
    optimizer = SGD([torch.zeros(1)], lr=0.4, momentum=0.9)
    scheduler = kind(optimizer, **settings)
    found = []
    for _ in range(total):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_one_cycle_is_that_of_torch() -> None:
    theirs = torch_rates(OneCycleLR, 40, max_lr=0.4, total_steps=41)
    assert rates(41, schedule="one-cycle")[:40] == pytest.approx(theirs)


def test_step_is_that_of_torch_after_the_warm_up() -> None:
    theirs = torch_rates(StepLR, 40, step_size=12, gamma=0.5)
    ours = rates(40, schedule="step", lr_step_epochs=3, lr_gamma=0.5)
    assert ours[8:] == pytest.approx(theirs[8:])
    assert ours[:8] == rates(40)[:8]  # the warm-up of the cosine
    thirds = rates(36, schedule="step")
    assert [thirds[step] for step in (11, 12, 23, 24, 35)] == pytest.approx(
        [0.4, 0.04, 0.04, 0.004, 0.004]
    )


def test_constant_stays_after_the_warm_up() -> None:
    ours = rates(40, schedule="constant")
    assert ours[:8] == rates(40)[:8]
    assert set(ours[8:]) == {0.4}


def test_a_warm_up_has_no_part_in_one_cycle() -> None:
    with pytest.raises(ConfigError, match="--warmup-epochs 1 has no part in --schedule one-cycle"):
        OptimConfig(schedule="one-cycle", warmup_epochs=1.0)


# Early stop

STANDS = {"lr": 1e-9, "freeze": True, "epochs": 6, "augment": "none", "early_stop_patience": 2}
"""A run in which no epoch is better than the first."""


@pytest.mark.usefixtures("mlp")
def test_a_run_ends_early_and_says_so_when_started_again(
    make_config: Make, messages: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(**STANDS)
    assert train(config) == 0
    result = json.loads((config.run_dir / "result.json").read_text())
    assert (result["epochs"], result["stopped_early"], result["best_epoch"]) == (3, True, 1)
    assert [record["epoch"] for record in records(config, "epoch")] == [1, 2, 3]
    assert any(text.startswith("Ended early at step 36: 2 epochs without a") for text in messages)
    assert train(config) == 0
    assert "is finished at step 36: there is nothing to train" in capsys.readouterr().out
    assert json.loads((config.run_dir / "result.json").read_text()) == result


@pytest.mark.usefixtures("mlp")
def test_a_run_stopped_on_the_way_ends_early_at_the_same_step(make_config: Make) -> None:
    whole = run_to(make_config(name="whole", **STANDS), 99)
    for step in (5, 24, 30):
        assert not run_to(make_config(**STANDS), step).done  # type: ignore[attr-defined]
    part = run_to(make_config(**STANDS), 99)
    assert part.done  # type: ignore[attr-defined]
    assert part.state.progress.step == 36
    assert_same(everything(part), everything(whole))


@pytest.mark.usefixtures("mlp")
def test_more_patience_continues_as_if_it_had_been_so_from_the_start(make_config: Make) -> None:
    whole = run_to(make_config(name="whole", **{**STANDS, "early_stop_patience": 4}), 99)
    assert train(make_config(**STANDS)) == 0
    more = make_config(**{**STANDS, "early_stop_patience": 4})
    assert finished(more, torch.device("cpu")) == []
    part = run_to(more, 99)
    assert part.state.progress.step == 60
    assert_same(everything(part), everything(whole))
    with pytest.raises(ConfigError, match="is finished, and its settings were others"):
        assert train(make_config(**STANDS, max_steps=100, name="whole")) == 0


@pytest.mark.usefixtures("mlp")
def test_a_run_that_gets_better_does_not_end_early(make_config: Make) -> None:
    config = make_config(epochs=4, early_stop_patience=3)
    assert train(config) == 0
    result = json.loads((config.run_dir / "result.json").read_text())
    assert (result["epochs"], result["stopped_early"]) == (4, False)


# Class weights


def test_balanced_weights_are_those_of_scikit_learn_with_a_mean_of_one() -> None:
    labels = np.array([0] * 6 + [1] * 3 + [3])
    weights = balanced_weights(labels, 4)
    assert weights.tolist() == pytest.approx([10 / 18, 10 / 9, 0.0, 10 / 3])
    assert float(weights[torch.tensor(labels)].mean()) == pytest.approx(1.0)


@pytest.mark.parametrize("split", [(1, 1), (4, 1), (2, 2), (1, 4)], ids=str)
@pytest.mark.parametrize("mixed", [False, True], ids=["labels", "shares"])
def test_a_weighted_step_does_not_depend_on_how_it_is_split(
    split: tuple[int, int], mixed: bool
) -> None:
    """Loss and gradient of the parts, weighted as a step weighs them and averaged over the ranks as
    DDP does, are those of all images at once; also in a short last step of uneven parts."""
    torch.manual_seed(1)
    weights = torch.tensor([0.2, 1.0, 5.0])
    linear = nn.Linear(4, 3).double()
    images = torch.randn(27, 4, dtype=torch.float64)
    labels = torch.randint(3, (27,))
    targets = torch.rand(27, 3, dtype=torch.float64).softmax(1) if mixed else labels
    logp = (linear(images).log_softmax(1) * weights.double()).neg()
    hot = targets if mixed else nn.functional.one_hot(labels, 3).double()
    whole = ((0.9 * hot + 0.1 / 3) * logp).sum(1).mean()
    (expected,) = torch.autograd.grad(whole, [linear.weight])

    order = Order(27 + 32, 32, seed=0, accumulate=split[0], world_size=split[1])
    position = {int(index): row for row, index in enumerate(order.step(1)[1])}
    loss = torch.zeros(())
    for rank in range(split[1]):
        for part in order.micro_batches(1, rank):
            rows = [position[index] for _, index in part.keys]
            one = weighted_cross_entropy(
                linear(images[rows]), targets[rows], weights=weights.double(), smoothing=0.1
            )
            loss = loss + one * part.loss_weight / split[1]
    (found,) = torch.autograd.grad(loss, [linear.weight])
    torch.testing.assert_close(loss, whole)
    torch.testing.assert_close(found, expected)


def test_class_weights_of_unknown_labels_are_refused() -> None:
    task = open_dataset(DataConfig(data="fake:9"), seed=0)
    with pytest.raises(ConfigError, match=r"counts the labels, and fake:9 does not tell them"):
        make_loss(OptimConfig(class_weights="balanced"), task, torch.device("cpu"))


# Gradient checkpointing


def vit() -> nn.Module:
    model = torchvision.models.VisionTransformer(
        image_size=16, patch_size=8, num_layers=3, num_heads=2, hidden_dim=16, mlp_dim=32,
        dropout=0.3, num_classes=5,
    )  # fmt: skip
    nn.init.normal_(model.heads[-1].weight)  # which torchvision sets to 0, and all gradients so
    return model


MODELS = {
    "blocks of ResNet": (lambda: torchvision.models.resnet18(num_classes=5), 32),
    "blocks of ViT": (vit, 16),
    "a chain of layers": (lambda: SmallCNN(3, 5), 8),
}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_and_statistics_are_those_without_checkpointing(name: str) -> None:
    build, size = MODELS[name]
    outcomes = []
    for again in (False, True):
        torch.manual_seed(0)
        model = build()
        if again:
            assert checkpoint_gradients(model) >= 2
        kept = 0

        def keep(tensor: Tensor) -> Tensor:
            nonlocal kept
            kept += tensor.numel()
            return tensor

        for _ in range(2):
            images = torch.randn(4, 3, size, size)
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                loss = model(images).square().mean()
            loss.backward()
        gradients = {key: value.grad for key, value in model.named_parameters()}
        outcomes.append((gradients, dict(model.named_buffers()), loss.detach(), kept))
    assert_same(outcomes[0][:3], outcomes[1][:3])  # bit for bit, with dropout and BatchNorm
    assert outcomes[1][3] < outcomes[0][3]


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="--grad-checkpointing finds no blocks in this model"):
        checkpoint_gradients(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="--grad-checkpointing and --compile do not go together"):
        from_flat({"grad_checkpointing": True, "compile": True})


# All of it, continued

EXACT: list[tuple[dict[str, Any], list[int]]] = [
    ({"augment": "randaugment", "random_erasing": 0.5, "color_jitter": 0.4}, [7]),
    ({"augment": "trivialaugment", "schedule": "one-cycle", "workers": 2}, [5, 13]),
    ({"mixup": 0.2, "cutmix": 1.0, "accumulate": 2, "schedule": "step"}, [3, 12]),
    ({"class_weights": "balanced", "schedule": "constant"}, [8]),
    ({"loss": "bce", "schedule": "step", "lr_step_epochs": 1, "precision": "fp32"}, [8]),
    ({"grad_checkpointing": True, "precision": "bf16", "ema_decay": 0.9}, [9]),
]


@pytest.mark.parametrize(("settings", "stops"), EXACT, ids=[str(case[0]) for case in EXACT])
def test_a_run_that_is_stopped_ends_as_the_one_that_is_not(
    settings: dict[str, Any], stops: list[int], make_config: Make
) -> None:
    """Also over a step that is skipped."""
    spoil = frozenset({4})
    whole = run_to(make_config(name="whole", epochs=2, **settings), 99, spoil=spoil)
    for step in stops:
        with closing(run_to(make_config(epochs=2, **settings), step, spoil=spoil).feed):
            pass
    part = run_to(make_config(epochs=2, **settings), 99, spoil=spoil)
    assert part.done  # type: ignore[attr-defined]
    assert_same(everything(part), everything(whole))


VERIFIED = [
    "--augment randaugment --random-erasing 0.2 --color-jitter 0.2 --mixup 0.2 --cutmix 1 "
    "--schedule one-cycle --early-stop-patience 3 --class-weights balanced --grad-checkpointing",
    "--augment trivialaugment --loss bce --schedule step --lr-step-epochs 1 --precision fp32",
]


@pytest.mark.parametrize("flags", VERIFIED)
def test_verify_resume_takes_all_of_them_at_once(tmp_path: Path, flags: str) -> None:
    """--schedule constant is in test_verify.py."""
    flags += " --max-steps 24 --num-workers 1"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "amptrain", "verify-resume", "--device", "cpu"),
            *("--runs", str(tmp_path), *flags.split()),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The same, bit for bit" in done.stdout
