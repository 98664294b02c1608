"""Fixtures of the training tests. They need no Docker: they run in the image, and anywhere torch
is."""

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

WORKSPACE = Path(__file__).parents[2] / "workspace"
if WORKSPACE.is_dir():
    sys.path.insert(0, str(WORKSPACE))
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(WORKSPACE), os.environ.get("PYTHONPATH", "")]
    ).strip(os.pathsep)

from amptrain.checkpoint import state  # noqa: E402
from amptrain.config import TrainConfig, from_flat  # noqa: E402
from amptrain.report.log import RunLog  # noqa: E402


def pytest_configure(config: pytest.Config) -> None:
    """Deprecated API is an error: torch moves a name, warns for some releases, and then removes
    it."""
    for category in ("FutureWarning", "DeprecationWarning"):
        config.addinivalue_line("filterwarnings", f"error::{category}")


@pytest.hookimpl(
    tryfirst=True
)  # before fixtures; not a wrapper, around which pytest's own could not clean up
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip GPU tests without a GPU; with REQUIRE_GPU=1 they fail."""
    if "gpu" in item.keywords and not torch.cuda.is_available():
        if os.environ.get("REQUIRE_GPU") == "1":
            pytest.fail("REQUIRE_GPU=1, and torch finds no CUDA device.")
        pytest.skip("torch finds no CUDA device; REQUIRE_GPU=1 makes this a failure")


@pytest.fixture(autouse=True)
def _same_start() -> None:
    """One thread: such small models gain nothing by more, and lose much on a busy machine."""
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_worker_is_left() -> Iterator[None]:
    """Workers ignore SIGTERM, so Python's exit waits for those that a loop did not end."""
    yield
    assert multiprocessing.active_children() == []


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., TrainConfig]:
    """A short run of digits on the CPU in `tmp_path`; settings by name."""

    def make(**settings: object) -> TrainConfig:
        short = {"name": "run", "runs": tmp_path, "device": "cpu", "epochs": 1, "batch_size": 128}
        return from_flat({**short, **settings})

    return make


@pytest.fixture
def mlp(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with BatchNorm and dropout, but no convolution: those in fp16 take seconds each on a
    CPU."""

    def build(name: str, task: object) -> nn.Module:
        hidden = [nn.Linear(64, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Dropout(0.1)]
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(48, 10))

    monkeypatch.setattr(state, "build_model", build)


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What runs say, while they say it."""
    said: list[str] = []
    monkeypatch.setattr(RunLog, "message", lambda self, text: said.append(text))
    return said
