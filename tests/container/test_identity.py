"""Who runs in the container, and that nothing on the host changes by it."""

import hashlib
import os
import uuid
from pathlib import Path

import pytest

from tests.support import docker, make_folder, run_once, started

WHO = """
id -u; id -g; id -un; python -c 'import getpass; print(getpass.getuser())'
touch /workspace/made ~/made && echo ok
"""


def test_dev_takes_the_ids_of_the_workspace_s_owner(tmp_path: Path) -> None:
    workspace = make_folder(tmp_path / "w", 12345)
    done = run_once("bash", "-c", WHO, options=[f"--volume={workspace}:/workspace"])
    assert done.stdout.split() == ["12345", "12345", "dev", "dev", "ok"], done.stderr
    status = (workspace / "made").stat()
    assert (status.st_uid, status.st_gid) == (12345, 12345)


def test_mount_below_the_workspace_counts_where_it_is_the_only_one(tmp_path: Path) -> None:
    code = make_folder(tmp_path / "code", 4242)
    done = run_once(
        "bash", "-c", "id -u; touch code/made", options=[f"--volume={code}:/workspace/code"]
    )
    assert done.stdout.split() == ["4242"], done.stderr
    assert (code / "made").stat().st_uid == 4242


def test_without_a_mount_dev_is_1000() -> None:
    assert run_once("bash", "-c", WHO).stdout.split() == ["1000", "1000", "dev", "dev", "ok"]


def test_puid_and_pgid_win_over_the_owner(tmp_path: Path) -> None:
    workspace = make_folder(tmp_path / "w", 12345, 0o777)
    options = [f"--volume={workspace}:/workspace", "--env=PUID=2001", "--env=PGID=2002"]
    assert run_once("bash", "-c", WHO, options=options).stdout.split() == [
        "2001",
        "2002",
        "dev",
        "dev",
        "ok",
    ]


@pytest.mark.parametrize("user", ["12345:12345", "12345:0", "12345"])
def test_any_user_works(tmp_path: Path, user: str) -> None:
    workspace = make_folder(tmp_path / "w", 12345)
    options = [f"--user={user}", f"--volume={workspace}:/workspace"]
    done = run_once("bash", "-c", WHO, options=options)
    assert done.stdout.split() == ["12345", user.partition(":")[2] or "0", "user", "user", "ok"], (
        done.stderr
    )
    assert (workspace / "made").stat().st_uid == 12345


@pytest.mark.parametrize("options", [["--user=12345:12345"], ["--env=PUID=12345"]])
def test_git_ssh_and_compile_know_the_user(tmp_path: Path, options: list[str]) -> None:
    workspace = make_folder(tmp_path / "w", 12345)
    script = (
        "set -e; git init -q r; "
        "git -C r -c user.email=a@b.c -c user.name=n commit -q --allow-empty -m m; "
        "git -C r log --oneline | wc -l; ssh -V 2>&1 | cut -c1-7; "
        "ssh-keygen -q -t ed25519 -N '' -f k && echo made; "
        "python -c 'import torch; "
        "print(torch.compile(lambda x: x.sin() + 1)(torch.zeros(3)).tolist())'"
    )
    done = run_once(
        "bash", "-c", script, options=[*options, f"--volume={workspace}:/workspace"], timeout_s=180
    )
    assert done.stdout.split("\n")[:4] == ["1", "OpenSSH", "made", "[1.0, 1.0, 1.0]"], done.stderr


def test_docker_exec_as_dev_is_the_remapped_dev(tmp_path: Path) -> None:
    workspace = make_folder(tmp_path / "w", 12345)
    with started("sleep", "60", options=[f"--volume={workspace}:/workspace"]) as container:
        container.wait_for_log("")
        assert (
            container.execute(
                "sh", "-c", "while [ ! -e /run/pytorch-cuda/environment.sh ]; do sleep 0.1; done"
            )
            == ""
        )
        assert container.execute("id", "-u", user="dev").strip() == "12345"


def test_host_files_are_byte_and_mode_identical_after_start_and_stop(tmp_path: Path) -> None:
    workspace = make_folder(tmp_path / "w", 12345)
    for name, mode, owner in (("a", 0o600, 12345), ("b", 0o777, 0), ("c", 0o000, 4242)):
        file = workspace / name
        file.write_text(name)
        file.chmod(mode)
        os.chown(file, owner, owner)

    def snapshot() -> list[tuple[str, int, int, int, float, str]]:
        found = []
        for path in sorted([workspace, *workspace.iterdir()]):
            s = path.stat()
            digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
            found.append((path.name, s.st_mode, s.st_uid, s.st_gid, s.st_mtime, digest))
        return found

    before = snapshot()
    for mode in ("ssh", "jupyter"):
        with started(
            mode, options=["--shm-size=1g", f"--volume={workspace}:/workspace"]
        ) as container:
            container.wait_for_log("host key" if mode == "ssh" else "is running at")
            container.stop()
    assert snapshot() == before


def test_home_folder_of_the_host_is_left_as_it_is(tmp_path: Path) -> None:
    home = make_folder(tmp_path / "home", 1000)
    workspace = make_folder(tmp_path / "w", 12345)
    options = [f"--volume={home}:/home/dev", f"--volume={workspace}:/workspace"]
    done = run_once("true", options=options)
    assert (home.stat().st_uid, list(home.iterdir())) == (1000, [])
    assert "warning: /home/dev belongs to uid 1000, not to 12345" in done.stderr


