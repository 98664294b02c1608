"""`--parallel fsdp`: the same training as ddp, shared out, on two ranks of a CPU."""

import json
import os
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from amptrain.checkpoint.store import CheckpointStore
from amptrain.cli import main
from amptrain.config import PrecisionConfig, TrainConfig, from_flat
from amptrain.distributed import Processes
from amptrain.errors import ConfigError
from amptrain.inference.model_file import load_model
from amptrain.memory import out_of_memory
from amptrain.model import weights_sha256
from amptrain.precision import resolve_precision
from amptrain.sharding import shard
from amptrain.train import train
from torch import nn

from .support import records
from .test_distributed import TORCHRUN, run, torchrun
from .test_resume import run_to

Make = Callable[..., TrainConfig]
ROOT = Path(__file__).parents[2]
MODELS = Path(__file__).with_name("blocky.py")
PLAIN = {"model": f"{MODELS}:without_dropout"}


def settings(folder: Path, name: str, **others: object) -> TrainConfig:
    same = {"runs": folder, "device": "cpu", "epochs": 2, "batch_size": 128, "precision": "fp32"}
    same |= {"accumulate": 2, "clip_norm": 0.5, "model": f"{MODELS}:blocky"}
    return from_flat({**same, "name": name, **others})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of fsdp_ranks.py, which all tests here look at."""
    folder = tmp_path_factory.mktemp("fsdp")
    run_to(settings(folder, "from-one", **PLAIN), 5)
    arguments = [*TORCHRUN, "-m", "tests.training.fsdp_ranks", str(folder)]
    done = subprocess.run(
        arguments,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "log").write_text(done.stdout)
    assert "Warning" not in done.stderr
    return folder


@pytest.fixture(scope="module")
def seen(folder: Path) -> list[dict[str, Any]]:
    """Of rank 0 and rank 1."""
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture
def config_of(folder: Path) -> Make:
    """The settings of a run in `folder`."""

    return partial(settings, folder)


def state_of(config: TrainConfig) -> dict[str, Any]:
    loaded = CheckpointStore(config.run_dir / "checkpoints").load_latest()
    assert loaded is not None
    return loaded.state


def result(config: TrainConfig) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((config.run_dir / "result.json").read_text())
    return found


def assert_close(one: Any, other: Any, *, exact: bool = False) -> None:
    """The weights and the optimizer's values of two checkpoints."""
    limit = 0.0 if exact else 1e-4
    assert one["model"].keys() == other["model"].keys()
    for name, weight in one["model"].items():
        torch.testing.assert_close(other["model"][name], weight, rtol=limit, atol=limit / 10)
    states = [state["optimizer"]["state"] for state in (one, other)]
    assert states[0].keys() == states[1].keys()
    for index, values in states[0].items():
        for name, value in values.items():
            torch.testing.assert_close(states[1][index][name], value, rtol=limit, atol=limit / 10)


def test_losses_and_weights_are_those_of_ddp(config_of: Make) -> None:
    """FP32 over two epochs, with dropout, accumulation and clipping; what differs is the order of
    sums, to 1e-5 of a loss."""
    one, other = config_of("ddp"), config_of("fsdp", parallel="fsdp")
    for kind, name in (("window", "loss"), ("window", "grad_norm"), ("epoch", "val_loss")):
        values = [[record[name] for record in records(c, kind)] for c in (one, other)]
        assert values[1] == pytest.approx(values[0], rel=1e-5)
    assert_close(state_of(one), state_of(other))
    assert result(one)["accuracy"] == result(other)["accuracy"]


def test_each_rank_holds_its_part(seen: list[dict[str, Any]], folder: Path) -> None:
    held = [rank["ddp_and_fsdp"] for rank in seen]
    whole = held[0]["whole"]
    assert sum(rank["own"] for rank in held) == whole
    for rank in held:
        assert 0.45 * whole < rank["own"] < 0.55 * whole
        assert rank["exp_avg"] == rank["exp_avg_sq"] == rank["own"]
    assert (
        "Parameters, gradients and optimizer values are shared out (FSDP) by 2 blocks and the "
        f"rest: this process holds {held[0]['own']:,} of {whole:,} elements."
    ) in (folder / "log").read_text()


def test_stopped_and_continued_is_bit_for_bit_the_same(config_of: Make) -> None:
    one, other = config_of("fsdp"), config_of("stopped")
    assert_close(state_of(one), state_of(other), exact=True)
    assert result(one)["weights_sha256"] == result(other)["weights_sha256"]


KILLED = """
import os, signal, sys
from amptrain import cli
from amptrain.train import Trainer

train_step = Trainer._train_step
def step(self, number):
    if number == 10 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    train_step(self, number)

Trainer._train_step = step
sys.exit(cli.run(cli.train, sys.argv[1:]))
"""


