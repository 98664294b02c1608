"""podman and buildah, the distribution's own: the image starts as with Docker, and the five lines
of docs/extending.md build on it.

It is here since it loads five gigabytes into a second store."""

import resource
import subprocess
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.container.conftest import CLIENT_OPTIONS, make_key_pair
from tests.container.test_extending import write_context
from tests.support import IMAGE, docker_client, free_port, make_folder, wait_until

HERE = f"localhost/{IMAGE}"
# The modes say these of podman's own defaults: 64 MB of /dev/shm.
SHM = "--shm-size=1g"


@dataclass(frozen=True)
class Podman:
    """podman and buildah on a store of their own."""

    folder: Path

    def command(self, *arguments: str) -> list[str]:
        # runc, since crun of Debian 12 refuses hosts with both kinds of cgroups.
        return ["podman", *self.store, "--runtime=runc", *arguments]

    @property
    def store(self) -> list[str]:
        return [f"--root={self.folder}/root", f"--runroot={self.folder}/run"]

    def __call__(
        self, *arguments: str, check: bool = True, timeout_s: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run podman to its end."""
        return self.run(self.command(*arguments), check, timeout_s)

    def buildah(self, *arguments: str) -> None:
        """Run buildah to its end; chroot is the isolation that needs no runtime."""
        command, *options = arguments
        self.run(["buildah", *self.store, command, "--isolation=chroot", *options], timeout_s=300)

    def run(
        self, command: list[str], check: bool = True, timeout_s: float = 120
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command,
            env={
                "PATH": "/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin",
                "CONTAINERS_CONF": f"{self.folder}/containers.conf",
            },
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert not check or done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done


def limit(name: str) -> str:
    """A limit that this process may set, as containers.conf writes it: podman's own are higher than
    what every host allows, and the modes warn below 8192 open files."""
    hard = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))[1]
    value = 8192 if hard == resource.RLIM_INFINITY else min(hard, 8192)
    return f'"{name}={value}:{value}"'


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    """A store with the image in it, as `docker save` and `podman load` bring it."""
    podman = Podman(tmp_path_factory.mktemp("podman"))
    (podman.folder / "containers.conf").write_text(
        f"[containers]\ndefault_ulimits = [{limit('nofile')}, {limit('nproc')}]\n"
    )
    save = subprocess.Popen([docker_client(), "save", IMAGE], stdout=subprocess.PIPE)
    load = podman.command("load", "--quiet")
    subprocess.run(load, stdin=save.stdout, check=True, timeout=600, stdout=subprocess.DEVNULL)
    assert save.wait() == 0
    podman("tag", f"docker.io/library/{IMAGE}", HERE)
    yield podman
    podman("system", "reset", "--force", timeout_s=300)


@pytest.fixture
def name(podman: Podman) -> Iterator[str]:
    """Of a container that is removed at the end; its log is shown where the test fails."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    yield name
    done = podman("logs", name, check=False)
    print(done.stdout, done.stderr)
    podman("rm", "--force", "--volumes", name, check=False)


def test_jupyter_answers_and_its_health_check_too(
    podman: Podman, name: str, tmp_path: Path
) -> None:
    port, token = free_port(), uuid.uuid4().hex
    folder = make_folder(tmp_path / "mine", owner=1234)
    options = [SHM, f"--publish=127.0.0.1:{port}:8888", f"--env=JUPYTER_TOKEN={token}"]
    podman(
        "run", "--detach", f"--name={name}", *options, f"--volume={folder}:/workspace", HERE,
        "jupyter",
    )  # fmt: skip

    def healthy() -> bool:
        check = ["/usr/bin/python3", "-I", "/opt/entrypoints", "health"]
        return podman("exec", name, *check, check=False).returncode == 0

    wait_until(healthy, "JupyterLab is ready", timeout_s=60)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/status?token={token}") as answer:
        assert answer.status == 200
    podman("exec", "--user=dev", name, "touch", "/workspace/file")
    assert (folder / "file").stat().st_uid == 1234
    podman("stop", name)
    assert podman("inspect", "--format={{.State.ExitCode}}", name).stdout.strip() == "0"


def test_ssh_lets_the_key_in(podman: Podman, name: str, tmp_path: Path) -> None:
    port, key = free_port(), make_key_pair(tmp_path)
    options = [SHM, f"--publish=127.0.0.1:{port}:2222", f"--env=SSH_PUBLIC_KEY={key.public}"]
    podman("run", "--detach", f"--name={name}", *options, HERE, "ssh")

    def login() -> subprocess.CompletedProcess[str] | None:
        done = subprocess.run(
            ["ssh", *CLIENT_OPTIONS, f"-i{key.private}", f"-p{port}", "dev@127.0.0.1", "id", "-un"],
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
        return done if done.returncode == 0 else None

    assert wait_until(login, "sshd lets the key in").stdout.strip() == "dev"


def test_training_with_a_read_only_root_and_a_uid_of_its_own(podman: Podman) -> None:
    options = ["--rm", SHM, "--read-only", "--user=4242:4242", "--tmpfs=/workspace/runs"]
    done = podman("run", *options, HERE, "train", "--max-steps=2", "--epochs=1", "--device=cpu")
    assert "step 2/2" in done.stdout


def test_five_lines_make_an_own_image_with_buildah(podman: Podman, tmp_path: Path) -> None:
    write_context(tmp_path, image=HERE)
    (tmp_path / "requirements.txt").write_text("/tmp/packages/smallpackage-1.2-py3-none-any.whl\n")
    podman.buildah("build", "--tag=own", str(tmp_path))
    done = podman("run", "--rm", "localhost/own", "python", "-m", "mine")
    assert done.stdout.split()[0] == "1.2"
