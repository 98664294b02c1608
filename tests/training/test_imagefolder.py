"""Folders of images as they lie on people's disks: what is data, what is told, what is refused."""

import json
import os
import random
import re
import shutil
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from amptrain.config import DataConfig
from amptrain.data import contents
from amptrain.data.datasets import VALIDATION, Dataset, FileImages, hold_out, open_dataset
from amptrain.data.decode import Reading, crop_resize, retried, to_rgb
from amptrain.data.files import FileList
from amptrain.data.look import find_broken
from amptrain.data.transforms import center_box
from amptrain.distributed import Processes
from amptrain.errors import ConfigError, TrainingError
from amptrain.signals import StopSignal
from amptrain.train import Trainer, train
from PIL import Image

from tests.training.support import Make

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def make_folder(root: Path, *classes: str, train: int = 6, val: int = 2) -> Path:
    """`root`/train and `root`/val with images in a colour for each class."""
    for part, count in (("train", train), ("val", val)):
        for label, name in enumerate(classes):
            (root / part / name).mkdir(parents=True, exist_ok=True)
            for number in range(count):
                colour = [number * 9, number * 7, number * 5]
                colour[label % 3] += 120
                image = Image.new("RGB", (24, 20), tuple(colour))  # type: ignore[arg-type]
                image.save(root / part / name / f"{number:03}.png")
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "pets", "cat", "dog")


def opened(root: Path | str, **settings: object) -> Dataset:
    config = DataConfig(data=f"imagefolder:{root}", image_size=16, **settings)  # type: ignore[arg-type]
    return open_dataset(config, seed=0)


def names(images: object) -> list[str]:
    assert isinstance(images, FileImages)
    return [os.fsdecode(images.files.name(index)) for index in range(len(images))]


def test_what_other_programs_leave_is_no_data(root: Path) -> None:
    for part in ("train", "val"):
        for name in (".ipynb_checkpoints", "__MACOSX", "@eaDir", "lost+found"):
            shutil.copytree(root / part / "cat", root / part / name)
            shutil.copytree(root / part / "cat", root / part / "dog" / name)
    (root / "train" / "cat" / "._000.png").write_bytes(b"\0\5\26\7")
    (root / "train" / "cat" / "notes.txt").write_text("no image")
    (root / "train" / "cat" / "Thumbs.db").write_text("")
    dataset = opened(root)
    assert (dataset.classes, len(dataset.train), len(dataset.validation)) == (("cat", "dog"), 12, 4)
    said = "\n".join(dataset.messages)
    assert "Training: 12 images of 2 classes (cat 6, dog 6)." in said
    assert "Left out: 1 file of other kinds (1 .txt)." in said
    assert re.search(r"Left out, files and folders that are hidden: \d+\.", said)


def test_links_are_followed_and_circles_told(root: Path, tmp_path: Path) -> None:
    more = tmp_path / "more"
    more.mkdir()
    (root / "train" / "cat" / "005.png").rename(more / "005.png")
    (root / "train" / "cat" / "linked").symlink_to(more)
    (more / "up").symlink_to(root / "train" / "cat")
    (root / "train" / "cat" / "gone.png").symlink_to(tmp_path / "nothing.png")
    dataset = opened(root)
    assert len(dataset.train) == 12
    assert "linked/005.png" in "\n".join(names(dataset.train))
    said = "\n".join(dataset.messages)
    assert "1 link in a circle" in said
    assert "1 link to nothing" in said


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("where", ["train", "train/cat", "train/cat/below"])
def test_a_folder_that_may_not_be_read_is_named(root: Path, where: str) -> None:
    folder = root / where
    folder.mkdir(exist_ok=True)
    folder.chmod(0)
    try:
        with pytest.raises(ConfigError) as refused:
            opened(root)
    finally:
        folder.chmod(0o755)
    assert f"{folder} cannot be read: it has mode 000 and belongs to uid {os.geteuid()}" in str(
        refused.value
    )


@pytest.mark.parametrize("name", ["valid", "validation", "Val"])
def test_validation_has_many_names(root: Path, name: str) -> None:
    (root / "val").rename(root / name)
    assert len(opened(root).validation) == 4


