"""Several labels an image: what a table of them is, the loss, what a validation counts, a run that
continues, and its model in use."""

import csv
import io
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from amptrain.cli import main
from amptrain.config import DataConfig, OptimConfig, TrainConfig, from_flat
from amptrain.data.datasets import Dataset, open_dataset
from amptrain.data.loader import DeviceBatches, make_loader
from amptrain.data.mixing import Mixer
from amptrain.data.order import Order, ValidationBatches
from amptrain.distributed import Processes
from amptrain.errors import ConfigError
from amptrain.inference.model_file import BEST, LAST, read_info
from amptrain.inference.multilabel import average_precision
from amptrain.loss import make_loss
from amptrain.precision import resolve_precision
from amptrain.step import MicroBatch
from amptrain.train import train
from amptrain.validate import validate
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, one_hot

from .support import Make, records
from .test_distributed import run as run_alone
from .test_distributed import torchrun
from .test_resume import assert_same, everything, run_to

CPU = torch.device("cpu")
COLOURS = ("red", "green", "blue")
SETS = [[], ["red"], ["green"], ["blue", "red"], ["green", "red"], ["blue", "green", "red"]]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images that are bright in the channels of their labels, with two tables of them."""
    root = tmp_path_factory.mktemp("several")
    rng = np.random.default_rng(0)
    rows = []
    for number in range(60):
        labels, split = SETS[number % len(SETS)], "val" if number >= 48 else "train"
        pixels = rng.integers(0, 90, (16, 16, 3), dtype=np.uint8)
        for label in labels:
            pixels[..., COLOURS.index(label)] += 120
        Image.fromarray(pixels).save(root / f"{number}.png")
        rows.append((f"{number}.png", labels, split))
    lines = [f"{path},{'|'.join(labels) or '|'},{split}" for path, labels, split in rows]
    (root / "list.csv").write_text("\n".join(["path,label,split", *lines]) + "\n")
    objects = [{"path": path, "label": labels, "split": split} for path, labels, split in rows]
    (root / "list.jsonl").write_text("".join(json.dumps(each) + "\n" for each in objects))
    return root


def settings(root: Path, **more: Any) -> dict[str, Any]:
    return {
        **{"data": f"table:{root}/list.csv", "loss": "bce", "image_size": 16, "batch_size": 12},
        **{"model": "small_cnn", "num_workers": 0, "precision": "fp32", **more},
    }


def opened(file: Path, **more: Any) -> Dataset:
    return open_dataset(DataConfig(data=f"table:{file}", image_size=16, **more), seed=0)


def table(root: Path, text: str, ending: str = "csv") -> Path:
    """A file beside the images."""
    file = root / f"made.{ending}"
    file.write_text(text)
    return file


def hot(labels: list[str], classes: tuple[str, ...]) -> list[float]:
    return [float(name in labels) for name in classes]


# The data


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_several_labels_are_targets_of_zero_and_one(photos: Path, ending: str) -> None:
    task = opened(photos / f"list.{ending}")
    assert (task.classes, len(task.train)) == (("blue", "green", "red"), 48)
    loader = make_loader(task.validation, ValidationBatches(12, 5, 0, 1), 0, 2, pin_memory=False)
    batches = DeviceBatches(loader, task, CPU, torch.contiguous_format, lambda broken: None)
    for batch in batches:
        # What an image shows and what it is said to show are one: labels are not mixed up.
        bright = batch.inputs.mean((2, 3)).flip(1) > 0
        assert torch.equal(batch.targets, bright.float())
    told = " ".join(task.messages)
    assert "48 images of 3 classes, several or none to an image (blue 16, green 24, red 32)" in told


def test_the_parts_of_a_table_are_read_alike(photos: Path) -> None:
    """Spaces, an order and a name twice make no other set of labels."""
    text = "path,label\n0.png,red | blue\n1.png,blue|red\n2.png,red|red|blue\n3.png,red\n"
    task = opened(table(photos, text), val_fraction=0.25)
    assert task.label_sets is not None
    assert task.label_sets.tolist() == [[True, True], [False, True]]
    assert len(task.train) + len(task.validation) == 4
    assert len(task.validation) == 1  # a quarter of all, and not of each set
    assert any("25% of the images are held out" in text for text in task.messages)


def test_images_are_held_out_where_each_has_other_labels(photos: Path) -> None:
    """Of each set of labels there is one, which a share of each set would leave in training."""
    text = "path,label\n0.png,red|blue\n1.png,red\n2.png,|\n3.png,blue\n"
    task = opened(table(photos, text), val_fraction=0.5)
    assert (len(task.train), len(task.validation)) == (2, 2)


def test_labels_are_part_of_what_the_data_is(photos: Path) -> None:
    """Also where other labels change no order and no class."""
    end = "1.png,red|blue,train\n2.png,red,train\n3.png,red|blue,val\n"
    first, second = (
        opened(table(photos, f"path,label,split\n0.png,{label},train\n{end}"))
        for label in ("blue", "|")
    )
    names = [[task.train.files.name(i) for i in range(3)] for task in (first, second)]  # type: ignore[attr-defined]
    assert names[0] == names[1]
    assert first.contents is not None
    assert second.contents is not None
    assert first.contents["train"] != second.contents["train"]
    assert first.contents["validation"] == second.contents["validation"]


def test_a_table_of_one_label_each_is_what_it_was(photos: Path) -> None:
    lists = "".join(
        json.dumps({"path": f"{n}.png", "label": [["a"], ["b"]][n % 2]}) + "\n" for n in range(8)
    )
    task = opened(table(photos, lists, "jsonl"))
    plain = "path,label\n" + "".join(f"{n}.png,{'ab'[n % 2]}\n" for n in range(8))
    other = opened(table(photos, plain))
    assert task.label_sets is None
    assert task.contents == other.contents
    assert task.train.labels is not None
    assert other.train.labels is not None
    assert task.train.labels.tolist() == other.train.labels.tolist()


@pytest.mark.parametrize(
    ("label", "sentence"),
    [
        ([["red"]], r"line 1: the labels are \[\[\"red\"\]\]; they need to be a list of names"),
        (["red", None], "they need to be a list of names or numbers"),
    ],
)
def test_labels_that_cannot_be_are_told(photos: Path, label: object, sentence: str) -> None:
    file = table(photos, json.dumps({"path": "0.png", "label": label}) + "\n", "jsonl")
    with pytest.raises(ConfigError, match=sentence):
        opened(file)


def test_a_label_only_in_validation_is_refused(photos: Path) -> None:
    text = "path,label,split\n0.png,red|blue,train\n1.png,red|black,val\n"
    with pytest.raises(ConfigError, match="the labels black are only in lines to validate with"):
        opened(table(photos, text))


def test_other_labels_of_the_same_files_are_noticed(photos: Path, make_config: Make) -> None:
    before = (photos / "list.csv").read_text()
    file = photos / "changing.csv"
    file.write_text(before)
    asked = settings(photos, data=f"table:{file}", max_steps=2)
    assert train(make_config(**asked)) == 0
    file.write_text(before.replace("1.png,red,", "1.png,green|red,", 1))
    with pytest.raises(ConfigError, match=r"48 with other names or labels.* Put them back"):
        train(make_config(**{**asked, "max_steps": 4}))
    single = "".join(
        f"{line.split(',')[0]},{['red', 'green', 'blue'][n % 3]},{line.split(',')[2]}\n"
        for n, line in enumerate(before.splitlines()[1:])
    )
    file.write_text("path,label,split\n" + single)
    with pytest.raises(ConfigError, match="one of each image at one time, several or none at"):
        train(make_config(**{**asked, "max_steps": 4}))


# What does not go together


def test_what_cannot_be_is_refused(photos: Path, tmp_path: Path) -> None:
    task = opened(photos / "list.csv")
    with pytest.raises(ConfigError, match=r"takes one of each. Add --loss bce"):
        make_loss(OptimConfig(), task, CPU)
    with pytest.raises(ConfigError, match="--class-weights balanced weighs an image by its one"):
        OptimConfig(loss="bce", class_weights="balanced")
    with pytest.raises(ConfigError, match="loss is 'mse'; it needs to be one of cross-entropy"):
        from_flat({"loss": "mse"})
    own = tmp_path / "own.py"
    own.write_text(
        "import torch\n"
        "class Own:\n"
        "    classes = ['a', 'b']\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, i): return torch.zeros(3, 8, 8), LABEL\n"
        "LABEL = 1\n"
        "def ints(): return Own(), Own()\n"
        "def lists(): global LABEL; LABEL = [0, 1]; return ints()\n"
        "def hots(): global LABEL; LABEL = torch.ones(2); return ints()\n"
    )
    assert open_dataset(DataConfig(data=f"{own}:ints"), seed=0).train[(0, 0)].label == 1
    for function in ("lists", "hots"):
        with pytest.raises(
            ConfigError, match=r"Item 0 of your data set has the label .*--data tab"
        ):
            open_dataset(DataConfig(data=f"{own}:{function}"), seed=0)


def test_a_run_does_not_change_its_loss(photos: Path, make_config: Make) -> None:
    run_to(make_config(), 3)
    with pytest.raises(ConfigError, match=r"other settings: loss cross-entropy → bce"):
        train(make_config(loss="bce"))


# The loss


def test_the_loss_is_that_of_torch() -> None:
    task = open_dataset(DataConfig(), seed=0)
    logits, labels = 9 * torch.randn(6, 10), torch.randint(10, (6,))
    plain = make_loss(OptimConfig(loss="bce", label_smoothing=0.0), task, CPU)
    targets = one_hot(labels, 10).float()
    theirs = nn.BCEWithLogitsLoss()
    assert torch.equal(plain(logits, labels), theirs(logits, targets))
    several = (torch.rand(6, 10) < 0.4).float()
    assert torch.equal(plain(logits, several), theirs(logits, several))
    smooth = make_loss(OptimConfig(loss="bce", label_smoothing=0.1), task, CPU)
    expected = theirs(logits, torch.where(several == 1, 0.95, 0.05))
    torch.testing.assert_close(smooth(logits, several), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_loss_is_computed_in_fp32_under_autocast(dtype: torch.dtype) -> None:
    loss = make_loss(OptimConfig(loss="bce"), open_dataset(DataConfig(), seed=0), CPU)
    logits, labels = torch.randn(6, 10).to(dtype), torch.randint(10, (6,))
    with torch.autocast("cpu", dtype=dtype):
        found = loss(logits, labels)
    assert found.dtype == torch.float32
    assert torch.equal(found, loss(logits.float(), labels))
    assert torch.isfinite(loss(torch.full((1, 10), 6e4, dtype=dtype), labels[:1]))


@pytest.mark.parametrize("split", [(4, 1), (2, 2), (1, 4)], ids=str)
def test_a_step_does_not_depend_on_how_it_is_split(split: tuple[int, int]) -> None:
    """Loss and gradient of the parts, weighted as a step weighs them and averaged over the ranks as
    DDP does, are those of all images at once; also in a short last step of uneven parts."""
    linear = nn.Linear(4, 3)
    images, targets = torch.randn(27, 4), (torch.rand(27, 3) < 0.4).float()
    whole = binary_cross_entropy_with_logits(linear(images), 0.9 * targets + 0.05)
    (expected,) = torch.autograd.grad(whole, [linear.weight])
    task = open_dataset(DataConfig(), seed=0)
    loss_fn = make_loss(OptimConfig(loss="bce", label_smoothing=0.1), task, CPU)
    order = Order(27 + 32, 32, seed=0, accumulate=split[0], world_size=split[1])
    position = {int(index): row for row, index in enumerate(order.step(1)[1])}
    loss = torch.zeros(())
    for rank in range(split[1]):
        for part in order.micro_batches(1, rank):
            rows = [position[index] for _, index in part.keys]
            one = loss_fn(linear(images[rows]), targets[rows])
            loss = loss + one * part.loss_weight / split[1]
    (found,) = torch.autograd.grad(loss, [linear.weight])
    torch.testing.assert_close(loss, whole)
    torch.testing.assert_close(found, expected)


def test_sets_of_labels_are_mixed_as_images_are(photos: Path) -> None:
    task = opened(photos / "list.csv")
    mixer = Mixer(DataConfig(mixup=1.0), task, seed=0)
    images = torch.stack([torch.zeros(3, 16, 16), torch.ones(3, 16, 16)])
    targets = torch.tensor([[0.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    drawn = mixer.draw([(0, 5), (0, 6)])
    mixed, shares = mixer.mix(images, targets, drawn)
    seen = mixed[:, 0, 0, 0]
    expected = torch.stack([seen, torch.ones(2), 1 - seen], dim=1)
    torch.testing.assert_close(shares, expected)


# What a validation counts


class Said(nn.Module):
    """Gives its input, the logits."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs


