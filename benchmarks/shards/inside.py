"""In the container: `inside speed SECONDS`, or `inside resume`."""

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import fsspec
import numpy as np
import torch
from amptrain.config import DataConfig
from amptrain.data.datasets import open_dataset
from amptrain.data.loader import DeviceBatches, make_loader
from amptrain.data.order import MicroBatchKeys
from PIL import Image

from benchmarks.paired import interleave, ratio, timed

EXAMPLES = Path("/workspace/examples")
ADDRESS = "http://127.0.0.1:5000"
IMAGES, SHARD, BATCH, WORKERS, SIZE = 512, 128, 8, 2, 224
SIZES = ((500, 375), (96, 72))
"""As ImageNet's; and so small that opening and asking count more than decoding."""


def make_data(folder: Path, size: tuple[int, int]) -> None:
    """The same JPEGs as files in folders and in shards, of two classes; an eighth validates."""
    rng = np.random.default_rng(0)
    (folder / "shards").mkdir(parents=True)
    (folder / "shards/classes.txt").write_text("a\nb\n")
    for part, images in (("train", IMAGES), ("val", IMAGES // 8)):
        for start in range(0, images, SHARD):
            with tarfile.open(folder / f"shards/{part}-{start:04}.tar", "w") as archive:
                for number in range(start, min(start + SHARD, images)):
                    add(archive, folder / part, number, rng, size)


def add(
    archive: tarfile.TarFile,
    part: Path,
    number: int,
    rng: np.random.Generator,
    size: tuple[int, int],
) -> None:
    """One image: details some four pixels wide, as in a sharp photo; one class is brighter."""
    label = number % 2
    coarse = rng.integers(80 * label, 176 + 80 * label, (size[1] // 4, size[0] // 4, 3), np.uint8)
    stream = io.BytesIO()
    Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).save(stream, "jpeg", quality=90)
    path = part / "ab"[label] / f"{number}.jpg"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(stream.getvalue())
    for ending, data in (("jpg", stream.getvalue()), ("cls", str(label).encode())):
        member = tarfile.TarInfo(f"{number:06}.{ending}")
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))


@contextmanager
def s3() -> Iterator[None]:
    """A moto server, which s3fs finds by its variables."""
    keys = {"AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "nothing"}
    os.environ |= {**keys, "AWS_ENDPOINT_URL": ADDRESS, "AWS_DEFAULT_REGION": "us-east-1"}
    server = subprocess.Popen(
        ["moto_server", "-H", "127.0.0.1", "-p", ADDRESS.rpartition(":")[2]],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                fsspec.filesystem("s3").mkdir("bucket")
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)
        yield
    finally:
        server.kill()


def index(url: str) -> None:
    """As a person writes it."""
    subprocess.run([sys.executable, str(EXAMPLES / "object_store.py"), url], check=True)


def epochs(data: str, url: str) -> Callable[[], object]:
    """An epoch of training images at each call, by the loader as a run has it."""
    os.environ["SHARDS"] = url
    task = open_dataset(DataConfig(data=data, image_size=SIZE), 0)
    order = np.random.default_rng(0).permutation(IMAGES).reshape(-1, BATCH).tolist()
    keys = [MicroBatchKeys([(0, number) for number in batch]) for batch in order]
    loader = make_loader(task.train, keys, WORKERS, 2, pin_memory=False)
    device = torch.device("cpu")

    def epoch() -> None:
        batches = DeviceBatches(loader, task, device, torch.channels_last, lambda _: None)
        assert sum(len(batch.inputs) for batch in batches) == IMAGES

    return epoch


def speed(seconds: float) -> None:
    """Print one table."""
    torch.set_num_threads(1)
    names = ("moto", "s3fs", "fsspec", "aiobotocore", "torch")
    print(", ".join(f"{name} {version(name)}" for name in names), end="\n\n")
    print("| JPEGs | read from | images/s | to the folder (95 %) | epochs |")
    print("| --- | --- | ---: | --- | ---: |")
    for size in SIZES:
        with tempfile.TemporaryDirectory() as name, s3():
            folder = Path(name)
            make_data(folder, size)
            index(f"file://{folder}/shards")
            fsspec.filesystem("s3").put(f"{folder}/shards", "bucket/shards", recursive=True)
            local, tar, store = f"file://{folder}/shards", "tar_shards.py", "object_store.py"
            ways = {
                "a folder": epochs(f"imagefolder:{folder}", local),
                "a folder, once more": epochs(f"imagefolder:{folder}", local),
                "tar shards": epochs(f"{EXAMPLES / tar}:shards", f"{folder}/shards"),
                "the same by fsspec": epochs(f"{EXAMPLES / store}:shards", local),
                "the same by S3": epochs(f"{EXAMPLES / store}:shards", "s3://bucket/shards"),
            }
            # Each starts its workers in its first epoch, which is not measured.
            times = interleave({way: timed(go) for way, go in ways.items()}, seconds, 1000)
            for way, taken in times.items():
                rate = IMAGES * len(taken) / sum(taken)
                told = "1" if way == "a folder" else str(ratio(times["a folder"], taken))
                print(f"| {size[0]}×{size[1]} | {way} | {rate:.0f} | {told} | {len(taken)} |")
            sys.stdout.flush()


def resume() -> None:
    """Two ranks with two workers each read S3 by fsspec; both are killed by SIGKILL, and go on."""
    with tempfile.TemporaryDirectory() as name, s3():
        folder = Path(name)
        make_data(folder, SIZES[1])
        fsspec.filesystem("s3").put(f"{folder}/shards", "bucket/shards", recursive=True)
        index("s3://bucket/shards")
        os.environ["SHARDS"] = "s3://bucket/shards"
        flags = ["--model=small_cnn", "--image-size=32", "--epochs=2", "--num-workers=2"]
        flags += [f"--data={EXAMPLES / 'object_store.py'}:shards", f"--runs={folder}"]
        flags += ["--device=cpu", "--precision=fp32", "--save-every=3"]
        start = [
            "torchrun",
            "--standalone",
            "--nproc-per-node=2",
            "-m",
            "amptrain",
            "train",
            *flags,
        ]
        subprocess.run([*start, "--name=whole"], check=True, stdout=subprocess.DEVNULL)
        with subprocess.Popen([*start, "--name=killed"], stdout=subprocess.DEVNULL) as run:
            while not any((folder / "killed").glob("checkpoints/step-*.pt")):
                time.sleep(0.01)
            ranks = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
            for process in (run.pid, *map(int, ranks)):  # their loader workers die with them
                os.kill(process, signal.SIGKILL)
        left = sorted(path.name for path in (folder / "killed/checkpoints").glob("step-*.pt"))
        subprocess.run([*start, "--name=killed"], check=True)
        results = [
            json.loads((folder / run / "result.json").read_text())["weights_sha256"]
            for run in ("whole", "killed")
        ]
        print(f"Killed after {', '.join(left)}; weights {results[0]} and {results[1]}.")
        assert results[0] == results[1]


if __name__ == "__main__":
    resume() if sys.argv[1] == "resume" else speed(float(sys.argv[2]))
