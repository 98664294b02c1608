"""The examples: each learns, and continues bit for bit where Ctrl-C stopped it; or gives data with
which a run does."""

import io
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import amptrain
import fsspec
import numpy as np
import pytest
import torch
from amptrain.own import own_function
from PIL import Image
from torch.utils.data import DataLoader

from .support import Make, wait_for
from .test_distributed import TORCHRUN, run, torchrun, weights
from .test_distributed import command as command_of
from .test_resume import assert_same, everything, run_to

EXAMPLES = Path(amptrain.__file__).parents[1] / "examples"
LEARNS = {
    # script: what its last line shows, and the bound it passes
    "text_transformer.py": (r"loss ([\d.]+)", lambda loss: loss < 0.6),
    "gan.py": (r"critic ([\d.]+)", lambda loss: 0.5 < loss < 0.8),  # log 2: it can't tell any more
    "segmentation.py": (r"IoU ([\d.]+)", lambda iou: iou > 0.9),
}
DATA = {"tar_shards.py": "shards", "object_store.py": "shards", "hugging_face.py": "hub"}
"""What is data of one's own: script, and its function."""


def command(script: str, run_dir: Path) -> list[str]:
    return [sys.executable, str(EXAMPLES / script), "--steps", "100", "--run-dir", str(run_dir)]


def tensors(run_dir: Path) -> dict[str, torch.Tensor]:
    """All tensors of the newest checkpoint, by their place in it."""
    found = {}

    def walk(value: object, place: str) -> None:
        if isinstance(value, torch.Tensor):
            found[place] = value
        elif isinstance(value, dict):
            for key, item in value.items():
                walk(item, f"{place}.{key}")

    walk(torch.load(max(run_dir.glob("step-*.pt")), weights_only=True), "")
    return found


def test_every_example_is_tried() -> None:
    assert {*LEARNS, *DATA} == {path.name for path in EXAMPLES.glob("*.py")}


@pytest.mark.parametrize("script", LEARNS)
def test_it_learns_and_continues_bit_for_bit(script: str, tmp_path: Path) -> None:
    whole = subprocess.run(
        command(script, tmp_path / "whole"), capture_output=True, text=True, check=True, timeout=120
    )
    pattern, is_learned = LEARNS[script]
    assert is_learned(float(re.findall(pattern, whole.stdout)[-1])), whole.stdout
    with subprocess.Popen(
        command(script, tmp_path / "parts"), stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout is not None
        first.stdout.readline()
        first.send_signal(signal.SIGINT)
    (stopped,) = (tmp_path / "parts").glob("step-*.pt")
    assert stopped.name < "step-000000100.pt"
    subprocess.run(command(script, tmp_path / "parts"), check=True, timeout=120)
    one, other = tensors(tmp_path / "whole"), tensors(tmp_path / "parts")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[place], other[place]) for place in one)


def test_the_public_names_are_there() -> None:
    assert all(hasattr(amptrain, name) for name in amptrain.__all__)
    with pytest.raises(AttributeError):
        _ = amptrain.no_such_name


def test_help_does_not_import_torch() -> None:
    code = "import sys, amptrain.cli; amptrain.cli.main(['--help']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n")


WORKERS_WARNING = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def picture(number: int, label: int) -> Image.Image:
    pixels = np.random.default_rng(number).integers(0, 90, (20, 26, 3), dtype=np.uint8)
    pixels[..., label] += 120
    return Image.fromarray(pixels)


def png(number: int) -> bytes:
    data = io.BytesIO()
    picture(number, number % 2).save(data, "png")
    return data.getvalue()


@pytest.fixture
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three to train on and one to validate with, as WebDataset's TarWriter names their members:
    24 images each, of two classes."""
    folder = tmp_path / "shards"
    folder.mkdir()
    (folder / "classes.txt").write_text("red\ngreen\n")
    for shard, name in enumerate(("train-0", "train-1", "train-2", "val-0")):
        with tarfile.open(folder / f"{name}.tar", "w") as archive:
            for number in range(24 * shard, 24 * shard + 24):
                label = str(number % 2).encode()
                for ending, data in (("cls", label), ("png", png(number)), ("json", b"{}")):
                    member = tarfile.TarInfo(f"photos/{number:06}.{ending}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
    monkeypatch.setenv("SHARDS", str(folder))
    write_index(folder)
    return folder


def write_index(folder: Path) -> None:
    """As a person does it, for object_store.py."""
    line = [sys.executable, str(EXAMPLES / "object_store.py"), folder.as_uri()]
    subprocess.run(line, check=True, capture_output=True, text=True)


HUB = """
class Labels:
    names = ["red", "green"]

class Split:
    features = {"label": Labels}

    def __init__(self, numbers):
        self.numbers = numbers

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, which):
        if which == "label":
            return [number % 2 for number in self.numbers]
        from tests.training.test_examples import picture
        number = self.numbers[which]
        return {"image": picture(number, number % 2), "label": number % 2}

