"""VS Code's "Reopen in Container", by the CLI it uses itself, as a user of the host who has uid
4242."""

import json
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import docker_has_gpu
from tests.container.devcontainer_cli import (
    UID,
    DevContainer,
    copy_repository,
    install_cli,
    read_config,
)
from tests.container.gpu_engine import GpuEngine, running_engine
from tests.image.test_pip import make_wheel
from tests.support import IMAGE, ROOT, TORCH_BUILD, docker, docker_client, make_folder

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="becomes another user of the host, which needs root"
)
CONFIGS = {
    name: ROOT / ".devcontainer" / name / "devcontainer.json" for name in (".", "gpu", "cpu")
}
DIFFERENT = {"name", "hostRequirements", "build", "runArgs"}


@pytest.fixture(scope="module")
def container() -> Iterator[DevContainer]:
    """The dev container of a clone, started; removed in the end with its volume and its images."""
    folder = Path(tempfile.mkdtemp(prefix="devcontainer-"))
    folder.chmod(0o755)
    container = DevContainer(copy_repository(folder / f"clone{uuid.uuid4().hex[:8]}"))
    try:
        container.layers = layers_of(
            docker("inspect", "--format", "{{.Image}}", container.up()).strip()
        )
        yield container
    finally:
        volumes = '{{range .Mounts}}{{if eq .Type "volume"}}{{.Name}} {{end}}{{end}}'
        for name in containers_of(container):
            homes = docker("inspect", "--format", volumes, name).split()
            docker("rm", "--force", name)
            docker("volume", "rm", *homes, check=False)  # none, where the home was not kept
        tags = [
            "--format",
            "{{.Repository}}",
            "--filter",
            f"reference=vsc-{container.repository.name}-*",
        ]
        docker("image", "rm", *docker("image", "ls", *tags).split())
        shutil.rmtree(folder)


def layers_of(image: str) -> list[str]:
    return list(
        json.loads(docker("image", "inspect", "--format", "{{json .RootFS.Layers}}", image))
    )


def containers_of(container: DevContainer) -> list[str]:
    label = f"label=devcontainer.local_folder={container.repository}"
    return docker("ps", "--all", "--quiet", "--filter", label).split()


def test_creation_says_what_was_found(container: DevContainer) -> None:
    assert "doctor: " in container.said
    assert f"/workspace belongs to {UID}:{UID}, work is done as {UID}:{UID}" in container.said
    assert "cuDNN 9.1.0" in container.said


def test_the_user_is_dev_with_the_host_s_ids(container: DevContainer) -> None:
    assert container.execute("id -un; id -u; id -g; pwd").split() == [
        "dev",
        str(UID),
        str(UID),
        container.workspace,
    ]


def test_interpreter_torch_and_the_package_in_the_clone(container: DevContainer) -> None:
    interpreter = read_config(CONFIGS["."])["customizations"]["vscode"]["settings"][
        "python.defaultInterpreterPath"
    ]
    assert container.execute("command -v python").strip() == interpreter
    script = "import torch, torchvision, amptrain; print(torch.__version__, amptrain.__file__)"
    assert container.execute(f"{interpreter} -c '{script}'").split() == [
        TORCH_BUILD,
        "/workspace/amptrain/__init__.py",
    ]


def test_edits_in_the_repository_are_live(container: DevContainer) -> None:
    container.execute(f"echo 'ANSWER = 42' > {container.workspace}/workspace/amptrain/answer.py")
    assert (
        container.execute("python -c 'from amptrain.answer import ANSWER; print(ANSWER)'").strip()
        == "42"
    )
    container.execute(
        f"rm {container.workspace}/workspace/amptrain/answer.py"
    )  # or the next build is another image


def test_training_leaves_files_of_the_host_s_user(container: DevContainer) -> None:
    printed = container.execute(
        "cd workspace && python train_amp.py --device cpu --max-steps 12 --name dev 2>&1"
    )
    assert "accuracy" in printed
    made = [path for path in (container.repository / "workspace/runs").rglob("*")]
    assert any(path.name == "result.json" for path in made)
    assert {(path.stat().st_uid, path.stat().st_gid) for path in made} == {(UID, UID)}


def test_the_editor_s_server_and_pip_have_a_home(container: DevContainer) -> None:
    container.execute(
        "mkdir -p ~/.vscode-server/extensions/some ~/.vscode-server/bin && touch "
        "~/.vscode-server/bin/x && mkdir -p ~/.cache"
    )
    make_wheel(make_folder(container.repository / "wheels"), "smallpackage", "1.2")
    container.execute("pip install --no-index --find-links wheels smallpackage")
    assert container.execute("ls -d ~/.local/lib/python3*/site-packages/smallpackage*")
    owners = container.execute(
        "stat -c %u ~ ~/.vscode-server ~/.vscode-server/extensions ~/.local ~/.cache"
    ).split()
    assert set(owners) == {str(UID)}