def test_a_test_folder_validates_and_that_is_said(root: Path) -> None:
    (root / "val").rename(root / "test")
    dataset = opened(root)
    assert len(dataset.validation) == 4
    assert any("has no val/: validation is on" in text for text in dataset.messages)


def test_without_a_split_one_is_made(root: Path) -> None:
    """From the seed, a part of each class, and no image is in both."""
    shutil.rmtree(root / "val")
    with_train = opened(root, val_fraction=0.34)
    alone = opened(root / "train", val_fraction=0.34)
    assert names(alone.validation) == names(with_train.validation)
    held = names(alone.validation)
    assert [name.split("/")[0] for name in held] == ["cat", "cat", "dog", "dog"]
    assert sorted([*held, *names(alone.train)]) == sorted(names(opened(root).train) + names(
        opened(root).validation
    ))  # fmt: skip
    assert any("34% of each class are held out" in text for text in alone.messages)
    other = open_dataset(DataConfig(data=f"imagefolder:{root}", val_fraction=0.34), seed=1)
    assert names(other.validation) != held
    labels = np.array([0] * 10 + [1] * 2 + [2])
    kept, out = hold_out(labels, 0.2, 0)
    assert np.bincount(labels[out], minlength=3).tolist() == [2, 1, 0]
    assert len(kept) + len(out) == 13


def test_one_folder_too_deep_is_passed_through(root: Path, tmp_path: Path) -> None:
    for part in ("train", "val"):
        (root / part).rename(tmp_path / part)
        (root / part).mkdir()
        (tmp_path / part).rename(root / part / "images")
    assert opened(root).classes == ("cat", "dog")
    assert opened(root.parent).classes == ("cat", "dog")


def test_one_class_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one class only, cat/: there is nothing to tell apart"):
        opened(make_folder(tmp_path / "one", "cat"))
    (tmp_path / "flat").mkdir()
    shutil.copy(tmp_path / "one/train/cat/000.png", tmp_path / "flat")
    with pytest.raises(ConfigError, match="has no class folders, but 1 image\\."):
        opened(tmp_path / "flat")


@pytest.mark.parametrize("empty", [True, False])
def test_a_class_without_validation_images_is_trained(root: Path, empty: bool) -> None:
    shutil.rmtree(root / "val" / "dog")
    if empty:
        (root / "val" / "dog").mkdir()
    dataset = opened(root)
    assert (len(dataset.classes), len(dataset.validation)) == (2, 2)
    assert any("for validation: 1 class (dog)" in text for text in dataset.messages)


def test_the_home_folder_is_found(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(root.parent))
    assert len(opened("~/pets").train) == 12


def test_names_in_any_encoding_are_read_and_listed(make_config: Make, root: Path) -> None:
    good = os.fsencode(root / "train" / "cat") + b"/\xcd\xbc.png"
    shutil.copy(root / "train/cat/000.png", good)
    dataset = opened(root)
    index = next(i for i in range(13) if b"\xcd\xbc" in dataset.train.files.name(i))  # type: ignore[attr-defined]
    assert dataset.train[(0, index)].label == 0
    Path(os.fsdecode(good)).write_bytes(b"bad")
    config = make_config(
        data=f"imagefolder:{root}", image_size=16, model="small_cnn", batch_size=4,
        workers=0, skip_broken=True,
    )  # fmt: skip
    assert train(config) == 0
    assert b"\xcd\xbc.png: " in (config.run_dir / "broken.txt").read_bytes()


def upright(tmp_path: Path, orientation: int, ending: str) -> Image.Image:
    pixels = np.zeros((40, 80, 3), dtype=np.uint8)
    pixels[:20, :40] = 255  # only the upper left is white
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(pixels)
    turns = {3: 180, 6: 90, 8: 270}
    turned = image.rotate(turns.get(orientation, 0), expand=True)
    path = tmp_path / f"{orientation}.{ending}"
    turned.save(path, exif=exif, **({"quality": 95} if ending == "jpg" else {}))
    with Image.open(path) as file:
        return crop_resize(file, (0, 0, 80, 40), 16, Reading())