def load_dataset(name):
    assert name == "beans"
    return {"train": Split(range(72)), "test": Split(range(72, 96))}
"""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the library `datasets`, with what the example uses of it: it is not in the
    image."""
    (tmp_path / "datasets.py").write_text(HUB)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("HF_DATASET", "beans")
    monkeypatch.delitem(sys.modules, "datasets", raising=False)


@WORKERS_WARNING
@pytest.mark.usefixtures("shards", "hub")
@pytest.mark.parametrize("script", DATA)
def test_a_run_with_its_data_continues_bit_for_bit(script: str, make_config: Make) -> None:
    """With other numbers of workers, in the midst of an epoch."""
    settings = {
        "data": f"{EXAMPLES / script}:{DATA[script]}",
        **{"model": "small_cnn", "image_size": 16, "batch_size": 16, "epochs": 2},
        **{"save_every": 2, "class_weights": "balanced", "precision": "fp32"},
    }
    whole = run_to(make_config(name="whole", **settings), 99)
    assert whole.task.classes == ("red", "green")
    assert (len(whole.task.train), len(whole.task.validation)) == (72, 24)
    part = run_to(make_config(workers=3, **settings), 4)
    assert not part.done  # type: ignore[attr-defined]
    part = run_to(make_config(workers=1, **settings), 99)
    assert part.done  # type: ignore[attr-defined]
    assert_same(everything(part), everything(whole))


@WORKERS_WARNING
def test_many_workers_read_the_same_shards(shards: Path) -> None:
    """After their parent has read, whose handles a fork would share."""
    own = own_function(f"{EXAMPLES / 'tar_shards.py'}:shards", "--data")
    train = own()[0]
    opened = sys.modules["tar_shards"].opened

    def read(rows: list[tuple[Image.Image, int]]) -> list[tuple[bytes, int, int]]:
        return [(image.tobytes(), label, opened.cache_info().misses) for image, label in rows]

    alone = read([train[number] for number in range(len(train))])
    assert [(data, label) for data, label, _ in alone] == [
        (picture(number, number % 2).tobytes(), number % 2) for number in range(72)
    ]
    loader = DataLoader(train, batch_size=3, num_workers=4, collate_fn=read)
    found = [row for batch in loader for row in batch]
    assert [row[:2] for row in found] == [row[:2] for row in alone]
    assert min(misses for *_, misses in found) > len(list(shards.glob("train-*.tar")))


RECORDING = """
import hashlib, os, sys
from pathlib import Path
from amptrain import cli
from amptrain.checkpoint import state
from amptrain.train import Trainer
from torch import nn

def plain(name, task):
    "Without BatchNorm and dropout, its step is the same however its images are shared out."
    return nn.Sequential(nn.Flatten(), nn.Linear(768, 32), nn.ReLU(), nn.Linear(32, 2))

micro_batches = Trainer._micro_batches
def recorded(self, step):
    for batch in micro_batches(self, step):
        with (self.config.run_dir / f"seen-{self.processes.rank}").open("a") as file:
            for image in batch.inputs:
                print(step, hashlib.sha256(image.numpy().tobytes()).hexdigest(), file=file)
        yield batch
    if step == 7 and "KILL" in os.environ and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), 9)

state.build_model, Trainer._micro_batches = plain, recorded
sys.exit(cli.run(cli.train, sys.argv[1:]))
"""


def images_of_steps(run_dir: Path) -> dict[int, set[tuple[str, str]]]:
    """(rank, hash) of the images of each step; one that was made again counts once if it is the
    same."""
    steps: dict[int, set[tuple[str, str]]] = {}
    for path in run_dir.glob("seen-*"):
        for line in path.read_text().splitlines():
            step, image = line.split()
            steps.setdefault(int(step), set()).add((path.name, image))
    return steps


