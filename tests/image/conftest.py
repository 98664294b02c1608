"""One running container of the final image for all tests here: without a network, and left as it
was found."""

import subprocess
from collections.abc import Callable, Iterator

import pytest
import testinfra

from tests.support import ROOT, Container, docker_process, started

PROGRAMS = ROOT / "tests" / "image" / "programs"


@pytest.fixture(scope="session")
def container() -> Iterator[Container]:
    """The image, started as it starts for any other command; what runs inside it lies read-only in
    /programs."""
    options = ("--network=none", "--shm-size=1g", f"--volume={PROGRAMS}:/programs:ro")
    with started("sleep", "infinity", options=options) as running:
        # The account files lie in /run and are there once the entrypoint is through.
        running.execute(
            "sh", "-c", "until [ -e /run/pytorch-cuda/environment.sh ]; do sleep 0.1; done"
        )
        yield running


@pytest.fixture(scope="session")
def host(container: Container) -> testinfra.host.Host:
    """testinfra's view of the container, as root."""
    return testinfra.get_host(f"docker://{container.name}")


@pytest.fixture(scope="session")
def dev(container: Container) -> testinfra.host.Host:
    """testinfra's view of the container, as the user who works in it."""
    return testinfra.get_host(f"docker://dev@{container.name}")


RunProgram = Callable[..., str]


@pytest.fixture(scope="session")
def run_program(container: Container) -> RunProgram:
    """`run_program("amp.py", …)`: run one of the programs as dev, warnings of the future being
    errors; its stdout."""

    def run(name: str, *arguments: str, user: str = "dev") -> str:
        done: subprocess.CompletedProcess[str] = docker_process(
            *(
                "exec",
                "--user",
                user,
                "--workdir",
                "/tmp",
                "--env",
                "OMP_NUM_THREADS=1",
                container.name,
            ),
            *("python", "-W", "error::FutureWarning", f"/programs/{name}", *arguments),
        )
        assert done.returncode == 0, (
            f"{name} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
        return done.stdout

    return run
