"""The request for a GPU reaches the runtime, on a host that has none (tests/standins plays NVIDIA's
toolkit)."""

import json
import os
import re
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import docker_has_gpu
from tests.container.gpu_engine import GpuEngine, running_engine
from tests.support import IMAGE, ROOT, docker_client

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="a second dockerd in its own network namespace needs root"
)
SERVICES = ["jupyter", "ssh", "train"]


@pytest.fixture(scope="module")
def engine() -> Iterator[GpuEngine]:
    with running_engine() as engine:
        yield engine


@pytest.fixture
def project(tmp_path: Path) -> list[str]:
    """`docker compose` on the project's own files, under a name of its own."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    (tmp_path / "empty.env").touch()
    directory = ["--project-directory", str(ROOT), "--env-file", str(tmp_path / "empty.env")]
    return ["compose", "--project-name", name, *directory, "--profile", "train"]


def up(
    engine: GpuEngine,
    project: list[str],
    service: str,
    accelerator: str,
    workspace: Path,
    **settings: str,
) -> str:
    """Start one service of docker-compose.yml; what its container sees: variables and device
    nodes."""
    environment = {
        "ACCELERATOR": accelerator,
        "WORKSPACE": str(workspace),
        "JUPYTER_PORT": "8888",
        "SSH_PORT": "2222",
        **settings,
    }
    started = engine.client(
        *project, "up", "--detach", "--no-build", service, environment=environment
    )
    try:
        assert started.returncode == 0, started.stderr
        container = engine.client(
            *project, "ps", "--quiet", service, environment=environment
        ).stdout.strip()
        # Of process 1: what CDI adds is not in the environment of `docker exec`.
        variables = engine.client(
            "exec", container, "/usr/bin/cat", "/proc/1/environ"
        ).stdout.replace("\0", "\n")
        nodes = engine.client("exec", container, "/usr/bin/ls", "/dev").stdout
        devices = engine.client(
            "inspect", "--format", "{{json .HostConfig.DeviceRequests}}", container
        ).stdout
        return f"{variables}{nodes}DeviceRequests={devices}"
    finally:
        engine.client(*project, "down", "--volumes", "--timeout", "0", environment=environment)


@pytest.mark.parametrize("service", SERVICES)
def test_gpu_setting_asks_nvidia_s_hook_for_all_gpus(
    engine: GpuEngine, project: list[str], service: str, tmp_path: Path
) -> None:
    up(engine, project, service, "gpu", tmp_path)
    assert engine.requests() == [
        {
            "NVIDIA_VISIBLE_DEVICES": "all",
            "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
            "NVIDIA_REQUIRE_CUDA": "cuda>=12.0",
        }
    ]


@pytest.mark.parametrize("gpus", ["0", "1,2", "GPU-5f4a3c21-0000-1111-2222-333344445555", "none"])
def test_gpus_chooses_which(
    engine: GpuEngine, project: list[str], gpus: str, tmp_path: Path
) -> None:
    up(engine, project, "jupyter", "gpu", tmp_path, GPUS=gpus)
    (request,) = engine.requests()
    assert request["NVIDIA_VISIBLE_DEVICES"] == gpus


UUID = "GPU-5f4a3c21-0000-1111-2222-333344445555"


@pytest.mark.parametrize(("gpus", "node"), [("1", "nvidia1"), (UUID, "nvidia2")])
def test_gpus_chooses_one_by_cdi(
    engine: GpuEngine, project: list[str], gpus: str, node: str, tmp_path: Path
) -> None:
    seen = up(engine, project, "ssh", "cdi", tmp_path, GPUS=gpus).splitlines()
    assert [name for name in seen if name.startswith("nvidia")] == [node]


def test_several_by_cdi_are_listed_as_the_guide_says(
    engine: GpuEngine, project: list[str], tmp_path: Path
) -> None:
    guide = (ROOT / "docs/extending.md").read_text().partition("## Which GPUs")[2]
    example = re.search(r"```yaml\n(services:\n.*?)```", guide, re.DOTALL)
    assert example
    (tmp_path / "override.yml").write_text(example[1])
    files = f"{ROOT}/docker-compose.yml:{tmp_path}/override.yml"
    seen = up(engine, project, "jupyter", "cdi", tmp_path, COMPOSE_FILE=files).splitlines()
    assert [name for name in seen if name.startswith("nvidia")] == ["nvidia1", "nvidia2"]


def test_several_in_a_variable_are_refused_by_docker_in_the_guide_s_words(
    engine: GpuEngine, project: list[str], tmp_path: Path
) -> None:
    environment = {"ACCELERATOR": "cdi", "GPUS": "1,2", "WORKSPACE": str(tmp_path)}
    try:
        command = [*project, "up", "--detach", "--no-build", "jupyter"]
        refused = engine.client(*command, environment=environment)
    finally:
        engine.client(*project, "down", "--volumes", environment=environment)
    words = "unresolvable CDI devices nvidia.com/gpu=1,2"
    assert refused.returncode != 0
    assert words in refused.stderr
    assert f"`{words}`" in (ROOT / "docs/extending.md").read_text()


@pytest.mark.parametrize("service", SERVICES)
def test_cdi_setting_brings_the_device_node(
    engine: GpuEngine, project: list[str], service: str, tmp_path: Path
) -> None:
    seen = up(engine, project, service, "cdi", tmp_path).splitlines()
    assert "nvidia0" in seen
    assert "STANDIN_CDI_DEVICE=all" in seen
    assert engine.requests() == []


@pytest.mark.parametrize("service", SERVICES)
def test_cpu_setting_asks_for_nothing(
    engine: GpuEngine, project: list[str], service: str, tmp_path: Path
) -> None:
    seen = up(engine, project, service, "cpu", tmp_path).splitlines()
    assert not [
        line for line in seen if line.startswith(("nvidia", "NVIDIA_VISIBLE_DEVICES", "STANDIN"))
    ]
    assert "DeviceRequests=null" in seen
    assert engine.requests() == []


def test_gpus_all_of_docker_run_beats_the_image_s_silence(engine: GpuEngine) -> None:
    done = engine.client(
        "run", "--rm", "--network=none", "--gpus=all", "--entrypoint=/usr/bin/env", IMAGE
    )
    assert done.returncode == 0, done.stderr
    (request,) = engine.requests()
    assert request["NVIDIA_VISIBLE_DEVICES"] == "all"


def test_nvidia_as_the_runtime_hands_out_no_gpu_unasked(engine: GpuEngine) -> None:
    # On hosts where nvidia is the default runtime, NVIDIA_VISIBLE_DEVICES in the image would give
    # every GPU away.
    done = engine.client(
        "run", "--rm", "--network=none", "--runtime=nvidia", "--entrypoint=/usr/bin/env", IMAGE
    )
    assert done.returncode == 0, done.stderr
    assert "NVIDIA_REQUIRE_CUDA=cuda>=12.0" in done.stdout
    assert "NVIDIA_VISIBLE_DEVICES" not in done.stdout


@pytest.mark.skipif(docker_has_gpu(), reason="this host's engine does hand out GPUs")
def test_without_nvidia_s_toolkit_docker_says_so(project: list[str], tmp_path: Path) -> None:
    environment = {**os.environ, "ACCELERATOR": "gpu", "WORKSPACE": str(tmp_path)}
    up = [docker_client(), *project, "up", "--no-build", "train"]
    try:
        done = subprocess.run(
            up, env=environment, check=False, capture_output=True, text=True, timeout=60
        )
    finally:
        down = [docker_client(), *project, "down", "--volumes"]
        subprocess.run(down, env=environment, check=True, capture_output=True, timeout=60)
    assert done.returncode != 0
    # The README's first troubleshooting entry quotes this.
    assert 'could not select device driver "nvidia" with capabilities: [[gpu]]' in done.stderr


def test_compose_parses_what_each_setting_asks_for(project: list[str], tmp_path: Path) -> None:
    asked = {}
    for accelerator in ("gpu", "cdi", "cpu"):
        environment = {**os.environ, "ACCELERATOR": accelerator, "WORKSPACE": str(tmp_path)}
        config = [docker_client(), *project, "config", "--format", "json"]
        done = subprocess.run(
            config, env=environment, check=True, capture_output=True, text=True, timeout=60
        )
        services = json.loads(done.stdout)["services"]
        asked[accelerator] = [
            [
                (device["driver"], device.get("count"), device.get("device_ids"))
                for device in services[name]
                .get("deploy", {})
                .get("resources", {})
                .get("reservations", {})
                .get("devices", [])
            ]
            for name in SERVICES
        ]
    assert asked == {
        "gpu": [[("nvidia", None, ["all"])]] * 3,
        "cdi": [[("cdi", None, ["nvidia.com/gpu=all"])]] * 3,
        "cpu": [[]] * 3,
    }
