"""The same command continues: bit for bit, or with a sentence about what changed, or not at all."""

import math
import random
import signal
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from amptrain.checkpoint.resume import (
    check_changes,
    check_world_size,
    rng_state,
    seed_all,
    set_rng_state,
)
from amptrain.config import TrainConfig
from amptrain.distributed import Processes
from amptrain.errors import ConfigError
from amptrain.model import weights_sha256
from amptrain.precision import precision_name
from amptrain.signals import StopSignal
from amptrain.train import Trainer, train

from .support import Spoiled, lines_of, records

Make = Callable[..., TrainConfig]
pytestmark = pytest.mark.usefixtures("mlp")


class StopAt(StopSignal):
    """SIGTERM that comes when the run is at `step`; in the validation after it, if `validating`."""

    def __init__(self, step: int, validating: bool = False) -> None:
        self.step, self.validating = step, validating
        self.trainer: Trainer | None = None
        super().__init__()

    @property  # type: ignore[override]
    def number(self) -> int | None:
        if self.trainer is None or self.trainer.state.progress.step < self.step:
            return None
        owed = self.trainer._validation_due()
        return signal.SIGTERM if owed == self.validating else None

    @number.setter
    def number(self, value: int | None) -> None:
        pass


def run_to(
    config: TrainConfig,
    step: int,
    validating: bool = False,
    spoil: frozenset[int] = frozenset(),
    device: str = "cpu",
) -> Trainer:
    """Start or continue a run, and stop it at `step`."""
    config.run_dir.mkdir(parents=True, exist_ok=True)
    stop = StopAt(step, validating)
    trainer = Spoiled(config, Processes(device), stop)
    trainer.steps = spoil
    stop.trainer = trainer
    trainer.done = trainer.fit()  # type: ignore[attr-defined]
    trainer.feed.close()
    return trainer


def everything(trainer: Trainer) -> dict[str, Any]:
    """All of the state but times, and settings that differ on purpose."""
    state = trainer.state.state_dict()
    progress = {**asdict(trainer.state.progress), "seconds": 0}
    return {
        **state,
        "config": {},
        "progress": progress,
        "weights": weights_sha256(trainer.state.model),
    }