@pytest.mark.parametrize("ending", ["jpg", "png", "tif", "webp"])
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_photos_are_upright(tmp_path: Path, orientation: int, ending: str) -> None:
    pixels = np.asarray(upright(tmp_path, orientation, ending)).astype(int)[..., 0]
    assert pixels[:6, :6].min() > 200
    assert pixels[10:, :].max() < 60
    assert pixels[:6, 10:].max() < 60


def test_16_bits_and_floats_are_scaled(tmp_path: Path) -> None:
    ramp = np.linspace(0, 65535, 256).reshape(16, 16)
    Image.fromarray(ramp.astype(np.uint16)).save(tmp_path / "a.png")
    Image.fromarray((ramp / 65535).astype(np.float32)).save(tmp_path / "b.tif")
    Image.fromarray(ramp.astype(">u2")).save(tmp_path / "c.tif")
    for name in ("a.png", "b.tif", "c.tif"):
        with Image.open(tmp_path / name) as file:
            pixels = np.asarray(to_rgb(file, Reading()))
        assert np.abs(pixels[..., 0].flatten().astype(int) - np.arange(256)).max() <= 1, name


def test_what_is_transparent_is_white(tmp_path: Path) -> None:
    hidden = Image.new("RGBA", (8, 8), (255, 0, 255, 0))
    palette = Image.new("P", (8, 8), 1)
    palette.putpalette([0, 0, 0, 255, 0, 0])
    hidden.save(tmp_path / "a.png")
    palette.save(tmp_path / "b.png", transparency=1)
    hidden.convert("LA").save(tmp_path / "c.png")
    for name in ("a.png", "b.png", "c.png"):
        with Image.open(tmp_path / name) as file:
            assert np.asarray(to_rgb(file, Reading())).min() == 255, name
            behind = to_rgb(file, Reading(background="#102030"))
            assert behind.getcolors() == [(64, (16, 32, 48))], name


@pytest.mark.parametrize("kind", [np.uint16, np.int32, np.float32])
def test_the_white_level_says_what_is_white(tmp_path: Path, kind: type) -> None:
    """Of a microscope's 12 bits in 16, for one; above it is white, nothing is no number."""
    values = np.array([[0, 2048, 4095, 9000]], dtype=kind)
    if kind is np.float32:
        values[0, 0] = np.nan
    Image.fromarray(values).save(tmp_path / "a.tif")
    with Image.open(tmp_path / "a.tif") as file:
        pixels = np.asarray(to_rgb(file, Reading(white_level=4095)))
    assert pixels[0, :, 0].tolist() == [0, 128, 255, 255]


