"""The compose file as a newcomer uses it: up, reach the service, down; what must last lasts."""

import json
import os
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ROOT, TROUBLE, docker, docker_client, free_port, wait_until


class Project:
    """One compose project of its own name, ports and volumes, on a copy of the workspace."""

    def __init__(self, name: str, workspace: Path) -> None:
        self.ports = {"JUPYTER_PORT": str(free_port()), "SSH_PORT": str(free_port())}
        self.environment = {
            **os.environ,
            **self.ports,
            "ACCELERATOR": "cpu",
            "WORKSPACE": str(workspace),
        }
        self.command = [
            docker_client(),
            "compose",
            "--project-name",
            name,
            "--project-directory",
            str(ROOT),
        ]

    def compose(self, *arguments: str, check: bool = True, timeout_s: float = 120) -> str:
        """Run `docker compose` in this project and return stdout."""
        done = subprocess.run(
            [*self.command, *arguments],
            env=self.environment,
            check=False,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )
        assert not check or done.returncode == 0, (
            f"compose {' '.join(arguments)}\n{done.stdout}\n{done.stderr}"
        )
        return done.stdout

    def log(self, service: str) -> str:
        """The service's log so far."""
        return self.compose("logs", "--no-color", "--no-log-prefix", service)


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    workspace = tmp_path / "workspace"
    subprocess.run(["cp", "-r", str(ROOT / "workspace"), str(workspace)], check=True)
    subprocess.run(["chown", "-R", "12345:12345", str(workspace)], check=True)
    project = Project(f"test-{os.getpid()}", workspace)
    yield project
    project.compose("--profile", "train", "down", "--volumes", "--timeout", "5")


def test_jupyter_prints_a_link_that_opens(project: Project) -> None:
    project.compose("up", "--detach", "--wait", "jupyter")
    log = project.log("jupyter")
    link = re.search(rf"http://127\.0\.0\.1:{project.ports['JUPYTER_PORT']}/\S*token=\w+", log)
    assert link, log
    with urllib.request.urlopen(link[0].replace("/lab", "/api/status"), timeout=10) as reply:
        assert json.load(reply)["kernels"] == 0
    trouble = [line for line in log.splitlines() if TROUBLE.search(line)]
    assert not trouble, trouble


def test_published_ports_are_reachable_from_this_host_only(project: Project) -> None:
    config = json.loads(project.compose("config", "--format", "json"))
    published = [
        port for service in config["services"].values() for port in service.get("ports", [])
    ]
    assert len(published) == 2
    assert {port["host_ip"] for port in published} == {"127.0.0.1"}


def test_host_keys_outlive_the_container_and_differ_between_projects(project: Project) -> None:
    def fingerprint() -> str:
        project.compose("up", "--detach", "--wait", "ssh")
        found = wait_until(
            lambda: re.search(r"SHA256:\S+", project.log("ssh")), "a fingerprint in the log"
        )
        return found[0]

    first = fingerprint()
    project.compose("down")
    assert fingerprint() == first
    project.compose("down", "--volumes")
    assert fingerprint() != first


def test_home_outlives_the_container(project: Project) -> None:
    project.compose("up", "--detach", "--wait", "ssh")
    project.compose("exec", "-T", "--user", "dev", "ssh", "touch", "/home/dev/kept")
    project.compose("down")
    project.compose("up", "--detach", "--wait", "ssh")
    assert "kept" in project.compose("exec", "-T", "ssh", "ls", "/home/dev")


def test_train_reaches_the_promised_accuracy_and_leaves_files_of_the_workspace_owner(
    project: Project,
) -> None:
    printed = project.compose("run", "--rm", "-T", "train", "--device", "cpu", timeout_s=300)
    accuracy = re.search(r"^digits: accuracy (\d+\.\d+)%", printed, re.MULTILINE)
    assert accuracy, printed
    assert float(accuracy[1]) >= 98
    runs = Path(project.environment["WORKSPACE"]) / "runs"
    made = [path for path in runs.rglob("*") if path.is_file()]
    assert made
    assert {path.stat().st_uid for path in made} == {12345}


def test_health_is_reported(project: Project) -> None:
    project.compose("up", "--detach", "--wait", "jupyter")
    state = docker(
        "inspect",
        "--format",
        "{{.State.Health.Status}}",
        project.compose("ps", "-q", "jupyter").strip(),
    )
    assert state.strip() == "healthy"
