"""`--async-checkpoint`: what is written while steps are made is what would be written between
them."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from amptrain.checkpoint.store import CheckpointStore, read
from amptrain.config import TrainConfig, save_yaml
from amptrain.distributed import Processes
from amptrain.errors import CheckpointError, TrainingError
from amptrain.train import Trainer, train

from .support import Make, command
from .test_distributed import TORCHRUN, run, torchrun
from .test_kill import weights
from .test_resume import StopAt, assert_same, everything, run_to

SETTINGS = {"epochs": 2, "ema_decay": 0.9, "save_every": 2, "keep_checkpoints": 99}


class Slow:
    """A disk on which a checkpoint takes as long as several steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.writing = 0
        self.most = 0
        """Checkpoints that were written at once."""
        self.trainer: Trainer | None = None
        self.ahead: list[int] = []
        """Steps that were made while each was written."""
        save = CheckpointStore.save

        def slowly(store: CheckpointStore, state: dict[str, object], step: int) -> Path:
            self.writing += 1
            self.most = max(self.most, self.writing)
            time.sleep(0.3)
            path = save(store, state, step)
            self.ahead.append(self.trainer.state.progress.step - step if self.trainer else 0)
            self.writing -= 1
            return path

        monkeypatch.setattr(CheckpointStore, "save", slowly)

    def run(self, config: TrainConfig, stop_at: int) -> bool:
        """Until `stop_at`."""
        config.run_dir.mkdir(parents=True, exist_ok=True)
        stop = StopAt(stop_at)
        self.trainer = stop.trainer = Trainer(config, Processes("cpu"), stop)
        done = self.trainer.fit()
        self.trainer.feed.close()
        return done


def files(config: TrainConfig) -> dict[str, Any]:
    """All checkpoints, without times and settings."""
    found = {
        path.name: read(path) for path in sorted((config.run_dir / "checkpoints").glob("*.pt"))
    }
    for state in found.values():
        state["config"] = {}
        for part in (state["progress"], *(state["window"] or [])):
            part.update(seconds=0, waited=0)
    return found


