"""Metrics of one's own (--metrics), and which of all tells the best epoch (--eval-metric)."""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from amptrain import cli
from amptrain.checkpoint.state import progress_of
from amptrain.checkpoint.store import CheckpointStore
from amptrain.config import DataConfig, TrainConfig, from_flat
from amptrain.data.datasets import open_dataset
from amptrain.distributed import Processes
from amptrain.errors import ConfigError, TrainingError
from amptrain.inference.model_file import read_info
from amptrain.metrics import OwnMetrics, is_better, metrics_of_all
from amptrain.precision import resolve_precision
from amptrain.step import MicroBatch
from amptrain.train import train
from amptrain.validate import Validation, validate
from torch import nn

from .support import records
from .test_distributed import run, torchrun

Make = Callable[..., TrainConfig]

LABELS = int(open_dataset(DataConfig(), 0).validation.labels.sum())  # type: ignore[union-attr]
"""Of the validation images, whose labels are added up."""
COUNTS = """
def metrics(logits, targets):
    right = (logits.argmax(1) == targets).float().mean()
    return {"images": len(targets), "right": right, "labels": targets.sum()}
"""
SCRIPTED = """
epochs = iter({values})

def metrics(logits, targets):
    return {{"score": next(epochs)}}
"""


@pytest.fixture
def own(tmp_path: Path) -> Callable[[str], str]:
    """`file.py:metrics` of this code."""

    def write(code: str) -> str:
        path = tmp_path / f"own{len(list(tmp_path.glob('own*.py')))}.py"
        path.write_text(code)
        return f"{path}:metrics"

    return write


def result_of(config: TrainConfig) -> dict[str, object]:
    found: dict[str, object] = json.loads((config.run_dir / "result.json").read_text())
    return found


@pytest.mark.usefixtures("mlp")
def test_they_stand_wherever_the_accuracy_stands(
    make_config: Make, own: Callable[[str], str], messages: list[str]
) -> None:
    config = make_config(metrics=own(COUNTS))
    assert train(config) == 0
    (record,) = records(config, "epoch")
    expected = {"images": 360, "right": pytest.approx(record["val_accuracy"]), "labels": LABELS}
    assert {name: record[name] for name in expected} == expected
    assert result_of(config)["metrics"] == expected
    for name in ("model.safetensors", "best.safetensors"):
        metrics = read_info(config.run_dir / name).metrics
        assert {name: metrics[name] for name in expected} == expected
    assert any(f"right {record['right']:.4f}, labels {LABELS}.0000" in text for text in messages)
    tensorboard = b"".join(path.read_bytes() for path in config.run_dir.glob("tensorboard/*"))
    assert b"validation/right" in tensorboard


