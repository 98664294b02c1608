"""What each of two ranks does for test_fsdp.py, all in one start: runs with ddp and with fsdp, and
what was seen in them, as JSON."""

import json
import math
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from amptrain.config import TrainConfig, from_flat
from amptrain.distributed import Processes
from amptrain.errors import TrainingError
from amptrain.inference.model_file import LAST, read_tensors
from amptrain.sharding import gathered, held
from amptrain.signals import StopSignal
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .support import Spoiled
from .test_resume import StopAt

FOLDER = Path(sys.argv[1])
PROCESSES = Processes("cpu")
SETTINGS = {"runs": FOLDER, "device": "cpu", "epochs": 2, "batch_size": 128}
MODELS = Path(__file__).with_name("blocky.py")
SETTINGS |= {"accumulate": 2, "clip_norm": 0.5, "model": f"{MODELS}:blocky"}


def config_of(name: str, **settings: object) -> TrainConfig:
    return from_flat({**SETTINGS, "name": name, **settings})


def trainer_of(config: TrainConfig, stop_at: int | None = None) -> Spoiled:
    """A run in this process group, stopped at a step."""
    config.run_dir.mkdir(parents=True, exist_ok=True)
    stop = StopSignal() if stop_at is None else StopAt(stop_at)
    trainer = Spoiled(config, PROCESSES, stop)
    if isinstance(stop, StopAt):
        stop.trainer = trainer
    return trainer


def run(config: TrainConfig, stop_at: int | None = None) -> Spoiled:
    trainer = trainer_of(config, stop_at)
    trainer.fit()
    trainer.feed.close()
    return trainer


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def ddp_and_fsdp() -> Any:
    """Losses and checkpoints are compared outside."""
    run(config_of("ddp", precision="fp32"))
    trainer = run(config_of("fsdp", precision="fp32", parallel="fsdp"))
    own, whole = held(trainer.state.model)
    states = trainer.state.optimizer.state.values()
    return {
        "own": own,
        "whole": whole,
        "exp_avg": sum(local(state["exp_avg"]).numel() for state in states),
        "exp_avg_sq": sum(local(state["exp_avg_sq"]).numel() for state in states),
    }


def stopped_and_continued() -> Any:
    """With checkpoints that are written meanwhile."""
    later = {"async_checkpoint": True, "save_every": 2}
    config = config_of("stopped", precision="fp32", parallel="fsdp", **later)
    run(config, stop_at=5)
    return run(config).state.progress.step


def begun_by_one() -> Any:
    """A run that one process began, and test_fsdp.py stopped."""
    config = config_of(
        "from-one", precision="fp32", parallel="fsdp", model=f"{MODELS}:without_dropout"
    )
    return run(config).state.progress.step


def begun_by_two() -> Any:
    config = config_of(
        "from-fsdp", precision="fp32", parallel="fsdp", model=f"{MODELS}:without_dropout"
    )
    return run(config, stop_at=5).state.progress.step


def head_trained() -> Any:
    """From the weights of an earlier run, all but the head frozen: which tensors are still its."""
    file = FOLDER / "fsdp" / LAST
    config = config_of(
        "head", precision="fp32", parallel="fsdp", weights=str(file), freeze=True, max_steps=2
    )
    state = gathered(run(config).state.model.state_dict(), keep=True)
    return {name: torch.equal(state[name], value) for name, value in read_tensors(file).items()}


def recomputed() -> Any:
    config = config_of("recomputed", precision="fp32", parallel="fsdp", grad_checkpointing=True)
    return run(config).state.progress.step


def types_in(precision: str, model: str = "blocky") -> Any:
    """Types of parameters, inside of a block and outside, of gradients and of optimizer values."""
    config = config_of(
        f"{precision}-{model}",
        precision=precision,
        parallel="fsdp",
        model=f"{MODELS}:{model}",
        max_steps=2,
    )
    trainer = trainer_of(config)
    block = next(m for m in trainer.state.model.modules() if type(m).__name__.endswith("Block"))
    seen: dict[str, str] = {}

    def look(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        weight = block.up.weight
        seen.update(output=str(output.dtype), weight=str(weight.dtype))
        seen.update(is_whole=str(not isinstance(weight, DTensor)))

    block.up.register_forward_hook(look)
    trainer.fit()
    trainer.feed.close()
    parameters = list(trainer.state.model.parameters())
    states = trainer.state.optimizer.state.values()
    return seen | {
        "parameters": sorted({str(p.dtype) for p in parameters}),
        "gradients": sorted({str(p.grad.dtype) for p in parameters if p.grad is not None}),
        "optimizer": sorted({str(state["exp_avg"].dtype) for state in states}),
    }


def skipped(precision: str) -> Any:
    """Step 2 has an infinite pixel, in rank 1 alone."""
    config = config_of(f"skip-{precision}", precision=precision, parallel="fsdp", max_steps=4)
    trainer = trainer_of(config)
    trainer.steps = frozenset({2}) if PROCESSES.rank == 1 else frozenset()
    kept: list[dict[str, Tensor]] = []
    train_step = trainer._train_step

    def step(number: int) -> None:
        train_step(number)
        kept.append({n: local(p).clone() for n, p in trainer.state.model.state_dict().items()})

    trainer._train_step = step  # type: ignore[method-assign]
    trainer.fit()
    trainer.feed.close()
    return {
        "optimizer_steps": trainer.state.progress.optimizer_steps,
        "moved": [
            any(not torch.equal(one[name], other[name]) for name in one)
            for one, other in pairwise(kept)
        ],
        "finite": all(math.isfinite(float(p.sum())) for p in kept[-1].values()),
    }


def collapsed() -> Any:
    """All steps from the second on have an infinite pixel, in rank 1 alone."""
    config = config_of("collapsed", precision="fp32", parallel="fsdp", max_consecutive_skips=2)
    trainer = trainer_of(config)
    trainer.steps = frozenset() if PROCESSES.is_main else frozenset(range(1, 99))
    try:
        trainer.fit()
    except TrainingError as error:
        return str(error)
    finally:
        trainer.feed.close()


def fewer_images_than_ranks() -> Any:
    """One rank has no image to validate with, and yet the others need it."""
    config = config_of("few", precision="fp32", parallel="fsdp", max_steps=1)
    trainer = trainer_of(config)
    open_feed = trainer.feed.open

    def opened(*arguments: Any) -> None:
        open_feed(*arguments)
        if not PROCESSES.is_main:
            trainer.feed.validation = iter(())  # type: ignore[assignment]

    trainer.feed.open = opened  # type: ignore[method-assign]
    trainer.fit()
    trainer.feed.close()
    return trainer.state.progress.accuracy


SEEN: dict[str, Callable[[], Any]] = {
    "ddp_and_fsdp": ddp_and_fsdp,
    "stopped_and_continued": stopped_and_continued,
    "begun_by_one": begun_by_one,
    "begun_by_two": begun_by_two,
    "head_trained": head_trained,
    "recomputed": recomputed,
    "bf16": lambda: types_in("bf16"),
    "batch_norm": lambda: types_in("bf16", "with_batch_norm"),
    "fp16": lambda: types_in("fp16"),
    "skipped": lambda: {precision: skipped(precision) for precision in ("fp32", "fp16")},
    "collapsed": collapsed,
    "few": fewer_images_than_ranks,
}

if __name__ == "__main__":
    seen = {name: look() for name, look in SEEN.items()}
    (FOLDER / f"rank-{PROCESSES.rank}.json").write_text(json.dumps(seen))
    PROCESSES.close()
