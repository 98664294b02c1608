"""pip in each mode: a package stays over `down` and `up` and is there in every mode; torch stays
the image's."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.container.conftest import KeyPair, Ssh
from tests.container.test_compose import Project
from tests.container.test_hardening import container_of
from tests.container.test_jupyter import run_in_kernel
from tests.image.test_pip import make_wheel
from tests.support import ROOT, TORCH, TORCH_BUILD, make_folder

TOKEN = "token-of-the-pip-tests"
INSTALL = "pip install --no-index --find-links /workspace/wheels"
REFUSED = f"The user requested (constraint) torch=={TORCH}"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, key: KeyPair) -> Iterator[Project]:
    """Both services with a read-only root, which leaves pip the least room; wheels lie in the
    workspace."""
    workspace = tmp_path_factory.mktemp("pip") / "workspace"
    wheels = make_folder(workspace / "wheels")
    for name, version in (("smallpackage", "1.2"), ("otherpackage", "3.4"), ("torch", "2.5.1")):
        make_wheel(wheels, name, version)
    shutil.copy(Path(sys.executable).parent / "uv", workspace / "uv")
    subprocess.run(["chown", "-R", "12345:12345", str(workspace)], check=True)
    project = Project(f"test-pip-{workspace.parent.name[-3:]}".lower(), workspace)
    files = (ROOT / "docker-compose.yml", ROOT / "compose/read-only.yml")
    project.environment |= {"COMPOSE_FILE": ":".join(map(str, files))}
    project.environment |= {"SSH_PUBLIC_KEY": key.public, "JUPYTER_TOKEN": TOKEN}
    try:
        project.compose("up", "--detach", "--wait", "jupyter", "ssh")
        yield project
    finally:
        project.compose("down", "--volumes", "--timeout", "5", check=False)


def test_another_torch_is_refused_in_each_kind_of_session(project: Project, ssh: Ssh) -> None:
    jupyter, server = container_of(project, "jupyter"), container_of(project, "ssh")
    wanted = f"{INSTALL} torch==2.5.1"
    answers = {
        "docker exec": jupyter.execute(*wanted.split(), user="dev", check=False),
        "docker exec, login shell": jupyter.execute("bash", "-lc", wanted, user="dev", check=False),
        "kernel": run_in_kernel(jupyter, TOKEN, f"%{wanted}"),
        "ssh command": ssh(server, wanted).stdout,
        "ssh command of root": ssh(server, wanted, user="root").stdout,
        "ssh terminal": ssh(server, options=("-tt",), stdin=f"{wanted}; exit\n").stdout,
        "ssh, bash over stdin": ssh(server, "bash", stdin=wanted).stdout,
    }
    assert {session: REFUSED in answer for session, answer in answers.items()} == dict.fromkeys(
        answers, True
    ), answers
    for container in (jupyter, server):
        shown = container.execute(
            "python", "-c", "import torch; print(torch.__version__)", user="dev"
        )
        assert shown.strip() == TORCH_BUILD


def test_uv_is_held_by_the_same_pins(project: Project, ssh: Ssh) -> None:
    command = (
        "/workspace/uv pip install --dry-run --no-index --find-links /workspace/wheels torch==2.5.1"
    )
    done = ssh(container_of(project, "ssh"), command)
    assert done.returncode != 0
    assert f"torch=={TORCH}" in done.stderr, done.stderr


def test_packages_installed_in_either_door_stay_and_are_in_both(project: Project, ssh: Ssh) -> None:
    assert "Successfully installed" in run_in_kernel(
        container_of(project, "jupyter"), TOKEN, f"%{INSTALL} smallpackage"
    )
    done = ssh(container_of(project, "ssh"), f"{INSTALL} otherpackage")
    assert "Successfully installed" in done.stdout, done.stderr
    project.compose("down")
    project.compose("up", "--detach", "--wait", "jupyter", "ssh")
    show = (
        "import smallpackage, otherpackage; print(smallpackage.__version__, "
        "otherpackage.__version__)"
    )
    assert run_in_kernel(container_of(project, "jupyter"), TOKEN, show).split() == ["1.2", "3.4"]
    assert ssh(container_of(project, "ssh"), f"python -c '{show}'").stdout.split() == ["1.2", "3.4"]
