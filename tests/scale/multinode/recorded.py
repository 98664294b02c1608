"""The digits, as data of one's own that keeps a record of what each rank reads.

A rank's file begins with what its generation (the ranks between two meetings of the nodes) is known
by. From the second epoch on reading is slow until the test opens the gate, so that the run lasts as
long as what the test does to it, on any machine.
"""

import json
import os
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from amptrain.config import DataConfig
from amptrain.data.datasets import Dataset, Images, Key, Sample, open_dataset

READS = Path("/workspace/reads")
GATE = READS / "gate"
SLOW_S = 0.01


class Recorded(Images):
    """Images whose keys are written down, one a line, before they are read."""

    def __init__(self, images: Images) -> None:
        self.images = images
        self.record: TextIO | None = None

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: Key) -> Sample:
        if self.record is None:
            self.record = opened_record()
        self.record.write(f"{key[0]} {key[1]}\n")
        if key[0] > 0 and not GATE.exists():
            time.sleep(SLOW_S)
        return self.images[key]


def opened_record() -> TextIO:
    """This rank's file. No rank saves before all have read for a step, so the newest checkpoint is
    where the generation begins."""
    saved = max(Path("/workspace/runs/elastic/checkpoints").glob("step-*.pt"), default=None)
    head = {
        "generation": f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
        "host": socket.gethostname(),
        "rank": int(os.environ["RANK"]),
        "world_size": int(os.environ["WORLD_SIZE"]),
        "start": int(saved.stem.removeprefix("step-")) if saved else 0,
        "time": time.time(),
    }
    path = READS / f"{time.time_ns()}-{socket.gethostname()}"
    record = path.open("w", buffering=1)  # each line reaches the kernel, which a kill leaves alone
    record.write(json.dumps(head) + "\n")
    return record


def digits() -> Dataset:
    """What `--data recorded.py:digits` asks for."""
    task = open_dataset(DataConfig(), seed=0)
    return replace(task, train=Recorded(task.train))