def test_ranks_that_share_shards_are_killed_and_see_each_image_once(
    shards: Path, make_config: Make, tmp_path: Path
) -> None:
    """Two ranks with two workers each, which all read all shards; both are killed in the second
    epoch. What they left is continued by two ranks bit for bit, and by one to rounding, with the
    same images in each step."""
    script = tmp_path / "recording.py"
    script.write_text(RECORDING)
    same = {"data": f"{EXAMPLES / 'tar_shards.py'}:shards", "image_size": 16, "batch_size": 16}
    same |= {"epochs": 2, "save_every": 2, "keep_checkpoints": 9, "augment": "none"}
    same |= {"model": "small_cnn", "precision": "fp32", "optimizer": "sgd", "lr": 0.05}
    whole = make_config(name="whole", workers=2, **same)
    killed, one = (make_config(name=name, workers=2, **same) for name in ("killed", "one"))
    flags = {"augment": "none"}
    done = run(torchrun(whole, str(script), **flags))
    assert done.returncode == 0, done.stderr
    again = torchrun(killed, str(script), **flags)
    again.insert(len(TORCHRUN), "--max-restarts=1")
    done = run(again, KILL="1", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    assert done.returncode == 0, done.stderr
    assert "Continuing at step 6 of 10" in done.stdout
    assert_same(weights(killed), weights(whole))
    assert images_of_steps(killed.run_dir) == images_of_steps(whole.run_dir)

    left = ("config.yaml", "data.json", "checkpoints/step-000000006.pt")
    for name in left:
        (one.run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(killed.run_dir / name, one.run_dir / name)
    done = run([sys.executable, str(script), *command_of(one, **flags)[4:]])
    assert done.returncode == 0, done.stderr
    assert "Continuing at step 6 of 10" in done.stdout
    for name, weight in weights(whole).items():
        torch.testing.assert_close(weights(one)[name], weight, rtol=1e-5, atol=1e-5)

    seen = {
        step: sorted(image for _, image in images)
        for step, images in images_of_steps(whole.run_dir).items()
    }
    alone = images_of_steps(one.run_dir)
    assert alone.keys() == {6, 7, 8, 9}
    for step, images in alone.items():
        assert sorted(image for _, image in images) == seen[step]
    epochs = [[image for step in range(n, n + 5) for image in seen[step]] for n in (0, 5)]
    assert all(len(images) == len(set(images)) == 72 for images in epochs)
    assert set(epochs[0]) == set(epochs[1])
    assert epochs[0] != epochs[1]


def test_an_image_without_its_class_is_named(shards: Path) -> None:
    with tarfile.open(shards / "train-3.tar", "w") as archive:
        member = tarfile.TarInfo("lost.png")
        member.size = len(png(0))
        archive.addfile(member, io.BytesIO(png(0)))
    own = own_function(f"{EXAMPLES / 'tar_shards.py'}:shards", "--data")
    named = r"train-3\.tar has the image lost, and no lost\.cls"
    with pytest.raises(ValueError, match=named):
        own()
    with pytest.raises(subprocess.CalledProcessError) as caught:
        write_index(shards)
    assert re.search(named, caught.value.stderr)


@WORKERS_WARNING
def test_many_workers_read_one_object_store(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a file system that each process opens for itself, after their parent has read."""
    monkeypatch.setenv("SHARDS", shards.as_uri())
    train = own_function(f"{EXAMPLES / 'object_store.py'}:shards", "--data")()[0]
    store = sys.modules["object_store"].store

    def read(rows: list[tuple[Image.Image, int]]) -> list[tuple[bytes, int, int]]:
        return [(image.tobytes(), label, store.cache_info().misses) for image, label in rows]

    alone = read([train[number] for number in range(len(train))])
    assert [row[:2] for row in alone] == [
        (picture(number, number % 2).tobytes(), number % 2) for number in range(72)
    ]
    found = [row for batch in DataLoader(train, 3, num_workers=4, collate_fn=read) for row in batch]
    assert [row[:2] for row in found] == [row[:2] for row in alone]
    assert min(row[2] for row in found) > alone[0][2]


@pytest.fixture
def s3(shards: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The shards in a real server that speaks S3, found as a person's is: by variables."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    for name, value in (
        ("AWS_ACCESS_KEY_ID", "nobody"),
        ("AWS_SECRET_ACCESS_KEY", "nothing"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
        ("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}"),
    ):
        monkeypatch.setenv(name, value)
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", port]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            wait_for(lambda: answers(int(port)))
            store = fsspec.filesystem("s3")
            store.mkdir("bucket")
            for path in shards.iterdir():
                store.pipe_file(f"bucket/shards/{path.name}", path.read_bytes())
            monkeypatch.setenv("SHARDS", "s3://bucket/shards")
            yield
        finally:
            server.kill()


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


@WORKERS_WARNING
@pytest.mark.usefixtures("s3")
def test_a_run_from_s3_continues_bit_for_bit_as_one_from_files(
    shards: Path, make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Begun by workers that their parent's requests came before, stopped, continued by others."""
    settings = {
        "data": f"{EXAMPLES / 'object_store.py'}:shards",
        **{"model": "small_cnn", "image_size": 16, "batch_size": 16, "epochs": 2},
        "precision": "fp32",
    }
    for workers, stop in ((2, 7), (1, 99)):
        part = run_to(make_config(workers=workers, **settings), stop)
    monkeypatch.setenv("SHARDS", shards.as_uri())
    whole = run_to(make_config(name="whole", **settings), 99)
    assert_same(everything(part), everything(whole))


def test_a_shard_that_became_shorter_is_named(shards: Path) -> None:
    train = own_function(f"{EXAMPLES / 'object_store.py'}:shards", "--data")()[0]
    (shards / "train-2.tar").write_bytes((shards / "train-2.tar").read_bytes()[:20000])
    with pytest.raises(OSError, match=r"train-2\.tar gave 0 bytes .* write index\.json anew"):
        train[71]