def test_the_image_s_entrypoint_prepared_it(container: DevContainer) -> None:
    process, facts = container.execute("cat /proc/1/comm /run/pytorch-cuda/mode.json").split(
        maxsplit=1
    )
    assert (process, json.loads(facts)["mode"]) == ("tini", "program")


def test_shared_memory_and_privileges(container: DevContainer) -> None:
    shown = container.execute(
        "df --output=size -B1 /dev/shm | tail -1; grep NoNewPrivs /proc/self/status"
    ).split()
    assert shown == [str(8 * 1024**3), "NoNewPrivs:", "1"]


def test_a_rebuild_keeps_the_home(container: DevContainer) -> None:
    container.execute("echo kept > ~/.kept && touch ~/.vscode-server/extensions/kept")
    before = containers_of(container)
    container.up("--remove-existing-container")
    assert set(containers_of(container)).isdisjoint(before)
    assert container.execute(
        "cat ~/.kept && stat -c %u ~/.vscode-server/extensions/kept"
    ).split() == ["kept", str(UID)]


def test_the_image_is_reused_and_nothing_is_pulled(container: DevContainer) -> None:
    """All comes from the Dockerfile, whose base is there: no features, no image of somebody
    else's."""
    for path in CONFIGS.values():
        assert not read_config(path).keys() & {"features", "image", "dockerComposeFile"}
    # The last two hold the commit, which the CLI does not know, and the working directory.
    reused = layers_of(IMAGE)[:-2]
    assert container.layers[: len(reused)] == reused


def test_without_a_gpu_none_is_asked_for(container: DevContainer) -> None:
    if docker_has_gpu():
        pytest.skip("this host has a GPU: the request is right here")
    shown = docker(
        "inspect", "--format", "{{json .HostConfig.DeviceRequests}}", containers_of(container)[0]
    )
    assert json.loads(shown) in (None, [])


# --- the three configurations


def test_they_differ_in_the_gpu_alone() -> None:
    main, gpu, cpu = (read_config(path) for path in CONFIGS.values())
    same = [
        {key: value for key, value in config.items() if key not in DIFFERENT}
        for config in (main, gpu, cpu)
    ]
    assert same[0] == same[1] == same[2]
    assert (
        main["runArgs"]
        == cpu["runArgs"]
        == [argument for argument in gpu["runArgs"] if argument != "--gpus=all"]
    )
    for path, config in zip(CONFIGS.values(), (main, gpu, cpu), strict=True):
        assert (path.parent / config["build"]["dockerfile"]).resolve() == ROOT / "Dockerfile"
        assert (path.parent / config["build"]["context"]).resolve() == ROOT
        assert config["build"]["target"] == "devcontainer"
    assert {"ms-python.python", "ms-toolsai.jupyter"} <= set(
        main["customizations"]["vscode"]["extensions"]
    )
    assert main["forwardPorts"] == [int(port) for port in main["portsAttributes"]] == [8888, 6006]


@pytest.fixture(scope="module")
def gpu_engine() -> Iterator[GpuEngine]:
    with running_engine() as engine:
        yield engine


REQUEST = [{"Driver": "", "Count": -1, "DeviceIDs": None, "Capabilities": [["gpu"]], "Options": {}}]


@pytest.mark.parametrize(("name", "request_"), [(".", REQUEST), ("gpu", REQUEST), ("cpu", None)])
def test_where_docker_has_nvidia_s_runtime(
    name: str, request_: list[dict[str, Any]] | None, gpu_engine: GpuEngine, tmp_path: Path
) -> None:
    """The small copy of the image has no shell for the CLI to go on with: what counts is what it
    asked Docker for."""
    config = read_config(CONFIGS[name])
    del config["build"]
    small = {"image": IMAGE, "mounts": [], "updateRemoteUserUID": False}
    (tmp_path / ".devcontainer.json").write_text(json.dumps({**config, **small}))
    subprocess.run(
        [
            install_cli(),
            "up",
            "--docker-path",
            docker_client(),
            "--workspace-folder",
            str(tmp_path),
        ],
        env={**os.environ, "DOCKER_HOST": gpu_engine.address},
        check=False,
        capture_output=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )
    label = f"label=devcontainer.local_folder={tmp_path}"
    [container] = gpu_engine.client("ps", "--all", "--quiet", "--filter", label).stdout.split()
    shown = gpu_engine.client(
        "inspect", "--format", "{{json .HostConfig.DeviceRequests}}", container
    ).stdout
    assert json.loads(shown) == request_
