"""The examples: each learns, and continues bit for bit where Ctrl-C stopped it."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import amptrain
import pytest
import torch

EXAMPLES = Path(amptrain.__file__).parents[1] / "examples"
LEARNS = {
    # script: what its last line shows, and the bound it passes
    "text_transformer.py": (r"loss ([\d.]+)", lambda loss: loss < 0.6),
    "gan.py": (r"critic ([\d.]+)", lambda loss: 0.5 < loss < 0.8),  # log 2: it can't tell any more
    "segmentation.py": (r"IoU ([\d.]+)", lambda iou: iou > 0.9),
}


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
    assert set(LEARNS) == {path.name for path in EXAMPLES.glob("*.py")}


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
