"""Bad input gets one clear line and a non-zero exit."""

from pathlib import Path

import pytest

from tests.support import make_folder, run_once

SHM = "--shm-size=1g"


@pytest.mark.parametrize(
    ("command", "options", "code", "says"),
    [
        (
            ["trian"],
            [],
            127,
            (
                "'trian' is neither a mode of this image (jupyter, ssh, train, doctor) "
                "nor a program in it"
            ),
        ),
        (["/etc/hostname"], [], 127, "'/etc/hostname' is neither a mode"),
        (
            ["jupyter"],
            ["--env=PUID=me"],
            2,
            "PUID is 'me', which is no user or group id; give a number above 0",
        ),
        (["jupyter"], ["--env=PUID=-5"], 2, "PUID is '-5'"),
        (["jupyter"], ["--env=PGID=99999999999"], 2, "PGID is '99999999999'"),
        (["jupyter"], ["--env=JUPYTER_TOKEN="], 2, "JUPYTER_TOKEN is set but empty"),
        (
            ["jupyter"],
            ["--env=JUPYTER_TOKEN=a", "--env=JUPYTER_TOKEN_FILE=/b"],
            2,
            "Both JUPYTER_TOKEN and JUPYTER_TOKEN_FILE",
        ),
        (
            ["jupyter"],
            ["--env=JUPYTER_TOKEN_FILE=/nowhere"],
            2,
            "JUPYTER_TOKEN_FILE names /nowhere, which is not there",
        ),
        (
            ["jupyter"],
            ["--env=JUPYTER_PASSWORD_HASH=secret"],
            2,
            "JUPYTER_PASSWORD_HASH is no argon2 hash",
        ),
        (
            ["jupyter"],
            ["--env=JUPYTER_CERTFILE=/nowhere"],
            2,
            "TLS needs both JUPYTER_CERTFILE and JUPYTER_KEYFILE",
        ),
        (["jupyter", "lab", "--port=abc"], [], 2, "--port is 'abc'; give a number from 1 to 65535"),
        (["jupyter", "--port", "99999"], [], 2, "JupyterLab can't listen on port 99999"),
        (["ssh", "-p", "99999"], [], 2, "sshd refuses `-p 99999`: Bad port number"),
        (
            ["jupyter"],
            ["--env=JUPYTER_CERTFILE=/nowhere", "--env=JUPYTER_KEYFILE=/nowhere"],
            2,
            "JUPYTER_CERTFILE names /nowhere, which is not there",
        ),
        (
            ["ssh"],
            ["--env=SSH_PUBLIC_KEY=ssh-ed25519 garbage"],
            2,
            "Line 1 of SSH_PUBLIC_KEY is no public key",
        ),
        (
            ["ssh"],
            ["--env=SSH_PUBLIC_KEY=-----BEGIN OPENSSH PRIVATE KEY-----"],
            2,
            "SSH_PUBLIC_KEY holds a PRIVATE key",
        ),
        (["ssh"], ["--env=SSH_PUBLIC_KEY= "], 2, "SSH_PUBLIC_KEY is set but empty"),
        (
            ["id"],
            ["--cap-drop=ALL"],
            2,
            "root may not give /run/pytorch-cuda/environment.sh to uid 0 here",
        ),
        (["id"], ["--cap-drop=ALL", "--cap-add=CHOWN"], 2, "root may not become uid 1000 here"),
    ],
)
def test_one_line_says_what_is_wrong(
    command: list[str], options: list[str], code: int, says: str
) -> None:
    done = run_once(*command, options=[SHM, *options])
    assert done.returncode == code, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    assert says in errors[0]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("mode", ["jupyter", "ssh", "train"])
def test_read_only_workspace_is_refused_where_it_is_written_to(tmp_path: Path, mode: str) -> None:
    workspace = make_folder(tmp_path / "w", 12345)
    done = run_once(mode, options=[SHM, f"--volume={workspace}:/workspace:ro"])
    assert done.returncode == 2
    assert "error: /workspace is mounted read-only" in done.stderr


def test_read_only_workspace_is_enough_for_a_program_that_reads(tmp_path: Path) -> None:
    workspace = make_folder(tmp_path / "w", 12345)
    done = run_once("ls", "/workspace", options=[f"--volume={workspace}:/workspace:ro"])
    assert done.returncode == 0


def test_workspace_of_root_is_warned_of_with_what_mends_it(tmp_path: Path) -> None:
    workspace = make_folder(tmp_path / "w", 0)
    done = run_once("train", "--help", options=[SHM, f"--volume={workspace}:/workspace"])
    assert (
        "warning: /workspace belongs to 0:0 (mode 0755), and uid 1000 may not write there"
        in done.stderr
    )
    assert "chown" in done.stderr


@pytest.mark.parametrize("content", ["", None])
def test_unreadable_or_empty_secret_is_named_with_path_and_mode(
    tmp_path: Path, content: str | None
) -> None:
    file = tmp_path / "token"
    file.write_text("hidden-value" if content is None else content)
    file.chmod(0o600)
    options = [SHM, f"--volume={file}:/run/secrets/t:ro", "--env=JUPYTER_TOKEN_FILE=/run/secrets/t"]
    done = run_once("jupyter", options=[*options, *(["--user=12345"] if content is None else [])])
    assert done.returncode == 2
    assert "JUPYTER_TOKEN_FILE names /run/secrets/t (mode 0600, owner 0:0), which" in done.stderr
    assert "hidden-value" not in done.stderr


@pytest.mark.parametrize(("mode", "port"), [("jupyter", 8888), ("ssh", 2222)])
def test_port_in_use_is_named(mode: str, port: int) -> None:
    occupy = (
        f"python3 -m http.server {port} >/dev/null 2>&1 & sleep 1; /usr/bin/python3 -I "
        f"/opt/entrypoints {mode}"
    )
    done = run_once("-c", occupy, options=[SHM, "--entrypoint=bash"])
    assert done.returncode == 2
    assert f"can't listen on port {port}: Address already in use" in done.stderr


def test_small_shared_memory_is_warned_of_with_the_flag() -> None:
    done = run_once("train", "--help")
    assert "warning: /dev/shm has 64 MB" in done.stderr
    assert "--shm-size=8g" in done.stderr
