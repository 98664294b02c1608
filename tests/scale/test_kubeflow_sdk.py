"""deploy/kubernetes's ClusterTrainingRuntime by Kubeflow's own SDK, each node a container."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import ROOT, docker, make_folder

README = ROOT / "deploy" / "kubernetes" / "README.md"
UID = 12345


@dataclass(frozen=True)
class Job:
    """A job of the README's program: its folder, which is a user's, and what the program says."""

    workspace: Path
    home: Path

    def run(self, program: str) -> str:
        """Run a program that calls the SDK, and return what it printed."""
        script = self.home / "job.py"
        script.write_text(program)
        done = subprocess.run(
            [sys.executable, script],
            cwd=ROOT,
            env=os.environ | {"HOME": str(self.home)},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    workspace = tmp_path / ".kubeflow" / "trainer" / "containers" / "try"
    workspace.parent.mkdir(parents=True)
    yield Job(make_folder(workspace, UID), tmp_path)
    own = "label=trainer.kubeflow.org/trainjob-name=try"
    for container in docker("ps", "--all", "--quiet", "--filter", own).split():
        docker("rm", "--force", container)
    for network in docker("network", "ls", "--quiet", "--filter", own).split():
        docker("network", "rm", network)


@pytest.fixture
def program() -> str:
    """The README's."""
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    return block


def test_two_nodes_train_together(job: Job, program: str) -> None:
    printed = job.run(program)
    assert printed.splitlines()[0] == "Complete", printed
    run = job.workspace / "runs" / "try"
    result = json.loads((run / "result.json").read_text())
    assert (result["world_size"], result["steps"]) == (2, 40)
    assert {path.stat().st_uid for path in run.rglob("*")} == {UID}


def test_job_that_can_t_run_has_failed(job: Job, program: str) -> None:
    assert "--max-steps=40" in program
    printed = job.run(program.replace("--max-steps=40", "--max-steps=none"))
    assert printed.splitlines()[0] == "Failed", printed
    assert "--max-steps" in printed
