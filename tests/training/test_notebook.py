"""The notebook runs from top to bottom, and shows what its texts say."""

import base64
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from .conftest import WORKSPACE

IN_IMAGE = Path("/opt/workspace")
NOTEBOOK = (WORKSPACE if WORKSPACE.is_dir() else IN_IMAGE) / "notebooks" / "amp_quickstart.ipynb"


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The notebook after its run, in an empty directory."""
    executed = nbformat.read(NOTEBOOK, as_version=4)
    directory = tmp_path_factory.mktemp("notebook")
    NotebookClient(
        executed,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(directory)}},
    ).execute()
    assert list(directory.iterdir()) == [], "the notebook leaves files where it is"
    return executed


def text(notebook: Any) -> str:
    return "".join(output.text for output in outputs(notebook) if output.output_type == "stream")


def outputs(notebook: Any) -> list[Any]:
    return [
        output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
    ]


def test_nothing_is_said_but_what_the_cells_print(notebook: Any) -> None:
    assert [output.text for output in outputs(notebook) if output.get("name") == "stderr"] == []


def test_autocast_picks_the_precision(notebook: Any) -> None:
    shown = dict(
        re.findall(
            r"^(weights|linear layer|relu|cross entropy) +(\w+)$", text(notebook), re.MULTILINE
        )
    )
    assert shown == {
        "weights": "float32",
        "linear layer": "float16",
        "relu": "float16",
        "cross entropy": "float32",
    }


def test_gradients_vanish_without_scaling_and_live_with_it(notebook: Any) -> None:
    shares = {
        name: [
            float(share)
            for share in re.search(rf"^{name} +((?: *\d+\.\d)+)$", text(notebook), re.MULTILINE)[
                1
            ].split()
        ]  # type: ignore[index]
        for name in ("FP32", "fp16", "fp16, loss × 2¹⁶")
    }
    assert max(shares["FP32"]) == 0
    assert shares["fp16"][0] > 95
    assert shares["fp16"][-1] == 0
    assert max(shares["fp16, loss × 2¹⁶"]) < 1


def test_the_overflow_is_skipped_and_the_scale_backs_off(notebook: Any) -> None:
    assert "step 12: skipped, scale 131072 → 65536, weights unchanged: True" in text(notebook)
    found = re.search(
        r"loss: (\S+) at the start, (\S+) after 30 steps; skipped steps: (\[.*\])", text(notebook)
    )
    assert found
    first, last, skipped = found.groups()
    assert float(last) < 0.6 * float(first)
    assert skipped == "[12]"


def test_both_runs_of_digits_learn(notebook: Any) -> None:
    accuracies = dict(
        re.findall(r"^(fp32|bf16|fp16): accuracy (\d+\.\d)%", text(notebook), re.MULTILINE)
    )
    assert len(accuracies) == 2
    assert all(float(accuracy) >= 97 for accuracy in accuracies.values())


def test_each_part_has_its_picture(notebook: Any) -> None:
    """Three, of which the last is the one that followed the runs: a picture that was changed in
    place."""
    pictures = [output for output in outputs(notebook) if "image/png" in output.get("data", {})]
    assert len(pictures) == 3
    assert all(base64.b64decode(p.data["image/png"]).startswith(b"\x89PNG") for p in pictures)
    assert [picture.output_type for picture in pictures] == ["display_data"] * 3


def test_it_is_committed_without_outputs() -> None:
    """Outputs would be of some machine, and of some day."""
    committed = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(committed)
    code = [cell for cell in committed.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
    assert committed.metadata.kernelspec.name == "python3"