def judged(logits: Tensor, targets: Tensor, parts: int, **more: Any) -> tuple[float, float] | None:
    batches = [
        MicroBatch(inputs=x, targets=y, loss_weight=1.0, last=True)
        for x, y in zip(logits.chunk(parts), targets.chunk(parts), strict=True)
    ]
    processes = Processes("cpu")
    precision = resolve_precision(from_flat({"precision": "fp32"}).precision, CPU)
    found = validate(
        Said(), precision, batches, max_batches=parts, processes=processes,
        stop_asked=lambda: False, **more,
    )  # fmt: skip
    return None if found is None else (found.loss, found.accuracy)


@pytest.mark.parametrize("parts", [1, 3])
def test_micro_f1_counts_all_images_and_classes_together(parts: int) -> None:
    """A mean of the F1 of batches, or of classes, is another number."""
    targets = torch.tensor([[1, 0], [1, 1], [0, 0], [0, 1], [1, 0], [0, 0]]).float()
    logits = torch.tensor([[3, -1], [2, -2], [1, -1], [-1, 2], [-3, 1], [0, -1]]).float()
    # TP 3 (rows 0, 1, 3), FP 3 (rows 2, 4, 5; 0 is a probability of 0.5), FN 2 (rows 1, 4)
    found = judged(logits, targets, parts, loss="bce")
    loss = binary_cross_entropy_with_logits(logits.double(), targets.double())
    assert found == (pytest.approx(float(loss)), pytest.approx(2 * 3 / (2 * 3 + 3 + 2)))