def test_folder_above_a_mount_is_the_user_s_or_told(tmp_path: Path) -> None:
    # Docker makes it as root, and the image has none there.
    mount = f"--volume={make_folder(tmp_path / 'hub', 1000)}:/home/dev/.cache/huggingface"
    made = run_once("sh", "-c", "touch ~/.cache/uv && stat -c %U ~/.cache", options=[mount])
    assert (made.stdout.strip(), made.stderr) == ("dev", "")
    told = run_once("true", options=[mount, "--user=1000:1000"]).stderr
    assert "warning: /home/dev/.cache belongs to uid 0, not to 1000" in told


def test_volume_as_home_and_the_image_s_workspace_become_the_user_s() -> None:
    volume = f"test-{uuid.uuid4().hex[:12]}"
    try:
        for _ in range(
            2
        ):  # the second start finds the volume given over, and the workspace of a new container not
            done = run_once(
                "bash", "-c", WHO, options=["--env=PUID=777", f"--volume={volume}:/home/dev"]
            )
            assert done.stdout.split() == ["777", "777", "dev", "dev", "ok"], done.stderr
    finally:
        docker("volume", "rm", volume)


def test_data_mounted_read_only_below_the_workspace_stops_nothing(tmp_path: Path) -> None:
    data, code = make_folder(tmp_path / "data", 0), make_folder(tmp_path / "code", 4242)
    options = ["--shm-size=1g", f"--volume={data}:/workspace/a-data:ro"]
    done = run_once("train", "--help", options=options)
    assert (done.returncode, "warning:" in done.stderr) == (0, False), done.stderr
    both = [*options, f"--volume={code}:/workspace/code"]
    assert run_once("id", "-u", options=both).stdout.strip() == "4242"


@pytest.mark.parametrize(
    ("user", "tmpfs"),
    [([], "/run"), (["--user=12345:12345"], "/run/pytorch-cuda:mode=1777")],
    ids=["root", "user"],
)
def test_read_only_root_works_and_tells_what_it_needs(user: list[str], tmpfs: str) -> None:
    for mode in ("jupyter", "ssh"):
        needed = run_once(mode, options=["--shm-size=1g", "--read-only", "--tmpfs=/tmp", *user])
        assert needed.returncode == 2
        (error,) = [line for line in needed.stderr.splitlines() if line.startswith("error: ")]
        assert f": --tmpfs {tmpfs}" in error
        assert "(Apptainer: --writable-tmpfs)" in error
    who = "id -u; python -c 'import getpass; print(getpass.getuser())'; touch ~/made && echo ok"
    done = run_once(
        "bash", "-c", who, options=["--read-only", "--tmpfs=/tmp", f"--tmpfs={tmpfs}", *user]
    )
    assert done.stdout.split() == (["12345", "user", "ok"] if user else ["1000", "dev", "ok"]), (
        done.stderr
    )


READ_ONLY = ["--read-only", "--shm-size=1g", "--user=12345:12345", "--env=HOME=/somewhere"]


@pytest.mark.parametrize("tmp", [[], ["--tmpfs=/tmp"]], ids=["no-tmp", "tmp"])
def test_programs_run_where_nothing_but_a_home_can_be_written_to(
    tmp_path: Path, tmp: list[str]
) -> None:
    """As Apptainer and pyxis start an image: read-only, as the caller, in the caller's home."""
    home = make_folder(tmp_path / "home", 12345)
    options = [*READ_ONLY, *tmp, f"--volume={home}:/somewhere"]
    who = "id -u; python -c 'import getpass, torch; print(getpass.getuser())'; echo x > ~/made"
    done = run_once("bash", "-c", who, options=options)
    assert done.stdout.split() == ["12345", "user"], done.stderr
    assert (home / "made").stat().st_uid == 12345
    assert "note: /run/pytorch-cuda can't be written to" in done.stderr
    assert "--tmpfs /run/pytorch-cuda:mode=1777" in done.stderr
    train = ["train", "--device", "cpu", "--max-steps", "1", "--runs", "/somewhere/runs"]
    trained = run_once(*train, "--name", "first", options=options)
    assert trained.returncode == 0, trained.stderr
    assert (home / "runs/first/result.json").exists()
    told = run_once("doctor", options=options)
    assert told.stdout.startswith("doctor: "), told.stderr
    assert "Traceback" not in done.stderr + trained.stderr + told.stdout + told.stderr


def test_group_add_reaches_the_program() -> None:
    assert "4567" in run_once("id", "-G", options=["--group-add=4567"]).stdout.split()


def test_tini_is_pid_1_and_reaps() -> None:
    done = run_once(
        "bash",
        "-c",
        "cat /proc/1/comm; (sleep 0.1 &) ; sleep 0.5; ps -eo stat= | grep -c Z || true",
    )
    assert done.stdout.split() == ["tini", "0"]


def test_below_another_init_nothing_is_told() -> None:
    done = run_once("true", options=["--init"])
    assert (done.returncode, done.stderr) == (0, "")
