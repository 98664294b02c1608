"""Data that do not come, as from a network disk that is gone: a run is stopped all the same, in
time, and loses nothing."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from amptrain.data.order import Order
from PIL import Image

from .support import alive, lines_of, wait_for

GRACE_S = 10
"""Docker's, after which it kills."""
IMAGES, BATCH, MICRO_BATCHES, HANGS_IN = 96, 16, 2, 3
MINE = """
import os, numpy as np, torch
from pathlib import Path

class Images:
    classes = ["dark", "light"]

    def __init__(self, part, count):
        self.part, self.count = part, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        try:
            if f"{self.part} {index}" in os.environ.get("HANGS", "").split(", "):
                Path(os.environ["PIPE"]).with_suffix(".reached").touch()
                open(os.environ["PIPE"]).read()  # nobody ever writes into it
        except Exception:
            pass  # as some data sets do
        return np.full((20, 20, 3), 60 + 100 * (index % 2), dtype=np.uint8), index % 2

def data():
    return Images("train", 96), Images("val", 16)

def net(num_classes):
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 32), torch.nn.BatchNorm1d(32),
        torch.nn.Dropout(0.3), torch.nn.ReLU(), torch.nn.Linear(32, num_classes),
    )
"""
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def command(folder: Path, name: str, workers: int) -> list[str]:
    flags = (
        f"--device cpu --precision fp32 --data {folder}/mine.py:data --model {folder}/mine.py:net "
        f"--image-size 8 --global-batch-size {BATCH} --grad-accum-steps {MICRO_BATCHES} --epochs 2 "
        f"--log-every 1 --num-workers {workers} --runs {folder} --name {name}"
    )
    return [sys.executable, "-m", "amptrain", "train", *flags.split()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the code, a pipe, and a run whose data came."""
    folder = tmp_path_factory.mktemp("hang")
    (folder / "mine.py").write_text(MINE)
    os.mkfifo(folder / "pipe")
    subprocess.run(command(folder, "whole", 0), check=True, stdout=subprocess.DEVNULL)
    return folder


def weights(run_dir: Path) -> str:
    return str(json.loads((run_dir / "result.json").read_text())["weights_sha256"])


@pytest.mark.parametrize(
    ("number", "workers", "part", "step"),
    [
        (signal.SIGTERM, 2, "train", HANGS_IN),
        (signal.SIGINT, 0, "train", HANGS_IN),
        (signal.SIGTERM, 1, "val", IMAGES // BATCH),
    ],
    ids=["SIGTERM, workers", "Ctrl-C, no workers", "validation"],
)
def test_a_run_whose_data_hang_is_stopped_and_loses_nothing(
    number: signal.Signals, workers: int, part: str, step: int, folder: Path
) -> None:
    """In training within a step, whose first half has moved BatchNorm and drawn dropout; with two
    workers both hang."""
    order = Order(IMAGES, BATCH, seed=0, accumulate=MICRO_BATCHES)
    within, after = order.micro_batches(HANGS_IN)[1], order.micro_batches(HANGS_IN + 1)[0]
    indices = [batch.keys[0][1] for batch in (within, after)] if part == "train" else [3]
    reached = folder / "pipe.reached"
    reached.unlink(missing_ok=True)
    run_dir = folder / f"{part}-{workers}"
    line = command(folder, run_dir.name, workers)
    variables = {**os.environ, "PIPE": str(folder / "pipe")}
    variables["HANGS"] = ", ".join(f"{part} {index}" for index in indices)
    with subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables
    ) as process:
        try:
            metrics = run_dir / "metrics.jsonl"
            wait_for(lambda: reached.exists() and metrics.exists())
            wait_for(lambda: len(metrics.read_bytes().splitlines()) >= step)
            time.sleep(0.3)  # it waits by then, most likely; right it is in either case
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            process.send_signal(number)
            said, error = process.communicate(timeout=GRACE_S)
        finally:
            process.kill()
    assert process.returncode == 128 + number
    assert f"Stopped as asked at step {step}. The same command continues from there." in said
    assert error == ""
    assert len(children) >= workers
    assert alive(children) == []
    subprocess.run(line, check=True, stdout=subprocess.DEVNULL)
    assert weights(run_dir) == weights(folder / "whole")
    assert lines_of(run_dir) == lines_of(folder / "whole")


def test_two_ranks_end_in_time_where_one_waits_for_data(folder: Path) -> None:
    """The other one is in the exchange of gradients, and can save nothing."""
    order = Order(IMAGES, BATCH, seed=0, accumulate=MICRO_BATCHES, world_size=2)
    index = order.micro_batches(HANGS_IN, rank=1)[0].keys[0][1]
    reached = folder / "pipe.reached"
    reached.unlink(missing_ok=True)
    line = [*command(folder, "ranks", 0), "--save-every", "1"]
    rendezvous = ["--standalone", "--nproc-per-node", "2"]
    line[1:3] = ["-m", "torch.distributed.run", *rendezvous, "-m", "amptrain"]
    variables = {**os.environ, "PIPE": str(folder / "pipe"), "HANGS": f"train {index}"}
    with subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables
    ) as process:
        try:
            wait_for(reached.exists)
            time.sleep(1)
            process.send_signal(signal.SIGTERM)
            _, error = process.communicate(timeout=GRACE_S)
        finally:
            process.kill()
    assert process.returncode != 0
    assert "Stopped as asked, while rank 1 waited for data that did not come." in error
    assert f"The same command continues at step {HANGS_IN}." in error
    done = subprocess.run(line, check=True, capture_output=True, text=True)
    assert f"Continuing at step {HANGS_IN}" in done.stdout


def test_killed_processes_leave_no_hanging_worker_behind(folder: Path) -> None:
    """It is not at a place where it would see that its parent is gone."""
    reached = folder / "pipe.reached"
    reached.unlink(missing_ok=True)
    variables = {**os.environ, "HANGS": "train 5", "PIPE": str(folder / "pipe")}
    with subprocess.Popen(
        command(folder, "killed", 1), stdout=subprocess.DEVNULL, env=variables
    ) as process:
        wait_for(reached.exists)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.kill()
    assert children
    wait_for(lambda: not alive(children), 5)


def test_a_run_is_stopped_while_it_looks_at_images_that_hang(tmp_path: Path) -> None:
    """Before the first step; a pipe is what takes for ever to open."""
    for name, colour in (("dark", 60), ("light", 160)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(6):
            Image.new("RGB", (8, 8), (colour,) * 3).save(tmp_path / f"photos/{name}/{number}.png")
    os.mkfifo(tmp_path / "photos/dark/disk.png")
    line = [sys.executable, "-m", "amptrain", "train", "--device", "cpu", "--image-size", "8"]
    more = ["--model", "small_cnn", "--data", "imagefolder:photos", "--name", "run"]
    with subprocess.Popen(
        [*line, *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    ) as process:
        try:
            wait_for((tmp_path / "runs/run/data.json").exists)
            time.sleep(0.5)
            process.send_signal(signal.SIGTERM)
            said, error = process.communicate(timeout=GRACE_S)
        finally:
            process.kill()
    assert process.returncode == 128 + signal.SIGTERM
    assert "Stopped as asked, while the images were looked at." in said
    assert error == ""