def test_a_model_that_tells_nothing_has_an_f1_of_0() -> None:
    nothing = torch.full((2, 2), -1.0)
    assert judged(nothing, torch.ones(2, 2), 1, loss="bce")[1] == 0  # type: ignore[index]
    assert judged(nothing, torch.zeros(2, 2), 1, loss="bce")[1] == 0  # type: ignore[index]


def test_one_label_an_image_is_judged_by_the_likeliest_class() -> None:
    logits, labels = torch.tensor([[-1.0, -2.0], [3.0, 2.0], [0.0, 1.0]]), torch.tensor([0, 1, 1])
    found = judged(logits, labels, 1, loss="bce")
    loss = binary_cross_entropy_with_logits(logits, one_hot(labels, 2).float())
    assert found == (pytest.approx(float(loss)), pytest.approx(2 / 3))


def test_average_precision_is_the_sum_over_all_thresholds() -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        scores = rng.integers(0, 6, 15).astype(np.float32)  # with equal ones
        there = rng.random(15) < 0.4
        there[0] = True
        expected, recall_before = 0.0, 0.0
        for threshold in sorted(set(scores.tolist()), reverse=True):
            above = scores >= threshold
            recall = (there & above).sum() / there.sum()
            expected += (recall - recall_before) * (there & above).sum() / above.sum()
            recall_before = recall
        assert average_precision(scores, there) == pytest.approx(expected)
    assert np.isnan(average_precision(np.zeros(3, np.float32), np.zeros(3, dtype=bool)))


