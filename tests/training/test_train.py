"""Whole runs: what they reach, what they do about skipped steps, how they end."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from amptrain.cli import main
from amptrain.config import flatten, load_yaml
from amptrain.errors import TrainingError
from amptrain.precision import has_bf16
from amptrain.step import PendingOutcome
from amptrain.train import Trainer, train

from .support import Make, records, spoiled, trainer_of


def test_digits_reaches_98_percent_and_says_how(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the defaults, as a user starts it."""
    assert main(["train", "--device", "cpu", "--runs", str(tmp_path)]) == 0
    run = tmp_path / "digits-small_cnn-auto"
    result = json.loads((run / "result.json").read_text())
    assert result["accuracy"] >= 0.98
    precision = "bf16" if has_bf16(torch.device("cpu")) else "fp32"
    assert (result["precision"], result["torch"]) == (precision, torch.__version__)
    assert result["steps"] == 12 * 23
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert re.search(r"accuracy 9[89]\.\d\d%|accuracy 100", last)
    assert re.search(r"in \d+\.\d s, \d+ images/s", last)
    assert f"precision {precision} (" in last
    assert load_yaml(run / "config.yaml").optim.epochs == 12


@pytest.mark.usefixtures("mlp")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_loss_falls_in_each_precision(precision: str, make_config: Make) -> None:
    config = make_config(precision=precision, epochs=8, log_every=6)
    assert train(config) == 0
    windows = records(config, "window")
    assert windows[-1]["loss"] < 0.6 * windows[0]["loss"]
    assert windows[0]["scale"] == (2.0**16 if precision == "fp16" else 1.0)
    assert records(config, "epoch")[-1]["val_accuracy"] > 0.8


@pytest.mark.usefixtures("mlp")
@pytest.mark.parametrize(
    "settings", [{}, {"optimizer": "sgd", "lr": 0.1}, {"fused": False}], ids=str
)
def test_a_skip_freezes_the_schedule_and_is_counted_and_named(
    settings: dict[str, object], make_config: Make, messages: list[str]
) -> None:
    """Learning rates are those of the run without skips, shifted by them; fused optimizers too
    (accelerate#4242)."""
    config = make_config(precision="fp16", log_every=1, **settings)
    plain = make_config(precision="fp16", log_every=1, name="plain", **settings)
    trainer = spoiled(config, {0, 3, 4})
    assert trainer.fit()
    assert train(plain) == 0
    rates = [window["lr"] for window in records(plain, "window")]
    skipping = records(config, "window")
    assert [window["lr"] for window in skipping] == [
        rates[i] for i in (0, 0, 1, 2, 2, *range(2, 9))
    ]
    assert [window["step"] for window in skipping if window["skips"]] == [1, 4, 5]
    assert [window["scale"] for window in skipping][:6] == [
        2.0**15,
        2.0**15,
        2.0**15,
        2.0**14,
        2.0**13,
        2.0**13,
    ]
    assert records(config, "epoch")[0]["skips"] == 3
    progress = trainer.state.progress
    assert (progress.step, progress.optimizer_steps, progress.epoch_skips) == (12, 9, 0)
    said = [text for text in messages if "skipped: " in text]
    assert said[1] == (
        "Step 4 skipped: the gradient of 1.weight is not finite; loss scale 32768 → 16384."
    )
    assert len(said) == 3
    assert json.loads((config.run_dir / "result.json").read_text())["skipped_steps"] == 3


@pytest.mark.usefixtures("mlp")
def test_frequent_skips_give_the_advice_once(make_config: Make, messages: list[str]) -> None:
    assert spoiled(make_config(precision="fp16", log_every=4), {0, 1, 2, 4, 5, 6}).fit()
    advice = [text for text in messages if "lower loss scale" in text]
    assert len(advice) == 1
    assert "--init-scale 16384 (2**14) or 4096 (2**12)" in advice[0]


@pytest.mark.usefixtures("mlp")
def test_rare_skips_give_no_advice(make_config: Make, messages: list[str]) -> None:
    assert spoiled(make_config(precision="fp16", log_every=4), {0, 5}).fit()
    assert not [text for text in messages if "lower loss scale" in text]


def all_finite(trainer: Trainer) -> bool:
    return all(
        bool(torch.isfinite(value).all()) for value in trainer.state.model.state_dict().values()
    )


@pytest.mark.usefixtures("mlp")
def test_the_scale_cannot_collapse(make_config: Make) -> None:
    trainer = spoiled(make_config(precision="fp16", min_scale=2.0**10), range(1, 12))
    with pytest.raises(
        TrainingError,
        match=r"loss scale fell to 512, below --min-scale 1024. The input is not finite: 1 of",
    ):
        trainer.fit()
    assert all_finite(trainer)
    assert trainer.state.progress.step == 8  # the outcome of step 8 is read within step 9


@pytest.mark.usefixtures("mlp")
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_skips_in_a_row_stop_the_run(precision: str, make_config: Make) -> None:
    trainer = spoiled(make_config(precision=precision, max_consecutive_skips=3), {1, 2, 4, 5, 6})
    with pytest.raises(
        TrainingError, match=r"at step 7: 3 steps skipped in a row .* The input is not finite"
    ):
        trainer.fit()
    assert all_finite(trainer)


@pytest.mark.usefixtures("mlp")
def test_diagnosis_of_an_activation(make_config: Make) -> None:
    trainer = trainer_of(make_config(precision="fp16", max_consecutive_skips=2))
    with torch.no_grad():
        trainer.state.model.get_parameter("1.bias").fill_(65504.0)
        trainer.state.model.get_parameter("1.weight").abs_().mul_(100.0)
    with pytest.raises(
        TrainingError, match=r"The activation of layer 1 is not finite: it exceeds 6.55e\+04"
    ):
        trainer.fit()