def test_killed_and_started_again_is_bit_for_bit_the_same(tmp_path: Path, config_of: Make) -> None:
    """Both ranks by SIGKILL, between two checkpoints; torchrun starts them again."""
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    config = config_of("killed", parallel="fsdp", save_every=3)
    arguments = torchrun(config, str(script))
    arguments.insert(len(TORCHRUN), "--max-restarts=1")
    done = run(arguments, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")  # as docs/torchrun.md says
    assert done.returncode == 0, done.stderr
    assert "Continuing at step 9 of 24" in done.stdout
    assert result(config)["weights_sha256"] == result(config_of("fsdp"))["weights_sha256"]


def test_model_file_is_whole(config_of: Make) -> None:
    config = config_of("fsdp")
    model, info, _ = load_model(config.run_dir / "model.safetensors", own=f"{MODELS}:blocky")
    assert weights_sha256(model) == result(config)["weights_sha256"]
    assert info.step == result(config)["steps"]


def test_checkpoints_go_from_fsdp_to_one_process_and_back(
    folder: Path, config_of: Make, messages: list[str]
) -> None:
    """Both are the run that stays in one process, to rounding."""
    whole, begun_by_two = config_of("whole", **PLAIN), config_of("from-fsdp", **PLAIN)
    begun_by_one = config_of("from-one", **PLAIN)
    for config in (whole, begun_by_two):
        assert train(config) == 0
    assert any("Changed since the checkpoint: parallel fsdp → ddp" in text for text in messages)
    assert "Changed since the checkpoint: parallel ddp → fsdp" in (folder / "log").read_text()
    for config in (begun_by_two, begun_by_one):
        assert_close(state_of(whole), state_of(config))


def test_head_alone_is_trained_from_given_weights(seen: list[dict[str, Any]]) -> None:
    kept = seen[0]["head_trained"]
    assert {name for name, is_kept in kept.items() if not is_kept} == {"4.weight", "4.bias"}
    assert len(kept) == 16
    assert seen[1]["head_trained"] == kept


def test_gradient_checkpointing_is_the_same_step(config_of: Make) -> None:
    assert_close(state_of(config_of("fsdp")), state_of(config_of("recomputed")), exact=True)


def test_bf16_computes_in_bf16_and_keeps_fp32(seen: list[dict[str, Any]]) -> None:
    kept = {name: ["torch.float32"] for name in ("parameters", "gradients", "optimizer")}
    inside = {"weight": "torch.bfloat16", "output": "torch.bfloat16", "is_whole": "True"}
    for rank in seen:
        assert rank["bf16"] == kept | inside


def test_blocks_with_batch_norm_are_gathered_in_fp32(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        assert rank["batch_norm"]["weight"] == "torch.float32"
        assert rank["batch_norm"]["output"] == "torch.bfloat16"


def test_fp16_scales_and_keeps_fp32(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        assert rank["fp16"]["output"] == rank["fp16"]["weight"] == "torch.float16"
        assert rank["fp16"]["gradients"] == ["torch.float32"]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_what_one_rank_finds_infinite_all_skip(precision: str, seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        found = rank["skipped"][precision]
        assert found == {"optimizer_steps": 3, "moved": [True, False, True], "finite": True}


def test_each_rank_tells_what_it_sees_of_a_collapse(seen: list[dict[str, Any]]) -> None:
    texts = [rank["collapsed"] for rank in seen]
    assert all(text.startswith("Stopped at step 3: 2 steps skipped in a row") for text in texts)
    assert "The input of this process is finite; the gradient of 1.weight is not." in texts[0]
    assert "The input is not finite: " in texts[1]


def test_rank_without_images_validates_along(seen: list[dict[str, Any]]) -> None:
    assert seen[0]["few"] == seen[1]["few"] >= 0


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"ema_decay": 0.9}, "--parallel fsdp and --ema-decay do not go together"),
        ({"compile": True}, "--parallel fsdp and --compile do not go together"),
        ({"find_unused_parameters": True}, "--find-unused-parameters is a setting of"),
        ({"optimizer": "sgd"}, "--parallel fsdp has no fused SGD"),
    ],
)
def test_what_does_not_go_together_is_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        from_flat({"parallel": "fsdp", **settings})


def test_a_parameter_without_a_dimension_is_refused() -> None:
    model = nn.Linear(2, 2)
    model.register_parameter("scale", nn.Parameter(torch.ones(())))
    precision = resolve_precision(PrecisionConfig(precision="fp32"), torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"and scale has none: give it the shape \(1,\)"):
        shard(model, precision, Processes("cpu"))


def test_find_batch_is_asked_without(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["find-batch", "--parallel", "fsdp"]) == 2
    assert "--parallel fsdp shares nothing out. Leave it out." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("parallel", "world", "told"), [("ddp", 2, 1), ("ddp", 1, 0), ("fsdp", 2, 0)]
)
def test_where_memory_ran_out_fsdp_is_told_of(parallel: str, world: int, told: int) -> None:
    text = str(out_of_memory(MemoryError(), from_flat({"parallel": parallel}), world))
    assert text.count("--parallel fsdp shares parameters") == told
