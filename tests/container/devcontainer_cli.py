"""The real dev container CLI, run as a user of the host with an uid of its own, on a copy of the
repository."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tests.support import ROOT, docker_client

LOCKED = ROOT / "tests/node"
INSTALLED = ROOT / ".build/node"
UID = 4242


def install_cli() -> Path:
    """The program `devcontainer`, installed from the lock when the lock is newer."""
    lock = "package-lock.json"
    if (
        not (INSTALLED / lock).exists()
        or (INSTALLED / lock).read_bytes() != (LOCKED / lock).read_bytes()
    ):
        shutil.rmtree(INSTALLED, ignore_errors=True)
        part = INSTALLED.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(LOCKED, part, ignore=shutil.ignore_patterns("node_modules"))
        subprocess.run(["npm", "ci", "--silent"], cwd=part, check=True)
        part.rename(INSTALLED)
    return INSTALLED / "node_modules/.bin/devcontainer"


def read_config(path: Path) -> dict[str, Any]:
    """A devcontainer.json, whose comments take whole lines."""
    lines = path.read_text().splitlines()
    return dict(json.loads("\n".join(line for line in lines if not line.lstrip().startswith("//"))))


def copy_repository(folder: Path) -> Path:
    """The tracked files, as a clone has them, owned by `UID`."""
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    for name in filter(None, tracked.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    subprocess.run(["chown", "-R", f"{UID}:{UID}", str(folder)], check=True)
    return folder


class DevContainer:
    """`devcontainer` on one repository. The host's user is `UID`, known by name only to the CLI's
    own processes.

    `said` is what the last `up` told, `layers` are those of the image that the first one made.
    """

    def __init__(self, repository: Path, config: str = ".devcontainer/devcontainer.json") -> None:
        self.repository = repository
        self.config = repository / config
        self.workspace = f"/workspaces/{repository.name}"
        self.home = repository.parent / "home"
        self.said = ""
        self.layers: list[str] = []
        self.home.mkdir(exist_ok=True)
        os.chown(self.home, UID, UID)
        self.accounts = repository.parent / "passwd"
        self.accounts.write_text(
            f"{Path('/etc/passwd').read_text()}newcomer:x:{UID}:{UID}::{self.home}:/bin/sh\n"
        )

    def run(self, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command of the CLI to its end."""
        options = [
            "--docker-path",
            docker_client(),
            "--workspace-folder",
            str(self.repository),
            "--config",
            str(self.config),
        ]
        become = [
            "setpriv",
            f"--reuid={UID}",
            f"--regid={UID}",
            f"--groups={Path('/var/run/docker.sock').stat().st_gid}",
        ]
        mounted = f'mount --bind {self.accounts} /etc/passwd && exec "$@"'
        return subprocess.run(
            [
                "unshare",
                "--mount",
                "sh",
                "-c",
                mounted,
                "sh",
                *become,
                install_cli(),
                command,
                *options,
                *arguments,
            ],
            env={"HOME": str(self.home), "PATH": os.environ["PATH"]},
            check=False,
            capture_output=True,
            text=True,
            timeout=300,
            stdin=subprocess.DEVNULL,
        )

    def up(self, *arguments: str) -> str:
        """Build and start; returns the container's id."""
        done = self.run("up", *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        outcome = json.loads(done.stdout.splitlines()[-1])
        assert outcome["outcome"] == "success", done.stdout
        self.said = done.stderr
        return str(outcome["containerId"])

    def execute(self, script: str) -> str:
        """Run a script in the container as VS Code's terminal would, and return what it printed."""
        done = self.run("exec", "bash", "-c", script)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout
