"""What the tests share: containers started for one test, waiting without guessing, and ports that
are free."""

import os
import re
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from host.build import IMAGE, TEST_IMAGE
from host.engine import require_engine
from host.versions import ROOT, versions

TORCH = versions()["TORCH"]
CUDA = versions()["CUDA"]
TORCH_BUILD = f"{TORCH}+cu{CUDA.replace('.', '')}"
"""torch's version as it tells it itself."""

__all__ = [
    "IMAGE",
    "ROOT",
    "TEST_IMAGE",
    "Container",
    "docker",
    "docker_client",
    "docker_process",
    "free_port",
    "make_folder",
    "run_once",
    "started",
    "wait_until",
]

Result = TypeVar("Result")
TROUBLE = re.compile(r"\b(warn(ing)?|error|critical|fatal|traceback|exception)\b", re.IGNORECASE)


@lru_cache(maxsize=1)
def docker_client() -> str:
    """The Docker client's path; an engine is found or started at the first use, not at import."""
    return require_engine()


def docker(
    *arguments: str, check: bool = True, timeout_s: float = 300, text_input: str | None = None
) -> str:
    """Run the Docker client and return its stdout; stderr is in the assertion's message when it
    fails."""
    done = docker_process(*arguments, timeout_s=timeout_s, text_input=text_input)
    assert not check or done.returncode == 0, (
        f"docker {' '.join(arguments)}\n{done.stdout}\n{done.stderr}"
    )
    return done.stdout


def docker_process(
    *arguments: str, timeout_s: float = 300, text_input: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the Docker client and return code, stdout and stderr, whatever they are."""
    return subprocess.run(
        [docker_client(), *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        input=text_input,
        stdin=subprocess.DEVNULL if text_input is None else None,
    )


def wait_until(
    probe: Callable[[], Result], what: str, timeout_s: float = 60, every_s: float = 0.1
) -> Result:
    """Call `probe` until it gives something true, and return that; fail with `what` after
    `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        result = probe()
        if result:
            return result
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s in vain: {what}"
        time.sleep(every_s)


def free_port() -> int:
    """A TCP port on 127.0.0.1 that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Container:
    """One container that a test started. `announced` are the patterns of warnings and errors the
    test expects."""

    name: str
    announced: list[str] = field(default_factory=list)

    def execute(
        self, *command: str, user: str | None = None, check: bool = True, stdin: str | None = None
    ) -> str:
        """`docker exec` a program and return its stdout."""
        options = [
            *(["--user", user] if user else []),
            *(["--interactive"] if stdin is not None else []),
        ]
        return docker("exec", *options, self.name, *command, check=check, text_input=stdin)

    def log(self) -> str:
        """All it printed so far, stdout and stderr."""
        done = docker_process("logs", self.name)
        return done.stdout + done.stderr

    def wait_for_log(self, pattern: str, timeout_s: float = 60) -> re.Match[str]:
        """Wait until its log has a match of `pattern`; the log is in the message when it never
        comes or it ends."""

        def probe() -> re.Match[str] | None:
            found = re.search(pattern, self.log(), re.MULTILINE)
            assert found or self.is_running() or re.search(pattern, self.log()), (
                f"it ended:\n{self.log()}"
            )
            return found

        return wait_until(probe, f"{pattern!r} in the log of {self.name}", timeout_s)

    def is_running(self) -> bool:
        """Whether its main process lives."""
        return docker("inspect", "--format", "{{.State.Running}}", self.name).strip() == "true"

    def exit_code(self, timeout_s: float = 60) -> int:
        """Wait for its end and return the exit code of its main process."""
        return int(docker("wait", self.name, timeout_s=timeout_s))

    def stop(self) -> float:
        """`docker stop`; the seconds it took (for benchmarks: tests assert the exit code, not the
        time)."""
        begin = time.monotonic()
        docker("stop", self.name)
        return time.monotonic() - begin

    def health(self) -> str:
        """Docker's word on its health: starting, healthy or unhealthy."""
        return docker("inspect", "--format", "{{.State.Health.Status}}", self.name).strip()

    def published(self, port: int) -> int:
        """The port on 127.0.0.1 at which the container's `port` can be reached."""
        return int(docker("port", self.name, f"{port}/tcp").splitlines()[0].rpartition(":")[2])

    def unannounced_trouble(self) -> list[str]:
        """Lines of its log that warn or report an error and that the test did not announce."""
        return [
            line
            for line in self.log().splitlines()
            if TROUBLE.search(line)
            and not any(re.search(pattern, line) for pattern in self.announced)
        ]


@contextmanager
def started(
    *command: str,
    options: Sequence[str] = (),
    image: str = IMAGE,
    announced: Sequence[str] = (),
) -> Iterator[Container]:
    """Run a container in the background for the length of a `with` block, then see that its log
    holds no surprise.

    `options` stand before the image, `command` behind it. The container is removed at the end, also
    after a failure.
    """
    name = f"test-{uuid.uuid4().hex[:12]}"
    container = Container(name, list(announced))
    try:
        docker("run", "--detach", "--name", name, *options, image, *command)
        yield container
        assert not container.unannounced_trouble(), (
            f"{container.unannounced_trouble()}\n--- log ---\n{container.log()}"
        )
    finally:
        docker("rm", "--force", "--volumes", name, check=False)


def run_once(
    *command: str, options: Sequence[str] = (), image: str = IMAGE, timeout_s: float = 120
) -> subprocess.CompletedProcess[str]:
    """`docker run --rm` to its end; code, stdout and stderr are the container's."""
    return docker_process("run", "--rm", *options, image, *command, timeout_s=timeout_s)


def make_folder(path: Path, owner: int | None = None, mode: int = 0o755) -> Path:
    """Make a folder for a bind mount, owned by `owner` (uid and gid)."""
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(mode)
    if owner is not None:
        os.chown(path, owner, owner)
    return path
