"""Runs that are killed by SIGKILL at random moments: none is lost, none ends with other weights."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from amptrain.config import TrainConfig, load_yaml, save_yaml
from amptrain.inference.model_file import read_tensors
from amptrain.train import train

from .support import alive, command, lines_of, wait_for

Make = Callable[..., TrainConfig]
# A process that has imported torch and forks the runs: they begin within milliseconds, as 100 of
# them have to.
FORKER = """
import os, sys
from pathlib import Path
import torch.utils.tensorboard
from amptrain.config import load_yaml
from amptrain.train import train

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        os.setsid()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        try:
            os._exit(train(load_yaml(Path(line.strip()))))
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(70)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture
def forker() -> Iterator[Callable[[TrainConfig, float], int]]:
    """Train in a process of its own, with its own group, killed after some seconds if it still
    runs: its exit code."""
    with subprocess.Popen(
        [sys.executable, "-c", FORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None
        assert stdout is not None

        def run(config: TrainConfig, seconds: float) -> int:
            settings = config.run.runs / f"{config.run.name}.yaml"
            save_yaml(config, settings)
            stdin.write(f"{settings}\n")
            stdin.flush()
            child = int(stdout.readline())
            alarm = threading.Timer(seconds, kill_group, (child,))
            alarm.start()
            code = int(stdout.readline())
            alarm.cancel()
            return code

        yield run
        stdin.close()


def kill_group(leader: int) -> None:
    """With its loader workers, as when a machine dies; it may be done, or not have its own group
    yet."""
    with suppress(ProcessLookupError):
        os.kill(leader, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def saved_step(config: TrainConfig) -> int:
    """Of the newest checkpoint, by its name."""
    return max(
        (int(path.stem[5:]) for path in (config.run_dir / "checkpoints").glob("step-*.pt")),
        default=0,
    )


def weights(config: TrainConfig) -> str:
    return str(json.loads((config.run_dir / "result.json").read_text())["weights_sha256"])


@pytest.mark.slow
def test_100_kills_lose_no_run_and_change_no_weight(
    make_config: Make, forker: Callable[[TrainConfig, float], int]
) -> None:
    """With augmentation, accumulation, EMA, in half of the runs a loader worker, in half of them
    checkpoints written meanwhile; each is killed until it is done."""
    settings = {"epochs": 2, "save_every": 2, "accumulate": 2, "ema_decay": 0.9}
    whole = make_config(name="whole", **settings)
    assert forker(make_config(name="first", **settings), 600) == 0  # waits until torch is imported
    began = time.monotonic()
    assert forker(whole, 600) == 0
    duration = time.monotonic() - began
    chosen, kills, runs = random.Random(0), 0, 0
    steps: list[int] = []
    while kills < 100:
        how = {"workers": runs % 2, "async_checkpoint": runs % 4 > 1}
        config = make_config(name=f"run-{runs}", **how, **settings)
        before = 0
        while (code := forker(config, chosen.uniform(0, 0.7 * duration))) != 0:
            assert code == -signal.SIGKILL
            kills += 1
            assert saved_step(config) >= before
            before = saved_step(config)
            steps.append(before)
        assert weights(config) == weights(whole), (
            f"{config.run_dir}, killed after the checkpoints of steps {steps}"
        )
        runs += 1
    assert len(set(steps)) > 5, "the kills came at many places"
    assert runs > 5


def test_killed_in_the_first_start_leaves_a_run_that_starts(
    make_config: Make, forker: Callable[[TrainConfig, float], int]
) -> None:
    """Directory and settings may be there, or half of them."""
    for number in range(10):
        config = make_config(name=f"run-{number}", max_steps=2)
        forker(config, 0.02 * number)
        assert forker(config, 600) == 0


KILLED_AT = """
import os, sys
from pathlib import Path
from amptrain import train as module
from amptrain.config import load_yaml

def killed(*_, **__):
    os.kill(os.getpid(), 9)

setattr({where}, killed)
module.train(load_yaml(Path(sys.argv[1])))
"""


def train_killed_at(where: str, config: TrainConfig) -> None:
    """A run killed where it calls `where`: a module or class, and a name in it."""
    settings = config.run.runs / "settings.yaml"
    save_yaml(config, settings)
    line = [sys.executable, "-c", KILLED_AT.format(where=where), str(settings)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr


def described(config: TrainConfig) -> dict[str, object]:
    """What the files beside the weights say of them."""
    names = ("config.yaml", "result.json", "data.json", "model.safetensors")
    files = {name: config.run_dir / name for name in names}
    return {name: path.read_bytes() if path.exists() else None for name, path in files.items()}


@pytest.mark.parametrize(
    ("where", "save_every", "has_weights"),
    [
        ("module, 'write_model'", None, False),
        ("module.Trainer, 'save_later'", None, True),  # the model of the best epoch
        ("module.Trainer, '_end_epoch'", 5, True),
    ],
)
def test_settings_and_result_are_those_of_the_weights_beside_them_whenever_it_is_killed(
    where: str, save_every: int | None, has_weights: bool, make_config: Make
) -> None:
    """They said what a longer run was to be, of which nothing was there."""
    config = make_config(precision="fp32")
    assert train(config) == 0
    before = described(config)
    longer = make_config(precision="fp32", epochs=2, save_every=save_every)
    train_killed_at(where, longer)
    assert (described(config) == before) != has_weights
    assert load_yaml(config.run_dir / "config.yaml").optim.epochs == 1 + has_weights
    assert (config.run_dir / "result.json").exists() != has_weights
    assert train(longer) == 0
    assert json.loads((config.run_dir / "result.json").read_text())["epochs"] == 2


def test_killed_in_a_validation_it_is_made_again_and_the_weights_are_the_same(
    make_config: Make,
) -> None:
    """With EMA, and the last steps of the epoch in no checkpoint."""
    settings = {"epochs": 2, "ema_decay": 0.9, "augment": "flip", "save_every": 5}
    whole, part = (make_config(name=name, **settings) for name in ("whole", "part"))
    train_killed_at("__import__('amptrain.validate').validate, 'parts_right'", part)
    assert saved_step(part) == 10
    assert train(whole) == train(part) == 0
    assert weights(part) == weights(whole)
    assert lines_of(part.run_dir) == lines_of(whole.run_dir)
    for name in ("model.safetensors", "best.safetensors"):
        one, other = (read_tensors(config.run_dir / name) for config in (part, whole))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_a_result_has_its_settings_beside_it_where_no_weights_were_written(
    make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before its result, then ended by other settings, without the package safetensors."""
    assert train(make_config(precision="fp32")) == 0
    ended = make_config(precision="fp32", max_steps=12)
    (ended.run_dir / "result.json").unlink()
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    assert train(ended) == 0
    assert load_yaml(ended.run_dir / "config.yaml").optim.max_steps == 12


def test_killed_processes_leave_no_workers_behind(make_config: Make) -> None:
    config = make_config(workers=2, epochs=500)
    with subprocess.Popen(
        command(config), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        metrics = config.run_dir / "metrics.jsonl"
        deadline = time.monotonic() + 60
        while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.05)
        workers = children.read_text().split()
        assert len(workers) >= 2
        process.kill()
    wait_for(lambda: not alive(workers), 30)
