"""The data sets, their augmentation, and what is said of files that are wrong."""

import hashlib
import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import amptrain
import numpy as np
import pytest
import torch
from amptrain.config import DataConfig
from amptrain.data.datasets import VALIDATION, Dataset, Images, open_dataset
from amptrain.data.loader import make_loader
from amptrain.data.order import MicroBatchKeys
from amptrain.data.sources.digits import DIGITS
from amptrain.data.transforms import center_crop, flip, random_resized_crop, sample_rng, shift
from amptrain.errors import ConfigError
from PIL import Image

Folder = Callable[..., Path]


@pytest.fixture
def image_folder(tmp_path: Path) -> Folder:
    """Makes train/ and val/ of two classes with some images."""

    def make(train: int = 6, val: int = 4) -> Path:
        rng = np.random.default_rng(0)
        for part, count in (("train", train), ("val", val)):
            for label in ("cat", "dog"):
                folder = tmp_path / "images" / part / label
                folder.mkdir(parents=True)
                for number in range(count):
                    pixels = rng.integers(0, 255, (40, 50, 3), dtype=np.uint8)
                    Image.fromarray(pixels).save(folder / f"{number}.png")
        return tmp_path / "images"

    return make


def folder_dataset(root: Path) -> Dataset:
    return open_dataset(DataConfig(data=f"imagefolder:{root}", image_size=16), seed=0)


def test_digits_are_the_ones_described() -> None:
    assert hashlib.sha256(DIGITS.read_bytes()).hexdigest() == (
        "1e601fad312d6f3a6ba211d3c823fc72732cecc1abf59c91346ea95e5a4ca645"
    )
    notice = (DIGITS.parent / "NOTICE").read_text()
    assert "CC BY 4.0" in notice
    assert "10.24432/C50P49" in notice


def test_digits_split_is_fixed_and_apart() -> None:
    task = open_dataset(DataConfig(augment="none"), seed=0)
    assert (len(task.train), len(task.validation), len(task.classes)) == (1437, 360, 10)
    pixels = [
        {data[(VALIDATION, index)].image.numpy().tobytes() for index in range(len(data))}
        for data in (task.train, task.validation)
    ]
    assert not pixels[0] & pixels[1]
    values = torch.stack([task.train[(0, index)].image for index in range(1437)]).double()
    assert task.mean == pytest.approx([float(values.mean())], rel=0.01)
    assert task.std == pytest.approx([float(values.std())], rel=0.01)