# A run


CONTINUED = [
    {"mixup": 0.4, "cutmix": 1.0, "accumulate": 2, "ema_decay": 0.9},
    {"workers": 1, "augment": "trivialaugment", "precision": "bf16"},
]


@pytest.mark.parametrize("more", CONTINUED, ids=str)
def test_a_run_that_is_stopped_ends_as_the_one_that_is_not(
    photos: Path, make_config: Make, more: dict[str, Any]
) -> None:
    """Also over a step that is skipped."""
    asked, spoil = settings(photos, epochs=3, **more), frozenset({4})
    whole = run_to(make_config(**asked, name="whole"), 99, spoil=spoil)
    for step in (3, 6):
        with closing(run_to(make_config(**asked), step, spoil=spoil).feed):
            pass
    part = run_to(make_config(**asked), 99, spoil=spoil)
    assert part.done  # type: ignore[attr-defined]
    assert_same(everything(part), everything(whole))


def test_two_processes_train_and_judge_as_one(
    photos: Path, make_config: Make, tmp_path: Path
) -> None:
    """FP32, SGD, no BatchNorm: up to rounding. With accumulation, and short last batches."""
    own = tmp_path / "plain.py"
    own.write_text(
        "from torch import nn\n"
        "def net(num_classes, in_channels):\n"
        "    layers = nn.Linear(768, 16), nn.ReLU(), nn.Linear(16, num_classes)\n"
        "    return nn.Sequential(nn.Flatten(), *layers)\n"
    )
    plain = {"optimizer": "sgd", "lr": 0.02, "epochs": 2, "batch_size": 20, "log_every": 1}
    asked = settings(photos, **{**plain, "model": f"{own}:net", "augment": "none"})
    one, two = make_config(name="one", **asked), make_config(name="two", accumulate=2, **asked)
    assert train(one) == 0
    done = run_alone(torchrun(two, num_workers=0))
    assert done.returncode == 0, done.stderr
    for kind, name in (("window", "loss"), ("epoch", "val_loss"), ("epoch", "val_accuracy")):
        first, second = ([record[name] for record in records(of, kind)] for of in (one, two))
        assert second == pytest.approx(first, rel=1e-5)
    assert 0 < records(one, "epoch")[0]["val_accuracy"] < 1


