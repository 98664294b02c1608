"""Odd flags and environments of `docker run`: a sentence where something is wrong, and never a
traceback."""

import uuid
from pathlib import Path

import pytest

from tests.support import docker, make_folder, run_once

ODD = [
    ["--ipc=none"],
    ["--network=none"],
    ["--cgroupns=host"],
    ["--memory=256m"],
    ["--pids-limit=8"],
    ["--ulimit=nofile=64:64"],
    ["--ulimit=fsize=0"],
    ["--read-only"],
    ["--read-only", "--tmpfs=/tmp", "--tmpfs=/run:size=4k"],
    ["--tmpfs=/workspace"],
    ["--tmpfs=/home/dev"],
    ["--tmpfs=/var/lib/pytorch-cuda:ro"],
    ["--tmpfs=/opt/etc", "--tmpfs=/run"],
    ["--cap-drop=ALL"],
    ["--cap-drop=DAC_OVERRIDE", "--cap-drop=FOWNER"],
    ["--user=4242:4242"],
    ["--user=4242:4242", "--read-only"],
    ["--user=nobody"],
    ["--env=HOME="],
    ["--env=HOME=relative"],
    ["--env=PATH="],
    ["--env=PATH=/nowhere"],
    ["--env=PYTHONHOME=/nowhere", "--env=PYTHONPATH=/nowhere"],
    ["--env=LANG=xx_YY", "--env=LC_ALL=nonsense"],
    ["--env=BAD=\udcff\udcfe"],
    ["--env=PUID='1234'", '--env=PGID="1234"'],
    ["--env=JUPYTER_PORT=tcp://10.0.0.1:8888", "--env=SSH_PORT=tcp://10.0.0.1:22"],
    ["--volume=/dev/null:/etc/passwd"],
    ["--volume=/dev/null:/run/pytorch-cuda/mode.json"],
    ["--volume=/proc:/workspace/proc"],
]
START = "for mode in '/bin/true' 'jupyter --port=0' 'ssh -p 99999'; do {}; done"
RUN = START.format("/usr/bin/python3 -I /opt/entrypoints $mode 2>&1")


@pytest.mark.parametrize("options", ODD, ids=" ".join)
def test_no_traceback(options: list[str]) -> None:
    """The ends that a start can have: a program, and a refusal of each server."""
    done = run_once("-c", RUN, options=["--entrypoint=/bin/sh", *options])
    assert "Traceback" not in done.stdout + done.stderr, done.stdout
    assert done.stdout or done.stderr


def test_without_shared_memory_the_flag_is_told() -> None:
    done = run_once("train", "--help", options=["--ipc=none"])
    assert done.returncode == 0
    assert "warning: There is no /dev/shm (--ipc none)" in done.stderr
    assert "--shm-size=8g" in done.stderr


def test_volume_as_workspace_becomes_the_users() -> None:
    volume = f"test-{uuid.uuid4().hex[:12]}"
    options = ["--env=PUID=1234", "--env=PGID=1234", f"--volume={volume}:/workspace"]
    try:
        done = run_once(
            "sh", "-c", "touch /workspace/x && stat -c %u /workspace/x", options=options
        )
        assert done.stdout.split() == ["1234"], done.stderr
    finally:
        docker("volume", "rm", volume)


def test_folder_of_the_host_stays_its_owners(tmp_path: Path) -> None:
    workspace = make_folder(tmp_path / "w", 1000)
    options = ["--env=PUID=1234", f"--volume={workspace}:/workspace"]
    run_once("true", options=options)
    assert workspace.stat().st_uid == 1000