def assert_same(one: Any, other: Any, path: str = "state") -> None:
    """Equal bit for bit, through dicts and lists."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), path
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_same(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), path
        for number, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, path=f"{path}[{number}]")
    else:
        assert one == other or (math.isnan(one) and math.isnan(other)), path


EXACT: list[tuple[dict[str, Any], list[dict[str, Any]], list[int]]] = [
    # settings, changes without influence at each continuation, steps at which the run is stopped
    ({}, [{}], [7]),
    ({"accumulate": 4, "ema_decay": 0.99}, [{"workers": 2}, {"workers": 1, "prefetch": 3}], [5, 6]),
    ({"optimizer": "sgd", "lr": 0.1, "save_every": 3}, [{"log_every": 3}, {"keep": 3}], [12, 13]),
    ({"precision": "fp16", "growth_interval": 4, "workers": 1}, [{"workers": 0}], [9]),
    ({"precision": "fp32", "clip_norm": 0.5, "fused": False}, [{}], [1]),
]


@pytest.mark.parametrize(
    ("settings", "changes", "stops"), EXACT, ids=[str(case[0]) for case in EXACT]
)
def test_continued_is_bit_for_bit_the_run_never_stopped(
    settings: dict[str, Any], changes: list[dict[str, Any]], stops: list[int], make_config: Make
) -> None:
    """Weights, EMA, optimizer, scaler, generators: with augmentation, dropout, other workers, a
    skipped step."""
    spoil = frozenset({4, 8}) if settings.get("precision") == "fp16" else frozenset()
    whole = run_to(make_config(name="whole", epochs=2, **settings), 99, spoil=spoil)
    for number, step in enumerate(stops):
        more = changes[number - 1] if number else {}
        part = run_to(make_config(epochs=2, **{**settings, **more}), step, spoil=spoil)
        assert not part.done  # type: ignore[attr-defined]
        assert part.state.progress.step == step
    part = run_to(make_config(epochs=2, **{**settings, **changes[-1]}), 99, spoil=spoil)
    assert part.done  # type: ignore[attr-defined]
    assert_same(everything(part), everything(whole))
    epochs = [
        [(r["step"], r["val_loss"], r["skips"]) for r in records(t.config, "epoch")]
        for t in (whole, part)
    ]
    assert epochs[0] == epochs[1]


def test_stopped_in_a_validation_the_next_run_makes_up_for_it(make_config: Make) -> None:
    whole = run_to(make_config(name="whole", epochs=2), 99)
    part = run_to(make_config(epochs=2), 12, validating=True)
    assert not part.done  # type: ignore[attr-defined]
    assert records(part.config, "epoch") == []
    part = run_to(make_config(epochs=2), 99)
    assert_same(everything(part), everything(whole))
    assert [r["step"] for r in records(part.config, "epoch")] == [12, 24]


@pytest.mark.parametrize("stopped", [True, False], ids=["stopped", "killed"])
def test_the_log_has_no_hole_and_nothing_twice(stopped: bool, make_config: Make) -> None:
    """Each line is that of the run which was never stopped. Killed, a run has logged more than it
    saved; it did so here at steps 7, 12 (with the line of the epoch), 13 and 16."""
    settings = {"precision": "fp16", "epochs": 2, "log_every": 5, "save_every": 2}
    spoil = frozenset({4, 6, 8, 16})
    whole = run_to(make_config(name="whole", **settings), 99, spoil=spoil)
    for step in (7, 7, 12, 13, 16):
        part = run_to(make_config(**settings), step, spoil=spoil)
        assert lines_of(part.config.run_dir)[-1]["step"] == step
        if not stopped:
            newest = max((part.config.run_dir / "checkpoints").glob("step-*.pt"))
            assert newest.stem == f"step-{step:09}"
            newest.unlink()
    part = run_to(make_config(**settings), 99, spoil=spoil)
    lines = lines_of(part.config.run_dir)
    assert lines == lines_of(whole.config.run_dir)
    assert [line["step"] for line in lines] == [5, 10, 12, 12, 15, 20, 24, 24]
    assert sum(len(line.get("skipped_steps", [])) for line in lines) == len(spoil)


def test_a_window_is_shared_out_to_another_number_of_processes(make_config: Make) -> None:
    """The mean loss stays."""
    run_to(make_config(log_every=5), 2)
    state = Trainer(make_config(log_every=5), Processes("cpu"), StopSignal()).state
    one = asdict(state.window)
    assert state.window.steps == 2
    assert state._own_window([one]) == state.window
    saved = [{**one, "losses": 3.0}, {**one, "losses": 5.0}]
    assert asdict(state._own_window(saved)) == {**one, "losses": 4.0}


def test_a_change_in_the_warm_up_tells_of_no_jump_of_the_rate(
    make_config: Make, messages: list[str]
) -> None:
    """There the rate doubles from step to step, by the schedule."""
    run_to(make_config(precision="fp32", label_smoothing=0.1), 1)
    run_to(make_config(precision="fp32", label_smoothing=0.2), 2)
    assert any("Changed since the checkpoint: label_smoothing" in text for text in messages)
    assert not any("learning rate jumps" in text for text in messages)


def test_skips_in_a_row_are_counted_over_a_stop(make_config: Make) -> None:
    part = run_to(make_config(), 3, spoil=frozenset({1, 2}))
    assert part.state.progress.consecutive_skips == 2
    again = Trainer(make_config(), Processes("cpu"), StopSignal())
    assert again.state.progress.consecutive_skips == 2
    assert again.state.progress.optimizer_steps == 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"batch_size": 64}, "batch_size 128 → 64"),
        ({"seed": 1}, "seed 0 → 1"),
        ({"optimizer": "sgd"}, "optimizer adamw → sgd"),
        ({"augment": False}, "augment flip → none"),
        ({"ema_decay": 0.9}, "ema_decay None → 0.9"),
    ],
)
def test_changes_that_make_the_checkpoint_meaningless_are_refused(
    change: dict[str, Any], text: str, make_config: Make
) -> None:
    run_to(make_config(), 2)
    with pytest.raises(ConfigError, match="This run was started with other settings") as caught:
        train(make_config(**change))
    assert text in str(caught.value)


def test_other_changes_are_announced_and_take_effect(
    make_config: Make, messages: list[str]
) -> None:
    run_to(make_config(), 2)
    trainer = run_to(make_config(lr=0.5, weight_decay=0.0, epochs=2), 3)
    [text] = [text for text in messages if text.startswith("Changed")]
    assert "lr 0.005 → 0.5" in text
    assert "weight_decay 0.05 → 0.0" in text
    assert "epochs 1 → 2" in text
    assert {group["weight_decay"] for group in trainer.state.optimizer.param_groups} == {0.0}
    assert trainer.in_flight.lr > 0.01


def test_changes_without_influence_are_not_announced(
    make_config: Make, messages: list[str]
) -> None:
    run_to(make_config(), 2)
    run_to(make_config(workers=1, log_every=5), 3)
    assert not [text for text in messages if text.startswith("Changed")]


@pytest.mark.parametrize(
    ("before", "after"), [("fp16", "bf16"), ("bf16", "fp16"), ("bf16", "fp32")]
)
def test_a_changed_precision_is_announced(
    before: str, after: str, make_config: Make, messages: list[str]
) -> None:
    run_to(make_config(precision=before), 2)
    trainer = run_to(make_config(precision=after), 4)
    assert any(
        text.startswith(f"The precision changes from {before} to {after} (") for text in messages
    )
    assert trainer.state.precision.name == after
    assert trainer.state.progress.optimizer_steps == 4


def test_auto_that_means_the_same_is_no_change(make_config: Make, messages: list[str]) -> None:
    run_to(make_config(precision=precision_name("auto", torch.device("cpu"))), 2)
    run_to(make_config(precision="auto"), 3)
    assert not [text for text in messages if "hange" in text]


def test_the_loss_scale_continues(make_config: Make) -> None:
    first = run_to(make_config(precision="fp16"), 3, spoil=frozenset({0, 1}))
    assert first.state.precision.state_dict()["scale"] == 2.0**14
    again = Trainer(make_config(precision="fp16"), Processes("cpu"), StopSignal())
    assert again.state.precision.state_dict() == first.state.precision.state_dict()
    assert again.state.precision.state_dict()["_growth_tracker"] == 1


def test_settings_of_the_check_are_settings() -> None:
    from amptrain.checkpoint.resume import MAY_DIFFER, MUST_MATCH
    from amptrain.config import flatten

    assert set(flatten(TrainConfig())) >= MUST_MATCH | MAY_DIFFER
    assert check_changes(flatten(TrainConfig()), flatten(TrainConfig())) == []


def test_a_changed_number_of_processes_is_announced_or_refused() -> None:
    assert check_world_size(2, 2, saved_steps=5, steps=5) == []
    [text] = check_world_size(2, 4, saved_steps=5, steps=5)
    assert text.startswith("The checkpoint is of 2 processes, this run of 4.")
    with pytest.raises(ConfigError, match="With 4 an epoch has 4 steps in place of 5"):
        check_world_size(2, 4, saved_steps=5, steps=4)


def test_generators_continue() -> None:
    def draw() -> tuple[float, float, float]:
        return float(torch.rand(())), random.random(), float(np.random.rand())

    cpu = torch.device("cpu")
    seed_all(3, rank=0)
    np.random.randn()  # leaves a second number waiting
    state = rng_state(cpu)
    first = (draw(), float(np.random.randn()))
    set_rng_state(state, cpu)
    assert (draw(), float(np.random.randn())) == first
    seed_all(3, rank=1)
    assert draw() != first[0]
