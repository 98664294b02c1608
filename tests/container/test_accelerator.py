"""`make` finds out which accelerator there is: with real engines that have NVIDIA's runtime, CDI
alone, or neither.

Device files are looked for below a folder of the test, since this host may have none, or real ones.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from host.accelerator import find_accelerator
from tests.container.gpu_engine import STANDINS, GpuEngine, running_engine
from tests.support import ROOT, docker_client

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="a second dockerd in its own network namespace needs root"
)


@pytest.fixture(scope="module")
def with_runtime() -> Iterator[GpuEngine]:
    with running_engine(image=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def cdi_alone() -> Iterator[GpuEngine]:
    with running_engine(runtime=False, image=False) as engine:
        yield engine


@pytest.fixture
def gpu_host(tmp_path: Path) -> Path:
    """A root folder with the node of NVIDIA's driver."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()
    return tmp_path


def found(engine: GpuEngine, root: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    monkeypatch.setenv("DOCKER_HOST", engine.address)
    accelerator = find_accelerator(docker_client(), root)
    return accelerator.name, accelerator.why


def test_the_runtime_and_a_gpu(
    with_runtime: GpuEngine, gpu_host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert found(with_runtime, gpu_host, monkeypatch) == ("gpu", "Docker has the NVIDIA runtime")


def test_windows_subsystem_for_linux(
    with_runtime: GpuEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "dxg").touch()
    assert found(with_runtime, tmp_path, monkeypatch)[0] == "gpu"


def test_the_runtime_without_a_gpu_would_fail_at_start(
    with_runtime: GpuEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, why = found(with_runtime, tmp_path, monkeypatch)
    assert (name, "shows no GPU" in why) == ("cpu", True)


def test_cdi_alone(cdi_alone: GpuEngine, gpu_host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specifications = gpu_host / str(STANDINS / "cdi").removeprefix("/")
    shutil.copytree(STANDINS / "cdi", specifications)
    assert found(cdi_alone, gpu_host, monkeypatch)[0] == "cdi"


def test_a_gpu_that_docker_can_t_hand_out(
    cdi_alone: GpuEngine, gpu_host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, why = found(cdi_alone, gpu_host, monkeypatch)
    assert name == "cpu"
    assert "nvidia-ctk runtime configure --runtime=docker" in why


def test_no_gpu_at_all(
    cdi_alone: GpuEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert found(cdi_alone, tmp_path, monkeypatch) == ("cpu", "no NVIDIA GPU was found")


def test_the_command_prints_a_word_for_scripts_and_the_reason_for_people(
    cdi_alone: GpuEngine,
) -> None:
    environment = {**os.environ, "DOCKER_HOST": cdi_alone.address}
    command = [sys.executable, "-m", "host.accelerator"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() in {"cpu", "cdi", "gpu"}
    assert done.stderr.startswith("==> ")
