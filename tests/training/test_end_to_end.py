"""A person's own photos, as they lie on a disk, from the first command to predictions: typed in a
shell, killed twice, and the same to the bit as a run that nobody disturbed."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from safetensors.torch import load_file

from .support import lines_of

TRAIN = (
    "amptrain train --device cpu --data imagefolder:photos --val-fraction 0.25 --skip-broken "
    "--model mobilenet_v3_small --weights five_classes.pth --image-size 32 --epochs 3 "
    "--global-batch-size 8 --grad-accum-steps 2 --ema-decay 0.9 --save-every 4 --log-every 3"
)
TEXT = {"text": True, "errors": "surrogateescape"}  # names of any encoding are printed
COLOURS = {"cat": 0, "dog": 1, "狐": 2}
EACH = 16
"""Plain photos of a class."""
STEPS = 6
"""Of an epoch: 12 and three more of each class, and what is odd, are trained on."""


def pixels(channel: int, number: int) -> np.ndarray:
    rng = np.random.default_rng([channel, number])
    noise = rng.integers(0, 90, (32, 44, 3), dtype=np.uint8)
    noise[..., channel] += 120
    return noise


def make_photos(root: Path) -> None:
    """Three classes, one folder too deep, not split, with what cameras, scanners, editors and other
    programs leave; two photos are broken."""
    pets = root / "photos/pets"
    for name, channel in COLOURS.items():
        (pets / name).mkdir(parents=True)
        for number in range(EACH):
            Image.fromarray(pixels(channel, number)).save(pets / name / f"{number:02}.jpg")
    cat, dog, fox = (pets / name for name in COLOURS)
    # What is no data.
    for folder in (root / "photos/__MACOSX/cat", cat / ".ipynb_checkpoints", dog / "@eaDir"):
        folder.mkdir(parents=True)
        Image.fromarray(pixels(2, 99)).save(folder / "00.jpg")
    (pets / ".ipynb_checkpoints").mkdir()
    (cat / "._00.jpg").write_bytes(b"\0\5\26\7")
    (dog / ".DS_Store").write_bytes(b"Bud1")
    (dog / "notes.txt").write_text("taken in spring")
    # A folder elsewhere, and a name of another encoding.
    (root / "camera").mkdir()
    Image.fromarray(pixels(1, 20)).save(root / "camera/20.PNG")
    (dog / "more").symlink_to(root / "camera")
    gbk = os.fsencode(fox) + b"/" + "狐狸".encode("gbk") + b".png"
    with open(gbk, "wb") as file:
        Image.fromarray(pixels(2, 21)).save(file, "png")
    # Kinds of images.
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.fromarray(pixels(0, 22)).save(cat / "phone.jpg", exif=turned)
    grey = pixels(0, 23)[..., 0]
    Image.fromarray(grey.astype(np.uint16) * 257).save(cat / "16 bits.png")
    Image.fromarray(grey.astype(np.float32) / 255).save(cat / "float.tiff")
    Image.fromarray(pixels(1, 24)).convert("RGBA").save(dog / "transparent.png")
    Image.fromarray(pixels(1, 25)).convert("CMYK").save(dog / "print.jpg")
    palette = Image.fromarray(pixels(2, 26)).quantize(16)
    palette.save(fox / "palette.png", transparency=0)
    palette.save(fox / "moves.gif", save_all=True, append_images=[palette, palette])
    # Broken ones: one in the middle of a copy, one that is something else.
    whole = (cat / "00.jpg").read_bytes()
    (cat / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (fox / "page.jpg").write_text("<html>404</html>")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder the commands are typed in."""
    root = tmp_path_factory.mktemp("home")
    make_photos(root)
    torch.manual_seed(0)
    model = torchvision.models.mobilenet_v3_small(num_classes=5)
    torch.save(model.state_dict(), root / "five_classes.pth")
    return root


def typed(home: Path, line: str, expect: int = 0) -> str:
    done = subprocess.run(
        ["sh", "-c", line], cwd=home, capture_output=True, check=False, timeout=120, **TEXT
    )
    assert done.returncode == expect, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def disturbed(home: Path, line: str, step: int, number: signal.Signals) -> tuple[int, str]:
    """Type `line`, and send the signal once the line of `step` is shown: exit code, and output."""
    with subprocess.Popen(
        ["sh", "-c", f"exec {line}"], cwd=home, stdout=subprocess.PIPE, **TEXT
    ) as process:
        assert process.stdout is not None
        shown = []
        for text in process.stdout:
            shown.append(text)
            if re.match(rf"step +{step}/", text):
                process.send_signal(number)
    return process.returncode, "".join(shown)


@pytest.fixture(scope="module")
def runs(home: Path) -> tuple[Path, Path]:
    """The run that was left alone, and the one that was killed in its second epoch, asked to stop
    in its third, and started again each time by the same command."""
    said = typed(home, f"{TRAIN} --name whole")
    assert "3 classes" in said
    assert "five_classes.pth" in said
    line = f"{TRAIN} --name parts"
    code, said = disturbed(home, line, STEPS + 3, signal.SIGKILL)
    assert code == -signal.SIGKILL
    code, said = disturbed(home, line, 2 * STEPS + 3, signal.SIGTERM)
    assert code == 128 + signal.SIGTERM
    started = int(re.findall(r"Continuing at step (\d+) of", said)[0])
    assert STEPS < started < 2 * STEPS
    stopped = int(re.findall(r"Stopped as asked at step (\d+)\.", said)[0])
    assert 2 * STEPS < stopped < 3 * STEPS
    said = typed(home, line)
    assert f"Continuing at step {stopped} of {3 * STEPS}" in said
    return home / "runs/whole", home / "runs/parts"


def test_two_kills_change_no_bit(runs: tuple[Path, Path]) -> None:
    whole, parts = (
        {
            name: json.loads((run / "result.json").read_text())[name]
            for name in ("weights_sha256", "accuracy", "steps", "broken_images")
        }
        for run in runs
    )
    assert parts == whole
    assert whole["broken_images"] == 2
    for name in ("model.safetensors", "best.safetensors"):
        one, other = (load_file(run / name) for run in runs)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_the_log_is_that_of_one_run(runs: tuple[Path, Path]) -> None:
    whole, parts = map(lines_of, runs)
    assert parts == whole
    assert [line["step"] for line in whole if line["kind"] == "epoch"] == [6, 12, 18]


def test_broken_photos_are_listed_once(runs: tuple[Path, Path], home: Path) -> None:
    whole, parts = ((run / "broken.txt").read_text().splitlines() for run in runs)
    assert parts == whole
    assert [Path(line.partition(":")[0]).name for line in whole] == ["cut.jpg", "page.jpg"]


def test_both_runs_can_be_used_and_say_the_same(runs: tuple[Path, Path], home: Path) -> None:
    found = [typed(home, f"amptrain predict {run.name} photos", expect=1) for run in runs]
    assert found[0] == found[1]
    assert len(found[0].splitlines()) == 1 + 3 * EACH + 9 + 2
    judged = [
        typed(home, f"amptrain evaluate {run.name} --data imagefolder:photos") for run in runs
    ]
    assert judged[0].replace("whole", "parts") == judged[1]
    assert all(name in judged[0] for name in COLOURS)
    typed(home, "amptrain export parts --format torch")
    assert (runs[1] / "best-exported.pt2").exists()
