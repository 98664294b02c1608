"""Credentials from files: used, refused with path and mode where they can't be, and seen nowhere
else."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.container.conftest import KeyPair, Ssh
from tests.container.test_compose import Project
from tests.container.test_hardening import container_of
from tests.container.test_jupyter import ask, run_in_kernel
from tests.support import IMAGE, ROOT, docker, make_folder, run_once

TOKEN = "a-token-that-no-other-place-may-show"
VARIABLES = [
    ("JUPYTER_TOKEN", "jupyter"),
    ("JUPYTER_PASSWORD_HASH", "jupyter"),
    ("SSH_PUBLIC_KEY", "ssh"),
]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, key: KeyPair) -> Iterator[Project]:
    """Both services with compose/secrets.yml; the secrets belong to somebody on the host, mode
    0600."""
    folder = tmp_path_factory.mktemp("secrets")
    project = Project(
        f"test-secrets-{folder.name[-3:]}".lower(), make_folder(folder / "workspace", 12345)
    )
    secrets = make_folder(folder / "secrets", 12345, 0o700)
    for name, text in {"jupyter_token": TOKEN, "ssh_public_key": key.public}.items():
        (secrets / name).write_text(f"{text}\n")
        (secrets / name).chmod(0o600)
    subprocess.run(["chown", "-R", "12345:12345", str(secrets)], check=True)
    files = (ROOT / "docker-compose.yml", ROOT / "compose/secrets.yml")
    project.environment |= {"COMPOSE_FILE": ":".join(map(str, files)), "SECRETS": str(secrets)}
    try:
        project.compose("up", "--detach", "--wait", "jupyter", "ssh")
        yield project
    finally:
        project.compose("down", "--volumes", "--timeout", "5", check=False)


def test_compose_secrets_open_both_services(project: Project, ssh: Ssh) -> None:
    jupyter = container_of(project, "jupyter")
    assert ask(jupyter, "/api/contents", TOKEN)[0] == 200
    assert ask(jupyter, "/api/contents", "wrong")[0] == 403
    server = container_of(project, "ssh")
    assert ssh(server, "whoami").stdout.strip() == "dev"
    assert "one-time password" not in server.log()


def test_token_is_in_no_session(project: Project, ssh: Ssh) -> None:
    jupyter = container_of(project, "jupyter")
    program = (
        "import subprocess; print(subprocess.run(['bash', '-lc', 'env'], "
        "capture_output=True, text=True).stdout)"
    )
    sessions = [
        run_in_kernel(jupyter, TOKEN, f"%env\n{program}"),
        jupyter.execute("env"),
        jupyter.execute("bash", "-lc", "env", user="dev"),
        jupyter.execute("cat", "/proc/1/environ", "/run/pytorch-cuda/environment.sh"),
        ssh(container_of(project, "ssh"), "env").stdout,
    ]
    assert all("PATH" in session for session in sessions)
    assert [session for session in sessions if TOKEN in session] == []


def test_token_is_in_no_log_inspect_or_image(project: Project) -> None:
    jupyter = container_of(project, "jupyter")
    ask(jupyter, "/api/status", TOKEN)
    shown = [
        jupyter.log(),
        docker("inspect", jupyter.name),
        docker("image", "inspect", IMAGE) + docker("history", "--no-trunc", IMAGE),
        project.compose("config"),
        jupyter.execute("ps", "-eo", "args=", "-ww"),
    ]
    assert [text for text in shown if TOKEN in text] == []


@pytest.mark.parametrize(("variable", "mode"), VARIABLES)
def test_empty_secret_is_refused(variable: str, mode: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("\n")
    secret.chmod(0o640)
    options = [
        "--shm-size=1g",
        f"--volume={secret}:/run/secrets/it:ro",
        f"--env={variable}_FILE=/run/secrets/it",
    ]
    done = run_once(mode, options=options)
    assert done.returncode == 2
    assert (
        f"{variable}_FILE names /run/secrets/it (mode 0640, owner 0:0), which is empty"
        in done.stderr
    )


@pytest.mark.parametrize(("variable", "mode"), VARIABLES)
def test_unreadable_secret_is_refused(variable: str, mode: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(TOKEN)
    secret.chmod(0o600)
    options = ["--shm-size=1g", "--user=12345:12345", f"--volume={secret}:/run/secrets/it:ro"]
    done = run_once(mode, options=[*options, f"--env={variable}_FILE=/run/secrets/it"])
    assert done.returncode == 2
    assert (
        f"{variable}_FILE names /run/secrets/it (mode 0600, owner 0:0), which can't be read"
        in done.stderr
    )
    assert TOKEN not in done.stdout + done.stderr


@pytest.mark.parametrize(("variable", "mode"), VARIABLES)
def test_folder_or_missing_file_is_refused(variable: str, mode: str, tmp_path: Path) -> None:
    # Docker makes a folder where the file of a bind mount is missing.
    options = ["--shm-size=1g", f"--volume={tmp_path}/forgotten:/run/secrets/it:ro"]
    done = run_once(mode, options=[*options, f"--env={variable}_FILE=/run/secrets/it"])
    assert done.returncode == 2
    assert "/run/secrets/it (mode 0755, owner 0:0), which can't be read" in done.stderr
    done = run_once(mode, options=["--shm-size=1g", f"--env={variable}_FILE=/run/secrets/none"])
    assert done.returncode == 2
    assert f"{variable}_FILE names /run/secrets/none, which is not there" in done.stderr


@pytest.mark.parametrize(("variable", "mode"), VARIABLES)
def test_variable_and_file_together_are_refused(variable: str, mode: str) -> None:
    options = [
        "--shm-size=1g",
        f"--env={variable}={TOKEN}",
        f"--env={variable}_FILE=/run/secrets/it",
    ]
    done = run_once(mode, options=options)
    assert done.returncode == 2
    assert f"Both {variable} and {variable}_FILE are set" in done.stderr
    assert TOKEN not in done.stdout + done.stderr