def test_evaluate_tells_them_too(
    make_config: Make, own: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(max_steps=2)
    assert train(config) == 0
    words = ["evaluate", str(config.run_dir), "--data", "digits", "--metrics", own(COUNTS)]
    assert cli.main(words) == 0
    assert "images 360.0000, right 0." in capsys.readouterr().out
    found = json.loads((config.run_dir / "evaluation/evaluation.json").read_text())
    assert found["metrics"]["right"] == pytest.approx(found["top1"])
    assert found["metrics"]["labels"] == LABELS


def test_of_several_processes_each_image_is_counted_once(
    make_config: Make, own: Callable[[str], str]
) -> None:
    """However long rank 0 computes, the others wait."""
    code = COUNTS + "\nimport time; slow = metrics\ndef metrics(*given):\n    time.sleep(1)\n"
    config = make_config(metrics=own(code + "    return slow(*given)\n"), max_steps=2)
    done = run(torchrun(config, metrics=config.optim.metrics))
    assert done.returncode == 0, done.stderr
    (record,) = records(config, "epoch")
    assert (record["images"], record["labels"]) == (360, LABELS)
    assert record["right"] == pytest.approx(record["val_accuracy"])


def test_one_that_fails_ends_all_processes_by_a_sentence(
    make_config: Make, own: Callable[[str], str]
) -> None:
    name = own("def metrics(logits, targets):\n    return 1 / 0\n")
    config = make_config(max_steps=2)
    done = run(torchrun(config, metrics=name))
    assert done.returncode != 0
    assert done.stderr.count("failed: ZeroDivisionError: division by zero (/") == 2
    assert "line 2). Mend it, and run the same command again." in done.stderr


@pytest.mark.usefixtures("mlp")
def test_mended_the_same_command_goes_on_and_nothing_was_lost(
    make_config: Make, tmp_path: Path
) -> None:
    assert train(make_config(name="whole", epochs=2)) == 0
    path = tmp_path / "mine.py"
    path.write_text("def metrics(logits, targets):\n    raise ValueError('one class only')\n")
    config = make_config(epochs=2, metrics=f"{path}:metrics")
    with pytest.raises(TrainingError, match=r"ValueError: one class only .*line 2"):
        train(config)
    newest = CheckpointStore(config.run_dir / "checkpoints", 2).load_latest()
    assert newest is not None
    assert newest.step == 12
    path.write_text(COUNTS)
    assert train(config) == 0
    whole, part = result_of(make_config(name="whole")), result_of(config)
    assert part["weights_sha256"] == whole["weights_sha256"]
    assert [record["epoch"] for record in records(config, "epoch")] == [1, 2]


@pytest.mark.usefixtures("mlp")
@pytest.mark.parametrize(
    ("values", "best_epoch", "best_value"),
    [([0.1, 0.9, 0.5], 2, 0.9), ([-2, -1, -1], 2, -1), (["nan", -3, "nan"], 2, -3)],
)
def test_the_best_epoch_is_that_of_the_metric_asked_for(
    make_config: Make,
    own: Callable[[str], str],
    values: list[float],
    best_epoch: int,
    best_value: float,
) -> None:
    name = own(SCRIPTED.format(values=values))
    config = make_config(epochs=3, metrics=name, eval_metric="score")
    assert train(config) == 0
    result = result_of(config)
    assert (result["best_epoch"], result["best_value"]) == (best_epoch, best_value)
    assert result["eval_metric"] == "score"
    assert read_info(config.run_dir / "best.safetensors").epoch == best_epoch
    told = [record["score"] for record in records(config, "epoch")]
    assert told == [None if value == "nan" else value for value in values]


@pytest.mark.usefixtures("mlp")
def test_early_stop_follows_it(
    make_config: Make, own: Callable[[str], str], messages: list[str]
) -> None:
    name = own(SCRIPTED.format(values=[0.5, 0.5, 0.4, 0.6]))
    config = make_config(epochs=4, metrics=name, eval_metric="score", early_stop_patience=2)
    assert train(config) == 0
    assert result_of(config)["epochs"] == 3
    assert any(
        "2 epochs without a better validation score (--early-stop-patience) than 0.5000" in text
        for text in messages
    )


def test_of_the_loss_the_lowest_is_the_best() -> None:
    assert is_better("loss", 0.5, None)
    assert is_better("loss", 0.4, 0.5)
    assert not is_better("loss", 0.6, 0.5)
    assert is_better("accuracy", 0.6, 0.5)
    assert not is_better("accuracy", 0.5, 0.5)
    assert not is_better("auc", math.nan, None)


@pytest.mark.usefixtures("mlp")
def test_another_metric_than_before_needs_another_run(make_config: Make) -> None:
    """The best value so far would be compared with one of another kind."""
    config = make_config(epochs=2, max_steps=12)
    assert train(config) == 0
    (config.run_dir / "result.json").unlink()  # as if it had been killed before its end
    with pytest.raises(ConfigError, match=r"started with other settings: .*eval_metric accuracy"):
        train(make_config(epochs=2, eval_metric="loss"))


def test_a_checkpoint_from_before_knows_its_best() -> None:
    progress = progress_of({"step": 24, "best_accuracy": 0.75, "best_step": 12})
    assert (progress.best_value, progress.best_step, progress.metrics) == (0.75, 12, {})


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("metrics = 3\n", r"has no function 'metrics'"),
        ("def metrics(logits):\n    return {}\n", r"It is called with \(logits, targets\)\."),
        ("def metrics(logits, targets:\n", r"SyntaxError: '\(' was never closed \(own0.py, line 1"),
        ("import no_such_package\n", r"No module named 'no_such_package'"),
        ("\n1 / 0\n", r"ZeroDivisionError: division by zero \(.*own0.py, line 2\)\."),
    ],
)
def test_what_is_no_such_function_is_told_before_the_first_step(
    make_config: Make, own: Callable[[str], str], code: str, expected: str
) -> None:
    config = make_config(metrics=own(code))
    with pytest.raises(ConfigError, match=f"^--metrics .*{expected}"):
        train(config)


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ("0.5", r"returned float\. It needs to return names with one number each"),
        ("None", r"returned NoneType"),
        ("{'auc': 'high'}", r"returned 'high' as auc"),
        ("{'auc': targets.float()}", r"returned tensor\(.* as auc"),
        ("{'step': 3}", r"returned a value named step, which is another's name"),
        ("{'accuracy': 1.0}", r"returned a value named accuracy"),
    ],
)
def test_what_is_no_number_with_a_name_is_told(
    own: Callable[[str], str], returned: str, expected: str
) -> None:
    metrics = OwnMetrics(own(f"def metrics(logits, targets):\n    return {returned}\n"))
    with pytest.raises(TrainingError, match=expected):
        metrics([(torch.zeros(2, 3), torch.tensor([0, 1]))])


def test_a_name_that_is_not_returned_is_told() -> None:
    with pytest.raises(ConfigError, match=r"--eval-metric is auc; without --metrics"):
        from_flat({"eval_metric": "auc"})
    with pytest.raises(TrainingError, match=r"--eval-metric auc is not among .*: f1, recall\."):
        Validation(0.1, 0.9, {"f1": 0.5, "recall": 0.6}).value("auc")


def test_a_stop_does_not_wait_for_it(own: Callable[[str], str]) -> None:
    metrics = OwnMetrics(own("import time\n\ndef metrics(*given):\n    time.sleep(60)\n"))
    outputs = [(torch.zeros(2, 3), torch.tensor([0, 1]))]
    began = time.monotonic()
    assert metrics_of_all(metrics, outputs, Processes("cpu"), lambda: True) is None
    assert time.monotonic() - began < 30


def test_what_diverged_is_told_rather_than_that_a_metric_failed(own: Callable[[str], str]) -> None:
    part = MicroBatch(
        inputs=torch.full((2, 3), math.nan), targets=torch.tensor([0, 1]), loss_weight=1.0,
        last=True,
    )  # fmt: skip
    found = validate(
        nn.Identity(),
        resolve_precision(from_flat({"precision": "fp32"}).precision, torch.device("cpu")),
        [part],
        max_batches=1,
        processes=Processes("cpu"),
        stop_asked=lambda: False,
        metrics=OwnMetrics(own("def metrics(logits, targets):\n    raise ValueError('NaN')\n")),
    )
    assert found is not None
    assert math.isnan(found.loss)
