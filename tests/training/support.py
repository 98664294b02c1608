"""What the training tests share: runs in this process and in one of their own, and what they
left."""

import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

from amptrain.config import TrainConfig, flatten
from amptrain.distributed import Processes
from amptrain.signals import StopSignal
from amptrain.train import Trainer

Make = Callable[..., TrainConfig]


def trainer_of(config: TrainConfig) -> Trainer:
    config.run_dir.mkdir(parents=True, exist_ok=True)
    return Trainer(config, Processes("cpu"), StopSignal())


def records(config: TrainConfig, kind: str) -> list[dict[str, float]]:
    lines = (config.run_dir / "metrics.jsonl").read_text().splitlines()
    return [
        record
        for record in map(json.loads, lines)
        if record.get("kind", kind) == kind and matches(record, kind)
    ]


MEASURED = {
    *("images_per_s", "images_per_s_compute", "data_wait_share", "seconds", "gpu_utilisation"),
    *("memory_allocated", "memory_reserved"),
}
"""What two runs of the same steps do not have in common."""


def lines_of(run_dir: Path) -> list[dict[str, object]]:
    """The log of a run, each line as it stands there, without times."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if name not in MEASURED}
        for line in lines
    ]


def matches(record: dict[str, float], kind: str) -> bool:
    return ("val_accuracy" in record) == (kind == "epoch")


class Spoiled(Trainer):
    """Puts inf into the images of some steps (0 is the first), or of all from one on."""

    steps: frozenset[int] = frozenset()

    def _micro_batches(self, step: int):  # type: ignore[no-untyped-def]
        for batch in super()._micro_batches(step):
            if step in self.steps:
                batch.inputs[0, 0, 0, 0] = math.inf
            yield batch


def spoiled(config: TrainConfig, steps: set[int] | range) -> Spoiled:
    config.run_dir.mkdir(parents=True, exist_ok=True)
    trainer = Spoiled(config, Processes("cpu"), StopSignal())
    trainer.steps = frozenset(steps)
    return trainer


def command(config: TrainConfig, **more: object) -> list[str]:
    flags = []
    for name, value in {**flatten(config), **more}.items():
        if value is None or isinstance(value, bool):
            continue
        flags += [f"--{name.replace('_', '-')}", str(value)]
    return [sys.executable, "-m", "amptrain", "train", *flags]


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def broken_folder(tmp_path: Path) -> Path:
    """Two classes of four images each, for training and for validation, one of each broken."""
    from PIL import Image

    for part in ("train", "val"):
        for label, colour in (("black", 0), ("white", 255)):
            folder = tmp_path / "images" / part / label
            folder.mkdir(parents=True)
            for number in range(4):
                Image.new("L", (16, 16), colour).save(folder / f"{number}.png")
    (tmp_path / "images/train/black/1.png").write_bytes(b"no image")
    (tmp_path / "images/val/white/2.png").write_bytes(b"")
    return tmp_path / "images"


def alive(processes: list[str]) -> list[str]:
    """Which of these process ids are of processes that run; one that is dead, and not yet waited
    for by whoever inherited it, does not."""

    def runs(pid: str) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except FileNotFoundError:
            return False

    return list(filter(runs, processes))
