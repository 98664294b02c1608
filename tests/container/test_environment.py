"""One environment: each kind of session sees the same PATH and variables, secrets excepted."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.container.conftest import KeyPair, Ssh
from tests.container.test_jupyter import ask, run_in_kernel
from tests.support import TORCH, Container, run_once, started, wait_until

AWKWARD = 'it\'s "quoted" $HOME `id` \\ and\nhas a second line'
DUMP = "import json, os; print(json.dumps({n: os.environ.get(n) for n in %r}))"
NAMES = [
    "PATH",
    "AWKWARD",
    "HF_HOME",
    "OMP_NUM_THREADS",
    "NVIDIA_DRIVER_CAPABILITIES",
    "PIP_CONSTRAINT",
    "PYTORCH_VERSION",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
    "LANG",
    "SHELL",
]
CODE = DUMP % (NAMES,)
OPTIONS = ["--shm-size=1g", "--cpus=2", f"--env=AWKWARD={AWKWARD}", "--env=HF_HOME=/workspace/hf"]


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    return {
        "PATH": "/opt/venv/bin:/home/dev/.local/bin:"
        "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin",
        "AWKWARD": AWKWARD,
        "HF_HOME": "/workspace/hf",
        "OMP_NUM_THREADS": "2",
        "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
        "PIP_CONSTRAINT": "/opt/constraints.txt",
        "PYTORCH_VERSION": TORCH,
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "LANG": "C.UTF-8",
        "SHELL": "/bin/bash",
    }


@pytest.fixture(scope="module")
def sshd(key: KeyPair) -> Iterator[Container]:
    options = [*OPTIONS, "--publish=127.0.0.1::2222", f"--env=SSH_PUBLIC_KEY={key.public}"]
    with started("ssh", options=options) as container:
        yield container


PYTHON = f"python - <<'EOF'\n{CODE}\nEOF\n"


@pytest.mark.parametrize("user", ["dev", "root"])
@pytest.mark.parametrize(
    "session",
    [
        {"command": [PYTHON]},  # ssh host command
        {"command": ["bash"], "stdin": PYTHON},  # ssh host bash < script: VS Code
        {"command": ["bash -lc bash"], "stdin": PYTHON},
        {"command": ["exec sh -c 'exec bash -l'"], "stdin": PYTHON},
        {"options": ("-T",), "stdin": PYTHON},  # ssh -T host
    ],
)
def test_ssh_session(
    sshd: Container, ssh: Ssh, expected: dict[str, str], user: str, session: dict[str, Any]
) -> None:
    command = session.get("command", [])
    done = ssh(
        sshd,
        *command,
        user=user,
        options=session.get("options", ()),
        stdin=session.get("stdin", ""),
    )
    assert json.loads(done.stdout.strip().splitlines()[-1]) == expected, done.stderr


def test_ssh_terminal(sshd: Container, ssh: Ssh, expected: dict[str, str]) -> None:
    done = ssh(
        sshd,
        options=("-tt",),
        stdin=f"python -c '{CODE.replace(chr(39), chr(34))}' > ~/seen; exit\n",
    )
    assert done.returncode == 0
    assert json.loads(ssh(sshd, "cat ~/seen").stdout) == expected


def test_ssh_session_has_no_credential(sshd: Container, ssh: Ssh) -> None:
    for user in ("dev", "root"):
        assert (
            "SSH_PUBLIC_KEY"
            not in ssh(sshd, "env; cat /run/pytorch-cuda/environment.sh", user=user).stdout
        )


def test_what_a_session_sets_itself_is_kept_in_its_shells(sshd: Container, ssh: Ssh) -> None:
    done = ssh(
        sshd, "export PATH=/mine:$PATH HF_HOME=/else; bash -ic 'echo $PATH $HF_HOME' 2>/dev/null"
    )
    path, home = done.stdout.split()
    assert path.startswith("/mine:")
    assert home == "/else"


@pytest.mark.parametrize("shell", [["bash", "-lc"], ["bash", "-ic"]])
def test_docker_exec(sshd: Container, expected: dict[str, str], shell: list[str]) -> None:
    wait_until(lambda: "Server listening" in sshd.log(), "sshd")
    for user in ("dev", "root"):
        assert json.loads(sshd.execute(*shell, PYTHON, user=user)) == expected


def test_kernel(expected: dict[str, str]) -> None:
    options = [*OPTIONS, "--publish=127.0.0.1::8888", "--env=JUPYTER_TOKEN=secret-token"]
    with started("jupyter", options=options) as container:
        assert ask(container, "/api/status", "secret-token")[0] == 200
        assert json.loads(run_in_kernel(container, "secret-token", CODE)) == expected
        assert "secret-token" not in run_in_kernel(
            container, "secret-token", "import os; print(dict(os.environ))"
        )


def test_given_token_is_in_no_program_s_environment() -> None:
    with started(
        "jupyter", options=["--shm-size=1g", "--env=JUPYTER_TOKEN=secret-token"]
    ) as container:
        container.wait_for_log("is running at")
        assert "secret-token" in container.execute(
            "cat", "/proc/1/environ"
        )  # tini's: the engine itself set it
        assert container.execute("cat", "/proc/1/environ", user="dev", check=False) == ""
        server = container.execute("pgrep", "-f", "jupyter-lab").split()[0]
        seen = container.execute(
            "cat", f"/proc/{server}/environ", f"/proc/{server}/cmdline", user="dev"
        )
        assert "PIP_CONSTRAINT" in seen
        assert "secret-token" not in seen


def test_plain_command(expected: dict[str, str]) -> None:
    assert json.loads(run_once("python", "-c", CODE, options=OPTIONS).stdout) == expected