@pytest.mark.usefixtures("mlp")
def test_bce_takes_one_label_an_image_and_continues(make_config: Make) -> None:
    asked = {"loss": "bce", "cutmix": 1.0, "accumulate": 2, "epochs": 4}
    whole = run_to(make_config(name="whole", **asked), 99)
    run_to(make_config(**asked), 5)
    part = run_to(make_config(**asked), 99)
    assert_same(everything(part), everything(whole))
    assert whole.state.progress.accuracy > 0.5
    assert records(make_config(name="whole"), "epoch")[-1]["measure"] == "accuracy"


@pytest.fixture(scope="module")
def run(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A run that has learned the colours."""
    place = {"name": "run", "runs": tmp_path_factory.mktemp("runs"), "device": "cpu"}
    config = from_flat({**place, **settings(photos, epochs=12, label_smoothing=0.0, lr=0.01)})
    assert train(config) == 0
    return config


def test_a_run_says_what_it_counts(run: TrainConfig) -> None:
    last = records(run, "epoch")[-1]
    assert last["measure"] == "micro-F1"
    assert last["val_accuracy"] > 0.9
    result = json.loads((run.run_dir / "result.json").read_text())
    assert (result["measure"], result["accuracy"]) == ("micro-F1", last["val_accuracy"])
    info = read_info(run.run_dir / LAST)
    assert (info.loss, info.metrics["micro-F1"]) == ("bce", last["val_accuracy"])


def test_predict_gives_the_labels_and_each_class_by_itself(
    run: TrainConfig, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.png").write_bytes(b"nothing")  # first: the header does not come from it
    images = [str(photos / f"{48 + number}.png") for number in range(len(SETS))]
    words = ["predict", str(run.run_dir), str(tmp_path / "a.png"), *images, "--device", "cpu"]
    capsys.readouterr()
    assert main(words) == 1
    told = capsys.readouterr()
    assert "micro-F1" in told.err
    broken, *rows = csv.DictReader(io.StringIO(told.out))
    assert "cannot identify" in broken["error"]
    assert [row["labels"] for row in rows] == ["|".join(sorted(labels)) for labels in SETS]
    assert main([*words, "--format", "json"]) == 1
    for labels, answer in zip(SETS, json.loads(capsys.readouterr().out)[1:], strict=True):
        probabilities = {each["class"]: each["probability"] for each in answer["predictions"]}
        assert len(probabilities) == 3
        assert {name for name, value in probabilities.items() if value >= 0.5} == set(labels)
        assert answer["labels"] == sorted(labels)
    assert sum(probabilities.values()) > 1.5  # no softmax: all three are there


def test_evaluate_tells_each_class_and_the_mean_average_precision(
    run: TrainConfig, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["evaluate", str(run.run_dir), "--device", "cpu", "--out", str(tmp_path / "out")]
    assert main([*words, "--data", f"table:{photos}/list.jsonl", "--batch-size", "5"]) == 0
    assert "mean average precision" in capsys.readouterr().out
    values = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    metrics = read_info(run.run_dir / BEST).metrics
    assert values["micro_f1"] == pytest.approx(metrics["micro-F1"])
    assert values["loss"] == pytest.approx(metrics["loss"], rel=1e-4)
    assert values["per_class"]["red"]["images"] == 8
    mean = np.mean([of["average_precision"] for of in values["per_class"].values()])
    assert values["mean_average_precision"] == pytest.approx(mean)
    assert mean > 0.9


def test_a_model_of_one_label_is_not_judged_by_several(
    photos: Path, make_config: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "path,label\n" + "".join(f"{n}.png,{COLOURS[n % 3]}\n" for n in range(12))
    config = make_config(
        **settings(photos, data=f"table:{table(photos, text)}", loss="cross-entropy", max_steps=1)
    )
    assert train(config) == 0
    words = ["evaluate", str(config.run_dir), "--device", "cpu", "--data"]
    assert main([*words, f"table:{photos}/list.csv"]) == 2
    assert "Judge it on such images, or train with --loss bce" in capsys.readouterr().err
