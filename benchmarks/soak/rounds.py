"""What the rounds do to a container, and what is counted after them."""

import json
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.modes import http_answers, ssh_answers
from benchmarks.soak.training import LIMITS
from host.build import IMAGE

PROBE = (Path(__file__).parent / "probe.py").read_text(encoding="utf-8")
KERNEL = (Path(__file__).parent / "kernel.py").read_text(encoding="utf-8")
TOKEN = "soak"
Sample = dict[str, Any]


class Used:
    """A container in use: started, probed, removed."""

    def __init__(self, client: str, name: str, port: int, options: list[str], word: str) -> None:
        self.client, self.name = client, name
        self.samples: list[tuple[int, Sample]] = []
        publish = f"--publish=127.0.0.1::{port}"
        create = ["run", "--detach", "--name", name, "--cap-add=SYS_PTRACE", *LIMITS, publish]
        self.docker(*create, *options, IMAGE, word)
        self.port = int(self.docker("port", name, f"{port}/tcp").splitlines()[0].split(":")[-1])

    def docker(self, *arguments: str, stdin: str | None = None) -> str:
        """Run the Docker client and return its stdout."""
        command = [self.client, *arguments]
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, input=stdin, timeout=120
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(command[:4])} …: {done.stdout}{done.stderr}")
        return done.stdout

    def probe(self, number: int) -> None:
        """Count what can leak, after this many rounds."""
        said = self.docker("exec", "-i", self.name, "/usr/bin/python3", "-I", "-", stdin=PROBE)
        self.samples.append((number, json.loads(said)))

    def check(self) -> None:
        """One round of doctor and health check. Doctor's own exit code tells of the host."""
        self.docker("exec", self.name, "/usr/bin/python3", "-I", "/opt/entrypoints", "health")
        report = self.docker("exec", self.name, "sh", "-c", "doctor --json || true")
        json.loads(report)

    def remove(self) -> None:
        """Remove it with its volumes."""
        command = [self.client, "rm", "--force", "--volumes", self.name]
        subprocess.run(command, check=False, capture_output=True)


class Sshd(Used):
    """Mode ssh, one login a round."""

    def __init__(self, client: str, name: str) -> None:
        self.keys = tempfile.TemporaryDirectory()
        self.key = f"{self.keys.name}/key"
        make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.key]
        subprocess.run(make, check=True)
        public = Path(f"{self.key}.pub").read_text(encoding="utf-8").strip()
        super().__init__(client, name, 2222, ["-e", f"SSH_PUBLIC_KEY={public}"], "ssh")
        wait(lambda: ssh_answers(self.port), "sshd")

    def round(self) -> None:
        """Log in as `dev`, run a login shell's command, and leave."""
        options = ["StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR"]
        flags = [f"-o{option}" for option in (*options, "BatchMode=yes")]
        login = ["ssh", *flags, "-i", self.key, "-p", str(self.port), "dev@127.0.0.1"]
        command = [*login, "bash -lc 'id -un'"]
        said = subprocess.run(command, check=False, capture_output=True, text=True)
        if said.stdout != "dev\n":
            raise SystemExit(f"The login failed: {said.stdout}{said.stderr}")


class Jupyter(Used):
    """Mode jupyter, one kernel a round."""

    def __init__(self, client: str, name: str) -> None:
        super().__init__(client, name, 8888, ["-e", f"JUPYTER_TOKEN={TOKEN}"], "jupyter")
        wait(lambda: http_answers(self.port), "JupyterLab")

    def round(self) -> None:
        """Start a kernel, let it print, and stop it."""
        said = self.docker("exec", "-i", self.name, "python", "-", TOKEN, stdin=KERNEL)
        if said != "42\n":
            raise SystemExit(f"The kernel answered {said!r}")


def wait(ready: Any, what: str) -> None:
    """Wait until `ready()`; a minute at most."""
    deadline = time.monotonic() + 60
    while not ready():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what} was not ready within 60 s")
        time.sleep(0.1)