def test_cifar10_is_read_as_torchvision_writes_it(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        content = {"data": rng.integers(0, 255, (4, 3072), dtype=np.uint8), "labels": [1, 2, 3, 9]}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    task = open_dataset(DataConfig(data="cifar10", data_dir=tmp_path), seed=0)
    assert (len(task.train), len(task.validation)) == (20, 4)
    sample = task.validation[(VALIDATION, 3)]
    assert (sample.image.shape, sample.image.dtype, sample.label) == ((3, 32, 32), torch.uint8, 9)
    assert np.array_equal(sample.image.flatten().numpy(), content["data"][3])

    (folder / "data_batch_2").write_bytes(b"not a pickle")
    with pytest.raises(ConfigError, match="data_batch_2 is not a file of CIFAR-10"):
        open_dataset(DataConfig(data="cifar10", data_dir=tmp_path), seed=0)
    (folder / "data_batch_2").write_bytes(pickle.dumps(Path("/")))
    with pytest.raises(ConfigError, match="it names pathlib"):
        open_dataset(DataConfig(data="cifar10", data_dir=tmp_path), seed=0)


def test_image_folder_is_read(image_folder: Folder) -> None:
    task = folder_dataset(image_folder())
    assert (task.classes, len(task.train), len(task.validation)) == (("cat", "dog"), 12, 8)
    assert task.train[(0, 11)].label == 1
    assert task.train[(0, 0)].image.shape == (3, 16, 16)


def test_an_empty_class_is_named(image_folder: Folder) -> None:
    root = image_folder()
    for file in (root / "train" / "dog").iterdir():
        file.unlink()
    with pytest.raises(ConfigError, match=f"The class {root}/train/dog has no image"):
        folder_dataset(root)


def test_a_class_that_is_only_in_validation_is_named(image_folder: Folder) -> None:
    root = image_folder()
    (root / "val" / "emu").mkdir()
    with pytest.raises(ConfigError, match="have different classes: emu"):
        folder_dataset(root)


def test_a_broken_image_is_named_and_replaced_in_training_only(image_folder: Folder) -> None:
    root = image_folder()
    broken = root / "train" / "cat" / "1.png"
    broken.write_bytes(broken.read_bytes()[:60])
    (root / "val" / "cat" / "0.png").write_bytes(b"")
    task = folder_dataset(root)
    sample = task.train[(0, 1)]
    assert sample.label == 0
    assert torch.equal(sample.image, task.train[(0, 2)].image)
    assert sample.broken[0].startswith(f"{broken}: ")
    assert task.validation[(VALIDATION, 0)].label == -1


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_augmentation_does_not_depend_on_workers(workers: int, image_folder: Folder) -> None:
    """Nor on what was read before: the same image is the same in a loader that starts there."""
    for task in (open_dataset(DataConfig(), seed=0), folder_dataset(image_folder())):
        keys = [(epoch, index) for epoch in (0, 1) for index in range(8)]
        expected = torch.stack([task.train[key].image for key in keys])
        read = read_all(task.train, keys, workers)
        assert torch.equal(read, expected)
        assert torch.equal(read_all(task.train, keys[8:], workers), expected[8:])
        assert not torch.equal(expected[:8], expected[8:])  # another epoch, another augmentation


def read_all(data: Images, keys: list[tuple[int, int]], workers: int) -> torch.Tensor:
    batches = [MicroBatchKeys(keys[start : start + 4]) for start in range(0, len(keys), 4)]
    return torch.cat(
        [batch.images for batch in make_loader(data, batches, workers, 2, pin_memory=False)]
    )


def test_seed_changes_augmentation_and_validation_has_none() -> None:
    one, other = (open_dataset(DataConfig(), seed=seed) for seed in (0, 1))
    assert any(
        not torch.equal(one.train[(0, i)].image, other.train[(0, i)].image) for i in range(8)
    )
    assert all(
        torch.equal(one.validation[(VALIDATION, i)].image, other.validation[(VALIDATION, i)].image)
        for i in range(8)
    )


def test_shift_and_flip_move_pixels_as_they_say() -> None:
    image = np.arange(1, 17, dtype=np.uint8).reshape(1, 4, 4)
    seen = {shift(image, 1, sample_rng(0, 0, index)).tobytes() for index in range(200)}
    assert len(seen) == 9
    assert image.tobytes() in seen
    assert {flip(image, sample_rng(0, 0, i)).tobytes() for i in range(20)} == {
        image.tobytes(),
        image[:, :, ::-1].tobytes(),
    }


def test_crops_have_the_size_asked_for() -> None:
    gradient = Image.fromarray(np.tile(np.arange(200, dtype=np.uint8), (100, 1)))
    assert center_crop(gradient, 32).size == (32, 32)
    middle = np.asarray(center_crop(gradient, 32)).mean()
    assert middle == pytest.approx(99.5, abs=1)
    crops = [
        np.asarray(random_resized_crop(gradient, 32, sample_rng(0, 0, index)))
        for index in range(50)
    ]
    assert {crop.shape for crop in crops} == {(32, 32)}
    assert np.std([crop.mean() for crop in crops]) > 10
    sliver = Image.fromarray(np.zeros((1, 400), dtype=np.uint8))
    assert random_resized_crop(sliver, 32, sample_rng(0, 0, 0)).size == (32, 32)


STRIPES = """
import numpy as np
from amptrain.data.datasets import ArrayImages, Dataset

USAGE = "stripes:N (N images with stripes)"


def open(argument, config, seed):
    count = int(argument)
    labels = np.arange(count) % 2
    images = np.zeros((count, 1, 8, 8), np.uint8)
    images[labels == 0, :, ::2] = 255
    images[labels == 1, :, :, ::2] = 255
    part = ArrayImages(images, labels, seed)
    return Dataset(
        name=config.data, classes=("across", "down"), train=part, validation=part,
        shape=(1, 8, 8), mean=(127.5,), std=(64.0,), in_memory=True,
    )
"""


def test_a_kind_of_data_set_is_one_file(tmp_path: Path) -> None:
    """As CONTRIBUTING.md says."""
    shutil.copytree(Path(amptrain.__file__).parent, tmp_path / "amptrain")
    (tmp_path / "amptrain/data/sources/stripes.py").write_text(STRIPES)
    flags = ["--data=stripes:64", "--model=small_cnn", "--epochs=4", "--name=one"]
    done = subprocess.run(
        [sys.executable, "-m", "amptrain", "train", *flags],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "runs/one/result.json").read_text())
    assert result["data"] == "stripes:64"