def test_a_data_set_reads_as_the_settings_say(root: Path) -> None:
    turned = Image.Exif()
    turned[0x0112] = 6
    for part in ("train", "val"):
        for image in (root / part).rglob("*.png"):
            pixels = np.zeros((20, 20, 4), dtype=np.uint8)
            pixels[:, :10] = 255  # the left is white, the right transparent
            Image.fromarray(pixels).save(image, exif=turned)
    usual, other = (
        opened(root, **more) for more in ({}, {"exif_orientation": False, "background": "black"})
    )
    for part in ("train", "validation"):
        seen = [getattr(data, part)[(VALIDATION, 0)].image[0] for data in (usual, other)]
        assert seen[0].min() == 255
        assert (seen[1][:, 0].min(), seen[1][:, -1].max()) == (255, 0)
    upright = opened(root, background="black").validation[(VALIDATION, 0)].image[0]
    assert (upright[0].min(), upright[-1].max()) == (255, 0)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"background": "invisible"}, "--background is 'invisible'; it needs a colour"),
        ({"background": "#ffffff80"}, "it needs a colour"),
        ({"white_level": 0.0}, "--white-level is 0.0; it needs to be above 0"),
        ({"data": "digits", "background": "black"}, "say how image files are read"),
        ({"data": "digits", "exif_orientation": False}, "digits gives arrays or tensors"),
    ],
)
def test_a_reading_that_cannot_be_is_refused(settings: dict[str, object], word: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(word)):
        open_dataset(DataConfig(**settings), seed=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("ending", ["jfif", "avif", "gif", "webp", "bmp", "tif", "jpeg", "ppm"])
def test_each_kind_of_file_is_read(root: Path, ending: str) -> None:
    red = Image.new("RGB", (20, 20), (250, 5, 5))
    more: dict[str, object] = {}
    if ending in {"gif", "webp"}:  # an animation, whose second picture is blue
        more = {"save_all": True, "append_images": [Image.new("RGB", (20, 20), (0, 0, 250))]}
    red.save(root / "val" / "cat" / f"999.{ending.upper()}", **more, format={"jfif": "JPEG"}.get(
        ending
    ))  # fmt: skip
    if ending == "jpeg":
        red.convert("CMYK").save(root / "val" / "cat" / "999.JPEG")
    sample = opened(root).validation[(VALIDATION, 2)]
    assert sample.broken == ()
    assert sample.image[0].float().mean() > 225
    assert sample.image[2].float().mean() < 40


def test_a_large_jpeg_is_decoded_small(tmp_path: Path) -> None:
    """And looks the same as when it is decoded whole."""
    across, down = np.meshgrid(np.arange(1200), np.arange(900))
    pixels = np.stack([across % 256, down % 256, (across + down) % 256], 2).astype(np.uint8) // 2
    Image.fromarray(pixels).resize((1200, 900)).save(tmp_path / "a.jpg", quality=95)
    box = center_box(1200, 900)
    with Image.open(tmp_path / "a.jpg") as file:
        small = np.asarray(crop_resize(file, box, 64, Reading())).astype(int)
        assert file.size == (300, 225)  # 787 pixels of the crop, over 2 × 64, is at least 4
    with Image.open(tmp_path / "a.jpg") as file:
        whole = file.convert("RGB").resize((64, 64), Image.Resampling.BILINEAR, box=box)
    assert np.abs(small - np.asarray(whole).astype(int)).mean() < 2


def test_an_error_that_passes_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    monkeypatch.setattr("amptrain.data.decode.WAITS", (0.0, 0.0))
    answers: list[object] = [OSError(errno.ESTALE, "stale"), OSError(errno.EIO, "io"), "pixels"]

    def read() -> object:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    assert retried(read) == "pixels"
    answers[:] = [OSError(errno.ENOENT, "gone"), "pixels"]
    with pytest.raises(OSError, match="gone"):
        retried(read)


def test_files_take_few_bytes_and_are_shared() -> None:
    """A list of paths takes some 1 kB a file, in each worker (pytorch#13246)."""
    some = [
        f"n{label:08}/n{label:08}_{number}.JPEG" for label in range(2) for number in range(5000)
    ]
    files = FileList("/data", [(some[:5000], [9] * 5000, 0), (some[5000:], [9] * 5000, 1)])
    assert files.path(5000) == "/data/" + some[5000]
    assert files.nbytes / len(files) < 60
    chosen = files.select(np.array([1, 5000, 9999]))
    assert [chosen.path(i) for i in range(3)] == ["/data/" + some[i] for i in (1, 5000, 9999)]
    assert chosen.labels.tolist() == [0, 1, 1]


def settings(root: Path, **more: object) -> dict[str, object]:
    return {
        "data": f"imagefolder:{root}", "image_size": 16, "model": "small_cnn", "batch_size": 4,
        "workers": 0, **more,
    }  # fmt: skip


def test_broken_images_are_found_before_the_first_step(make_config: Make, root: Path) -> None:
    """And the flag that is advised then continues the same run."""
    whole = (root / "val/dog/001.png").read_bytes()
    (root / "val/dog/001.png").write_bytes(whole[:60])
    config = make_config(**settings(root))
    with pytest.raises(TrainingError, match=r"val/dog/001.png: .*--skip-broken"):
        train(config)
    assert not list((config.run_dir / "checkpoints").glob("*"))
    metrics = config.run_dir / "metrics.jsonl"
    assert not metrics.exists() or not metrics.read_text()  # no step was made
    (root / "val/dog/001.png").write_bytes(whole)
    assert train(make_config(**settings(root, epochs=1))) == 0
    (root / "train/cat/001.png").write_bytes(whole[:60])
    with pytest.raises(TrainingError, match="skip-broken"):
        train(make_config(**settings(root, epochs=2)))
    assert train(make_config(**settings(root, epochs=2, skip_broken=True))) == 0
    for _ in range(2):  # the same number each time the finished run is asked
        assert '"broken_images": 1' in (config.run_dir / "result.json").read_text()
        assert train(make_config(**settings(root, epochs=2, skip_broken=True))) == 0


def test_a_batch_of_broken_images_is_passed(make_config: Make, root: Path) -> None:
    shutil.copy(root / "val/dog/001.png", root / "val/dog/002.png")
    (root / "val/dog/002.png").write_bytes(b"no image")  # the fifth: alone in its batch
    assert train(make_config(**settings(root, skip_broken=True))) == 0


def test_validation_without_a_readable_image_is_told_as_that(make_config: Make, root: Path) -> None:
    for path in (root / "val").rglob("*.png"):
        path.write_bytes(b"no image")
    with pytest.raises(TrainingError, match="None of the images to validate with could be read"):
        train(make_config(**settings(root, skip_broken=True)))


def test_too_many_broken_images_stop_the_run(
    make_config: Make, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("amptrain.data.feed.FEW_BROKEN", 3)
    for path in sorted((root / "train/cat").iterdir())[:4]:
        path.write_bytes(b"no image")
    with pytest.raises(TrainingError, match="4 of 16 images could not be read"):
        train(make_config(**settings(root, skip_broken=True)))


def test_a_truncated_image_is_found_unless_there_are_many(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = root / "train/cat/000.png"
    path.write_bytes(path.read_bytes()[:60])
    (root / "train/cat/001.png").write_bytes(b"no image")
    files = opened(root).train.files  # type: ignore[attr-defined]
    assert [text.split(":")[0][-7:] for text in find_broken([files], 2)] == ["000.png", "001.png"]
    monkeypatch.setattr("amptrain.data.look.DECODE_BYTES", 0)
    assert [text.split(":")[0][-7:] for text in find_broken([files], 2)] == ["001.png"]


def test_a_run_notices_that_its_data_changed(
    make_config: Make, root: Path, messages: list[str]
) -> None:
    assert train(make_config(**settings(root))) == 0
    more = settings(root, epochs=2)
    shutil.copy(root / "train/cat/000.png", root / "train/cat/900.png")
    with pytest.raises(ConfigError, match=r"12 files then, 13 now \(cat 6 → 7\)"):
        train(make_config(**more))
    (root / "train/cat/900.png").unlink()
    for part in ("train", "val"):
        (root / part / "cat").rename(root / part / "zebra")
    with pytest.raises(ConfigError, match="gone: cat; new: zebra"):
        train(make_config(**more))
    for part in ("train", "val"):
        (root / part / "zebra").rename(root / part / "cat")
    make_folder(root, "emu")
    with pytest.raises(ConfigError, match="2 then, 3 now; gone: none; new: emu"):
        train(make_config(**more))
    for part in ("train", "val"):
        shutil.rmtree(root / part / "emu")
    (root / "val/dog/001.png").unlink()
    assert train(make_config(**more)) == 0
    assert any("4 files then, 3 now (dog 2 → 1)" in text for text in messages)
    image = root / "train/cat/000.png"
    image.write_bytes(image.read_bytes() + b"more")
    assert train(make_config(**settings(root, epochs=3))) == 0
    assert any("12 files then, 12 now (cat 6 with other names or sizes)" in m for m in messages)


def test_a_start_that_came_to_no_step_leaves_changed_data_to_be_told_again(
    make_config: Make, root: Path, messages: list[str]
) -> None:
    """A kill, or a broken image among the new ones: the next start took them for looked at."""
    assert train(make_config(**settings(root))) == 0
    (root / "val/dog/001.png").write_bytes(b"no image")
    for start in (1, 2):
        with pytest.raises(TrainingError, match=r"dog/001\.png"):
            train(make_config(**settings(root, epochs=2)))
        assert sum("4 files then, 4 now (dog 2 with other" in text for text in messages) == start


def test_the_same_data_at_another_path_is_the_same(
    make_config: Make, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train(make_config(**settings(root))) == 0
    shutil.copytree(root, tmp_path / "copy")
    monkeypatch.chdir(tmp_path)
    for number, path in enumerate((f"{root}/", tmp_path / "copy", Path("copy")), start=2):
        assert train(make_config(**{**settings(root), "data": f"imagefolder:{path}"},
                                 epochs=number)) == 0  # fmt: skip


def test_contents_hold_names_in_any_encoding() -> None:
    files = FileList("/data", [([os.fsdecode(b"\xcd\xbc.png")], [3], 0)])
    found = contents.contents_of([os.fsdecode(b"\xcd")], files, files)
    assert found["classes"] == ["\\xcd"]


def write_table(root: Path, ending: str, split: bool) -> Path:
    rows = [
        (path.relative_to(root), path.parent.name, path.parts[-3])
        for path in sorted(root.rglob("*.png"))
    ]
    file = root / f"list.{ending}"
    if ending == "csv":
        lines = ["Path,label,split"] + [f"{p},{label},{s if split else ''}" for p, label, s in rows]
    else:
        lines = [json.dumps({"image": str(p), "class": label, **({"split": s} if split else {})})
                 for p, label, s in rows]  # fmt: skip
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_a_table_of_paths_and_labels_is_data(root: Path, ending: str) -> None:
    file = write_table(root, ending, split=True)
    dataset = open_dataset(DataConfig(data=f"table:{file}", image_size=16), seed=0)
    folder = opened(root)
    assert (dataset.classes, len(dataset.train)) == (("cat", "dog"), 12)
    for index in (0, 11):
        assert torch.equal(dataset.train[(3, index)].image, folder.train[(3, index)].image)
    file = write_table(root, ending, split=False)
    dataset = open_dataset(DataConfig(data=f"table:{file}", image_size=16), seed=0)
    assert (len(dataset.train), len(dataset.validation)) == (12, 4)
    file.write_text("name,colour\na,b\n" if ending == "csv" else '{"name": "a"}\n')
    with pytest.raises(ConfigError, match=r"line [12] has name.*it needs a path"):
        open_dataset(DataConfig(data=f"table:{file}"), seed=0)


OWN = """
import random
import numpy as np, torch
from torch.utils.data import Dataset

class Noise(Dataset):
    classes = ["a", "b"]
    def __init__(self, n, as_float): self.n, self.as_float = n, as_float
    def __len__(self): return self.n
    def __getitem__(self, index):
        value = torch.rand(1).item() + random.random() + np.random.rand()
        if self.as_float:
            return torch.full((3, 8, 8), value + index), index % 2
        return np.full((20, 24, 3), int(value * 80), dtype=np.uint8), index % 2

def floats(): return Noise(32, True), Noise(8, True)
def pixels(): return Noise(32, False), Noise(8, False)
def wrong(): return 5
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    file = tmp_path / "own_noise.py"
    file.write_text(OWN)
    return file


@pytest.mark.parametrize("function", ["floats", "pixels"])
def test_a_data_set_of_ones_own_is_a_function_of_epoch_and_index(own: Path, function: str) -> None:
    """Whatever its transforms draw from torch, NumPy and Python."""
    dataset = open_dataset(DataConfig(data=f"{own}:{function}", image_size=16), seed=0)
    first = dataset.train[(0, 3)]
    for draw in (torch.manual_seed, random.seed, np.random.seed):
        draw(7)  # whatever was drawn before
    before = torch.get_rng_state()
    assert torch.equal(first.image, dataset.train[(0, 3)].image)
    assert not torch.equal(first.image, dataset.train[(1, 3)].image)
    assert torch.equal(before, torch.get_rng_state())
    assert dataset.shape == ((3, 8, 8) if function == "floats" else (3, 16, 16))
    with pytest.raises(ConfigError, match="returned int"):
        open_dataset(DataConfig(data=f"{own}:wrong"), seed=0)
    with pytest.raises(ConfigError, match=r"no function 'absent'|no function absent"):
        open_dataset(DataConfig(data=f"{own}:absent"), seed=0)


ITEMS = """
from collections import namedtuple
import numpy as np, torch

pixels = np.arange(8 * 8 * 3, dtype=np.uint8).reshape(8, 8, 3)
floats = torch.arange(192.0).view(3, 8, 8)
one_hot = torch.tensor([0.0, 1.0])
batch = torch.zeros(4, 3, 8, 8)

def of(item):
    return type("Items", (list,), {"classes": ["a", "b"]})([item] * 4)
def hugging_face():
    return of({"pixel_values": floats, "labels": 1}), of({"pixel_values": floats, "labels": 1})
def with_names(): return (of({"image": pixels, "label": 1}),) * 2
def named(): return (of(namedtuple("Row", "label image")(1, pixels)),) * 2
def unnamed(): return (of(namedtuple("Row", "x y")(floats, torch.tensor(1))),) * 2
def listed(): return (of([floats, torch.tensor([1])]),) * 2
def longer(): return (of((pixels, 1, "its name")),) * 2

def one_hot_label(): return (of((floats, one_hot)),) * 2
def whole_batch(): return (of({"pixel_values": batch, "labels": torch.zeros(4)}),) * 2
def several_images(): return (of(([floats, floats], 1)),) * 2
def other_names(): return (of({"input_ids": floats, "y": 1}),) * 2
def image_alone(): return (of(floats),) * 2
def float_array(): return (of((pixels / 255, 1)),) * 2
def no_image(): return (of(("a.png", 1)),) * 2
"""


@pytest.mark.parametrize(
    "function", ["hugging_face", "with_names", "named", "unnamed", "listed", "longer"]
)
def test_an_item_may_be_a_dict_a_tuple_or_a_list(tmp_path: Path, function: str) -> None:
    (tmp_path / "items.py").write_text(ITEMS)
    config = DataConfig(data=f"{tmp_path}/items.py:{function}", image_size=8, augment="none")
    dataset = open_dataset(config, seed=0)
    for images in (dataset.train, dataset.validation):
        image, label, _ = images[(-1, 3)]
        assert (image.shape, label) == ((3, 8, 8), 1)
        assert image.float().std() > 20  # no label taken for the image


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("one_hot_label", r"the label tensor\(\[0., 1.\]\); .* one-hot label that is label.argmax"),
        ("whole_batch", r"float tensor of shape \(4, 3, 8, 8\) as its image; it needs one image"),
        ("several_images", r"has a list as its image; it needs one image"),
        ("other_names", r"is a dict with input_ids, y; .* pixel_values or image or img, labels or"),
        ("image_alone", r"is a Tensor; it needs to be \(image, label\)"),
        ("float_array", r"float64 ndarray of shape \(8, 8, 3\).* or a float tensor"),
        ("no_image", r"has a str as its image"),
    ],
)
def test_an_item_that_is_no_image_with_its_class_is_told(
    tmp_path: Path, function: str, sentence: str
) -> None:
    (tmp_path / "items.py").write_text(ITEMS)
    with pytest.raises(ConfigError, match=f"Item 0 of your data set .*{sentence}"):
        open_dataset(DataConfig(data=f"{tmp_path}/items.py:{function}"), seed=0)


class Stopped(Trainer):
    """Is asked to stop after three steps."""

    def _train_step(self, step: int) -> None:
        super()._train_step(step)
        if step == 2:
            self.stop.number = 15


@pytest.mark.parametrize("kind", ["own", "table", "imagefolder"])
def test_a_run_continues_to_the_bit(make_config: Make, own: Path, root: Path, kind: str) -> None:
    """From the middle of an epoch, with random transforms of one's own too."""
    data = {
        "own": f"{own}:pixels",
        "table": f"table:{write_table(root, 'csv', split=False)}",
        "imagefolder": f"imagefolder:{root}",
    }[kind]
    hashes = []
    for name in ("whole", "stopped"):
        config = make_config(**settings(root, name=name, epochs=3) | {"data": data})
        if name == "stopped":
            config.run_dir.mkdir(parents=True)
            trainer = Stopped(config, Processes("cpu"), StopSignal())
            with closing(trainer.report.log), closing(trainer.feed):
                assert not trainer.fit()
            assert trainer.state.progress.step == 3
        assert train(config) == 0
        hashes.append(json.loads((config.run_dir / "result.json").read_text())["weights_sha256"])
    assert hashes[0] == hashes[1]