def test_diagnosis_of_a_weight(make_config: Make) -> None:
    trainer = trainer_of(make_config(max_consecutive_skips=2))
    with torch.no_grad():
        trainer.state.model.get_parameter("classifier.1.bias").fill_(math.nan)
    with pytest.raises(TrainingError, match=r"The weight classifier\.1\.bias is not finite"):
        trainer.fit()


def test_diagnosis_of_a_gradient(make_config: Make) -> None:
    trainer = trainer_of(make_config(max_consecutive_skips=2))
    trainer.state.model.get_parameter("classifier.1.bias").register_hook(
        lambda gradient: gradient * math.inf
    )
    with pytest.raises(
        TrainingError, match=r"activations are finite; the gradient of classifier\.1\.bias is not"
    ):
        trainer.fit()


@pytest.mark.usefixtures("mlp")
def test_a_validation_that_is_not_finite_ends_the_run_and_is_not_saved(make_config: Make) -> None:
    """Weights that blow up in the last step of an epoch, after which no gradient is looked at."""
    config = make_config(lr=1e30, warmup_epochs=0.0, max_steps=3, save_every=1)
    trainer = trainer_of(config)
    with pytest.raises(
        TrainingError,
        match=r"the validation loss is (nan|inf), .*Continue from them with --name run and a lower",
    ):
        trainer.fit()
    assert not (config.run_dir / "checkpoints" / "step-000000003.pt").exists()


@pytest.mark.usefixtures("mlp")
def test_one_outcome_is_read_for_each_step_and_not_before_the_next_is_queued(
    make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop's only wait: within the step after, when that one's forward and backward pass are
    queued."""
    events: list[str] = []
    read, batches = PendingOutcome.read, Trainer._micro_batches

    def reading(self: PendingOutcome) -> object:
        events.append("read")
        return read(self)

    def queueing(self: Trainer, step: int):  # type: ignore[no-untyped-def]
        events.append("queue")
        yield from batches(self, step)

    monkeypatch.setattr(PendingOutcome, "read", reading)
    monkeypatch.setattr(Trainer, "_micro_batches", queueing)
    assert train(make_config(log_every=100, precision="fp16")) == 0
    assert events == ["queue", *["queue", "read"] * 11, "read"]


def never_training(model: torch.nn.Module) -> None:
    """No dropout, and BatchNorm with its first statistics."""
    model.eval()
    model.train = lambda mode=True: model  # type: ignore[method-assign]


def test_accumulation_trains_the_same_model(make_config: Make) -> None:
    """With a last step of 29 images in an epoch; without BatchNorm and dropout, whose numbers are
    of a micro-batch."""
    trainers = []
    for name, accumulate in (("whole", 1), ("parts", 4)):
        trainer = trainer_of(
            make_config(
                name=name, accumulate=accumulate, precision="fp32", optimizer="sgd", lr=0.05
            )
        )
        never_training(trainer.parallel)
        assert trainer.fit()
        trainers.append(trainer)
    for one, other in zip(*(trainer.state.model.parameters() for trainer in trainers), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    assert records(trainers[1].config, "window")[-1]["loss"] == pytest.approx(
        records(trainers[0].config, "window")[-1]["loss"], rel=1e-3
    )


def test_validation_is_under_the_same_autocast(make_config: Make) -> None:
    trainer = trainer_of(make_config(precision="bf16", max_steps=1))
    dtypes: set[tuple[bool, torch.dtype]] = set()
    trainer.state.model.get_submodule("classifier.1").register_forward_hook(
        lambda module, inputs, output: dtypes.add((module.training, output.dtype))
    )
    assert trainer.fit()
    assert dtypes == {(True, torch.bfloat16), (False, torch.bfloat16)}


def test_ema_is_what_is_validated(make_config: Make) -> None:
    config = make_config(ema_decay=0.999, epochs=2)
    trainer = trainer_of(config)
    assert trainer.fit()
    assert trainer.state.ema is not None
    trainer.state.ema = None
    trainer.state.progress.validated_step = 0
    with_ema = records(config, "epoch")[-1]["val_loss"]
    assert trainer._end_epoch()
    assert records(config, "epoch")[-1]["val_loss"] != with_ema


def test_fake_data_is_made_on_the_device_and_any_torchvision_model_trains(
    make_config: Make,
) -> None:
    config = make_config(
        data="fake:8", image_size=32, model="mobilenet_v3_small", batch_size=4, optimizer="sgd"
    )
    trainer = trainer_of(config)
    assert trainer.fit()
    weight = trainer.state.model.get_parameter("features.0.0.weight")
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert trainer.in_flight.images.is_contiguous(memory_format=torch.channels_last)
    assert trainer.in_flight.images.shape == (4, 3, 32, 32)


def test_compile_keeps_the_names_of_weights(
    make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place: no `_orig_mod.` in checkpoints. That compiling computes the same is torch's
    affair."""
    compiled: list[object] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compiled.append(self))  # noqa: PLW0108
    trainer = trainer_of(make_config(compile=True, max_steps=1))
    assert compiled == [trainer.state.model]
    assert not [name for name in trainer.state.model.state_dict() if "_orig_mod" in name]


def test_the_saved_settings_are_those_of_the_run(make_config: Make) -> None:
    config = make_config(lr=0.02, image_size=48, max_steps=1)
    assert train(config) == 0
    assert flatten(load_yaml(config.run_dir / "config.yaml")) == flatten(config)