@pytest.mark.usefixtures("mlp")
def test_each_checkpoint_is_that_of_its_step(
    make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While weights, averages and optimizer values move on."""
    assert train(make_config(name="whole", **SETTINGS)) == 0
    slow = Slow(monkeypatch)
    config = make_config(async_checkpoint=True, **SETTINGS)
    assert slow.run(config, 99)
    assert max(slow.ahead) == 2, "steps were made meanwhile"
    assert slow.most == 1
    one, other = files(make_config(name="whole")), files(config)
    assert len(one) == 13
    assert_same(other, one)


@pytest.mark.usefixtures("mlp")
def test_asked_to_stop_it_ends_with_this_step_on_the_disk(
    make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the one before is being written."""
    whole = run_to(make_config(name="whole", epochs=2), 99)
    slow = Slow(monkeypatch)
    config = make_config(async_checkpoint=True, save_every=6, epochs=2)
    assert not slow.run(config, 7)
    assert (slow.ahead, slow.most) == ([1, 0], 1)
    names = sorted(path.name for path in (config.run_dir / "checkpoints").iterdir())
    assert names == ["step-000000006.pt", "step-000000007.pt"]
    assert slow.run(config, 99)
    assert slow.trainer is not None
    assert_same(everything(slow.trainer), everything(whole))


@pytest.mark.usefixtures("mlp")
def test_asked_to_stop_it_tells_that_this_step_is_not_on_the_disk(
    make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = CheckpointStore.save

    def full(store: CheckpointStore, state: dict[str, object], step: int) -> Path:
        if step == 6:
            return save(store, state, step)
        raise CheckpointError("No space left on device.")

    monkeypatch.setattr(CheckpointStore, "save", full)
    config = make_config(async_checkpoint=True, save_every=6)
    with pytest.raises(TrainingError, match="this step's checkpoint could not be written"):
        run_to(config, 7)


FULL = """
import resource, sys
from pathlib import Path
from amptrain.checkpoint.store import CheckpointStore
from amptrain.config import load_yaml
from amptrain.train import Trainer, train

save = CheckpointStore.save
def until_full(self, state, step):
    path = save(self, state, step)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, -1))  # met by write(2), as a full disk is
    return path

train_step = Trainer._train_step
def step(self, number):
    if number == 10:
        self.checkpoints._later[1].result()  # until it has failed
    train_step(self, number)

CheckpointStore.save, Trainer._train_step = until_full, step
from amptrain import cli
sys.exit(cli.run(cli.train, [f"--config={sys.argv[1]}"]))
"""


def start(program: str, config: TrainConfig) -> subprocess.CompletedProcess[str]:
    settings = config.run.runs / "settings.yaml"
    save_yaml(config, settings)
    line = [sys.executable, "-c", program, str(settings)]
    return subprocess.run(line, capture_output=True, text=True, check=False, timeout=120)


def test_a_full_disk_is_told_before_the_next_checkpoint(make_config: Make) -> None:
    config = make_config(async_checkpoint=True, save_every=5, log_every=1, precision="fp32")
    done = start(FULL, config)
    assert done.returncode == 1
    said = done.stdout.index("step-000000010.pt could not be written: File too large.")
    assert said < done.stdout.index("step 12/12"), done.stdout
    assert "the last checkpoint of this run is of step 5" in done.stderr
    names = [path.name for path in (config.run_dir / "checkpoints").iterdir()]
    assert names == ["step-000000005.pt"]


@pytest.mark.usefixtures("mlp")
def test_a_run_that_fails_writes_what_it_began(
    make_config: Make, monkeypatch: pytest.MonkeyPatch, messages: list[str]
) -> None:
    """And says where it could not."""
    slow = Slow(monkeypatch)
    step = Trainer._train_step

    def fails(self: Trainer, number: int) -> None:
        if number == 7:
            raise TrainingError("No more.")
        step(self, number)

    monkeypatch.setattr(Trainer, "_train_step", fails)
    config = make_config(async_checkpoint=True, save_every=6)
    with pytest.raises(TrainingError, match="No more"):
        train(config)
    assert list(files(config)) == ["step-000000006.pt"]
    assert slow.most == 1

    def full(*_: object) -> None:
        raise CheckpointError("No space left on device.")

    monkeypatch.setattr(CheckpointStore, "save", full)
    with pytest.raises(TrainingError, match="No more"):
        train(make_config(name="full", async_checkpoint=True, save_every=6))
    assert messages[-1] == "No space left on device."


KILLED = """
import os, sys, time
from amptrain import cli
from amptrain.checkpoint import store
from amptrain.train import Trainer

write, train_step, began = store.write, Trainer._train_step, []
def half(path, content):
    "The third is cut in the middle, and there the process dies, once it has made two more steps."
    write(path, content)
    if content["step"] == 9 and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        os.truncate(path, path.stat().st_size // 2)
        began.append(path)
        time.sleep(60)

def step(self, number):
    if number == 11 and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        while not began and self.processes.is_main:
            time.sleep(0.01)
        os.kill(os.getpid(), 9)
    train_step(self, number)

store.write, Trainer._train_step = half, step
"""


def test_killed_in_the_middle_of_the_file_the_one_before_is_taken(make_config: Make) -> None:
    settings = {"epochs": 2, "save_every": 3, "log_every": 1, "precision": "fp32"}
    program = f"{KILLED}\nsys.exit(cli.run(cli.train, [f'--config={{sys.argv[1]}}']))"
    config = make_config(async_checkpoint=True, **settings)
    done = start(program, config)
    assert done.returncode == -signal.SIGKILL, done.stderr
    left = sorted(path.name for path in (config.run_dir / "checkpoints").iterdir())
    assert left == ["step-000000003.pt", "step-000000006.pt", "step-000000009.tmp"]
    assert "step 11/24" in done.stdout
    again = subprocess.run(command(config), capture_output=True, text=True, check=True)
    assert "Continuing at step 6 of 24" in again.stdout
    whole = make_config(name="whole", **settings)
    assert train(whole) == 0
    assert weights(config) == weights(whole)


def test_two_ranks_are_killed_while_rank_0_writes(make_config: Make, tmp_path: Path) -> None:
    """torchrun starts them again; one process alone then goes on."""
    script = tmp_path / "killed.py"
    script.write_text(f"{KILLED}\nsys.exit(cli.run(cli.train, sys.argv[1:]))")
    settings = {"epochs": 2, "save_every": 3, "precision": "fp32"}
    whole, config = make_config(name="whole", **settings), make_config(**settings)
    assert run(torchrun(whole)).returncode == 0
    arguments = [*torchrun(config, str(script)), "--async-checkpoint"]
    arguments.insert(len(TORCHRUN), "--max-restarts=1")
    done = run(arguments, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")  # as docs/torchrun.md says
    assert done.returncode == 0, done.stderr
    assert "Continuing at step 6 of 24" in done.stdout
    assert weights(config) == weights(whole)
    alone = make_config(**{**settings, "epochs": 3})
    assert train(alone) == 0
    assert json.loads((alone.run_dir / "result.json").read_text())["epochs"] == 3
