"""What stands in .env arrives in every session of every service; any folder's name will do."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.container.conftest import KeyPair, Ssh
from tests.container.test_compose import Project
from tests.container.test_jupyter import run_in_kernel
from tests.support import IMAGE, ROOT, Container, docker, docker_client, free_port, make_folder

TOKEN = "token-of-the-env-file"
OWN = {"TZ": "US/Eastern", "HF_TOKEN": "hf of mine", "HF_ENDPOINT": "http://mirror.example"}
SHOW = 'python3 -c \'import os, time; print(time.tzname[0], os.environ["HF_TOKEN"], sep="|")\'; env'


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory, key: KeyPair) -> Iterator[Project]:
    """A clone in a folder of a Chinese name, with a .env saved on Windows; jupyter and ssh run."""
    folder = make_folder(tmp_path_factory.mktemp("clone") / "深度学习")
    shutil.copy(ROOT / "docker-compose.yml", folder)
    shutil.copytree(ROOT / "compose", folder / "compose")
    make_folder(folder / "mydata", 12345)
    settings = {
        **OWN,
        "JUPYTER_TOKEN": TOKEN,
        "SSH_PUBLIC_KEY": key.public,
        "ACCELERATOR": "cpu",
        "WORKSPACE": "mydata",
        "IMAGE": IMAGE,
        "COMPOSE_PROJECT_NAME": f"test-env-{os.getpid()}",
        "JUPYTER_PORT": str(free_port()),
        "SSH_PORT": str(free_port()),
    }
    lines = [f'{name}="{value}"\r\n' for name, value in settings.items()]
    (folder / ".env").write_bytes(("\ufeff" + "".join(lines)).encode())
    project = Project("unused", folder)
    project.environment = dict(os.environ)
    project.command = [docker_client(), "compose", "--project-directory", str(folder)]
    try:
        project.compose("up", "--detach", "--wait", "jupyter", "ssh")
        yield project
    finally:
        project.compose("--profile", "train", "down", "--volumes", "--timeout", "5", check=False)


def container_of(project: Project, service: str) -> Container:
    """The service's container."""
    return Container(project.compose("ps", "--quiet", service).strip())


def test_env_file_reaches_every_kind_of_session(clone: Project, ssh: Ssh) -> None:
    jupyter, server = container_of(clone, "jupyter"), container_of(clone, "ssh")
    answers = {
        "kernel": run_in_kernel(
            jupyter, TOKEN, f"import subprocess as s; print(s.getoutput({SHOW!r}))"
        ),
        "exec": jupyter.execute("bash", "-lc", SHOW, user="dev"),
        "ssh command": ssh(server, SHOW).stdout,
        "ssh terminal": ssh(server, options=("-tt",), stdin=f"{SHOW}; exit\n").stdout,
        "train": clone.compose("run", "--rm", "-T", "--entrypoint", "sh", "train", "-c", SHOW),
    }
    lacking = {name: text for name, text in answers.items() if "EST|hf of mine" not in text}
    assert lacking == {}
    sessions = "".join(answers[name] for name in ("kernel", "ssh command", "ssh terminal"))
    assert TOKEN not in sessions
    assert not re.search(r"^(WORKSPACE|SSH_PUBLIC_KEY|COMPOSE_PROJECT_NAME)=", sessions, re.M)


def test_workspace_without_a_dot_is_a_folder(clone: Project) -> None:
    container_of(clone, "ssh").execute("touch", "/workspace/x", user="dev")
    assert (Path(clone.command[-1]) / "mydata" / "x").stat().st_uid == 12345


def test_service_comes_back_after_a_reboot_unless_stopped_by_hand(clone: Project) -> None:
    for service in ("jupyter", "ssh"):
        policy = "{{.HostConfig.RestartPolicy.Name}}"
        shown = docker("inspect", "--format", policy, container_of(clone, service).name)
        assert shown.strip() == "unless-stopped"


def test_folder_with_no_letter_that_compose_can_use_gives_a_project(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "深度学习")
    shutil.copy(ROOT / "docker-compose.yml", folder)
    shutil.copytree(ROOT / "compose", folder / "compose")
    done = subprocess.run(
        [docker_client(), "compose", "config", "--format", "json"],
        cwd=folder,
        env={name: v for name, v in os.environ.items() if name != "COMPOSE_PROJECT_NAME"},
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["name"] == "pytorch-cuda"
