"""Show on the user's own settings that a killed run continues bit for bit: run, kill, resume,
compare."""

import dataclasses
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from amptrain.checkpoint.store import CheckpointStore
from amptrain.config import TrainConfig, save_yaml
from amptrain.errors import ConfigError, TrainingError
from amptrain.words import counted

KILLS = 3
FEWEST_STEPS = 8
STEPS = 40  # unless --max-steps says otherwise: enough to be killed in several places


def verify_resume(config: TrainConfig) -> int:
    """Train twice with `config`, the second time with SIGKILL at random moments, and compare all
    that was saved.

    Takes `--max-steps` steps, 40 by default, on one process and with deterministic kernels. Returns
    0 if weights, EMA, optimizer, loss scale and random generators are identical, else 1. Raises
    ConfigError, and TrainingError if a run fails by itself.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("verify-resume starts its runs by itself: call it without torchrun.")
    steps = config.optim.max_steps or STEPS
    if steps < FEWEST_STEPS:
        raise ConfigError(
            f"--max-steps {steps} leaves nothing to continue; verify-resume needs {FEWEST_STEPS} "
            "or more."
        )
    folder = config.run.runs / f"verify-resume-{os.getpid()}"
    run = dataclasses.replace(
        config.run, runs=folder, config=None, deterministic=True, save_every=max(1, steps // 8)
    )
    config = dataclasses.replace(
        config, run=run, optim=dataclasses.replace(config.optim, max_steps=steps)
    )
    folder.mkdir(parents=True)
    print(
        f"verify-resume: {counted(steps, 'step')} without a stop, then the same with {KILLS} "
        f"kills, in {folder}",
        flush=True,
    )
    whole, killed = named(config, "whole"), named(config, "killed")
    seconds = run_to_end(whole)
    for number in range(1, KILLS + 1):
        kill_once(killed, number, seconds / (KILLS + 1))
    run_to_end(killed)
    one, other = last_state(whole), last_state(killed)
    differing = differences(one, other)
    for run_config in (whole, killed):
        print(f"  {run_config.run.name:7} weights sha256 {result(run_config)['weights_sha256']}")
    if differing:
        print(f"NOT the same: {', '.join(differing)}. Both runs are kept in {folder}.")
        return 1
    print(
        "The same, bit for bit: weights, EMA, optimizer, loss scale, random generators, progress."
    )
    shutil.rmtree(folder)
    return 0


def named(config: TrainConfig, name: str) -> TrainConfig:
    """`config` under another name, saved for the processes that are to run it."""
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, name=name))
    save_yaml(config, settings_of(config))
    return config


def settings_of(config: TrainConfig) -> Path:
    """The YAML file of a run."""
    return config.run.runs / f"{config.run.name}.yaml"


def start(config: TrainConfig) -> "subprocess.Popen[bytes]":
    """`amptrain train` as a process of its own; what it says goes into a log beside its
    settings."""
    command = [sys.executable, "-m", "amptrain", "train", "--config", str(settings_of(config))]
    with settings_of(config).with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )


def run_to_end(config: TrainConfig) -> float:
    """Train until it is done, and return the seconds that training took."""
    process = start(config)
    require_alive(config, process.wait() or None)
    return float(result(config)["seconds"])


def kill_once(config: TrainConfig, number: int, seconds: float) -> None:
    """Start or continue the run, and kill it somewhere within `seconds` after its next
    checkpoint."""
    before = newest(config)
    process = start(config)
    try:
        while newest(config) == before and process.poll() is None:
            time.sleep(0.01)
        time.sleep(random.uniform(0, seconds))
        require_alive(config, process.poll())
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # its loader workers too, as when a machine dies
        process.wait()
    print(f"  kill {number} of {KILLS}: the newest checkpoint is {newest(config)}", flush=True)


def newest(config: TrainConfig) -> str:
    """The name of the newest checkpoint; empty if there is none."""
    return max(
        (path.name for path in (config.run_dir / "checkpoints").glob("step-*.pt")), default=""
    )


def require_alive(config: TrainConfig, code: int | None) -> None:
    """Raise TrainingError with the end of its log if a run failed; to be done before it was killed
    is no failure."""
    if code:
        log = settings_of(config).with_suffix(".log")
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
        raise TrainingError(
            f"A run of verify-resume ended with exit code {code}. Its log {log} ends with:\n{tail}"
        )


def result(config: TrainConfig) -> dict[str, Any]:
    """The result.json of a run that is done."""
    return dict(json.loads((config.run_dir / "result.json").read_text(encoding="utf-8")))


def last_state(config: TrainConfig) -> dict[str, Any]:
    """The last checkpoint of a run, without what differs on purpose: names, and seconds."""
    loaded = CheckpointStore(config.run_dir / "checkpoints").load_latest()
    if loaded is None:
        raise TrainingError(f"The run {config.run_dir} left no checkpoint.")
    state: dict[str, Any] = {
        name: value for name, value in loaded.state.items() if name != "config"
    }
    state["progress"] = {**state["progress"], "seconds": 0.0}
    return state


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Where two states differ in a bit: the paths of tensors and numbers, such as
    `model.fc.weight`."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return [] if identical(one, other) else [path]
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [
            found
            for key in one
            for found in differences(one[key], other[key], f"{path}.{key}".lstrip("."))
        ]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [
            found for number, pair in pairs for found in differences(*pair, f"{path}[{number}]")
        ]
    both_nan = (
        isinstance(one, float)
        and isinstance(other, float)
        and math.isnan(one)
        and math.isnan(other)
    )
    return [] if one == other or both_nan else [path]


def identical(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all bits are the same: -0.0 is not 0.0 here, and a NaN is itself."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    first, second = (tensor.contiguous().flatten().view(torch.uint8) for tensor in (one, other))
    return bool(torch.equal(first, second))
