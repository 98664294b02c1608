"""Start, signals, exit codes, health: what an engine and an orchestrator count on."""

import re
from pathlib import Path

import pytest

from tests.container.test_jupyter import run_in_kernel
from tests.support import docker, make_folder, run_once, started, wait_until

SHM = "--shm-size=1g"


@pytest.mark.parametrize(
    ("mode", "ready"), [("jupyter", "is running at"), ("ssh", "Server listening")]
)
def test_stop_ends_the_mode_by_sigterm_and_not_by_kill(mode: str, ready: str) -> None:
    with started(mode, options=[SHM]) as container:
        container.wait_for_log(ready)
        container.stop()
        assert container.exit_code() == 0  # 137 would be SIGKILL after Docker's 10 s


def test_stop_ends_jupyter_with_a_running_kernel() -> None:
    with started(
        "jupyter", options=[SHM, "--env=JUPYTER_TOKEN=t", "--publish=127.0.0.1::8888"]
    ) as container:
        container.wait_for_log("is running at")
        assert run_in_kernel(container, "t", "print('up')") == "up\n"
        container.stop()
        assert container.exit_code() == 0


def test_sigterm_reaches_the_user_s_program() -> None:
    script = "trap 'echo got TERM; exit 3' TERM; echo ready; while :; do sleep 0.1; done"
    with started("bash", "-c", script) as container:
        container.wait_for_log("ready")
        container.stop()
        assert container.exit_code() == 3
        assert "got TERM" in container.log()


COUNTS = """#!/usr/bin/python3
import signal, sys
signals = [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1]
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
print("ready", flush=True)
while got := signal.sigtimedwait(signals, 3):
    print("got", signal.Signals(got.si_signo).name, flush=True)
sys.exit(42)
"""
SIGNALS = ("SIGTERM", "SIGHUP", "SIGUSR1")
ENTRY = ("-I", "/opt/entrypoints", "train")
BARE = ("--entrypoint=/usr/bin/python3", "--user=1000:1000")


@pytest.mark.parametrize(
    ("options", "words"), [((), ("train",)), (BARE, ENTRY)], ids=["tini -g", "PID 1"]
)
def test_training_gets_each_signal_once_and_its_exit_code_stays(
    options: tuple[str, ...], words: tuple[str, ...], tmp_path: Path
) -> None:
    """The entrypoint stays beside amptrain, in whose place a script counts here."""
    script = tmp_path / "amptrain"
    script.write_text(COUNTS)
    script.chmod(0o755)
    mount = f"--volume={script}:/opt/venv/bin/amptrain:ro"
    with started(*words, options=[SHM, mount, *options]) as container:
        container.wait_for_log("ready")
        for name in SIGNALS:  # several: two of a kind that come at once are one
            docker("kill", f"--signal={name}", container.name)
            container.wait_for_log(f"got {name}")
        assert container.exit_code() == 42
        assert re.findall(r"got (\w+)", container.log()) == list(SIGNALS)


HUNGRY = """
def model() -> None:
    held = bytearray(b"x") * (900 << 20)
"""


def test_training_that_the_kernel_kills_is_told(tmp_path: Path) -> None:
    workspace = make_folder(tmp_path / "w", 12345)
    (workspace / "hungry.py").write_text(HUNGRY)
    limits = ["--memory=600m", "--memory-swap=600m", f"--volume={workspace}:/workspace"]
    words = ("train", "--device=cpu", "--model=hungry.py:model", "--name=killed")
    done = run_once(*words, options=[SHM, *limits])
    assert done.returncode == 137
    told = (
        r"error: amptrain was ended by signal 9 \(Killed\), exit code 137: the kernel killed it .*"
    )
    assert re.search(rf"^{told}600 MiB.*--memory 8g; Compose: mem_limit", done.stderr, re.MULTILINE)


def test_training_that_crashes_is_told_with_the_limit_that_did_it() -> None:
    done = run_once("train", "--help", options=[SHM, "--ulimit=stack=65536:65536"])
    assert done.returncode == 139
    assert "signal 11 (Segmentation fault), exit code 139: stacks are limited to 64" in done.stderr


@pytest.mark.parametrize("code", [0, 1, 42])
def test_exit_code_is_the_program_s(code: int) -> None:
    assert run_once("bash", "-c", f"exit {code}").returncode == code


def test_restart_works_in_each_mode(tmp_path: Path) -> None:
    workspace = make_folder(tmp_path / "w", 12345)
    for mode, ready in (("jupyter", "is running at"), ("ssh", "Server listening")):
        with started(mode, options=[SHM, f"--volume={workspace}:/workspace"]) as container:
            container.wait_for_log(ready)
            docker("restart", container.name)
            wait_until(
                lambda c=container, r=ready: c.log().count(r) >= 2,
                f"a second start of {mode}\n{container.log()}",
            )


@pytest.mark.parametrize("mode", ["jupyter", "ssh"])
def test_health_becomes_good_and_then_bad(mode: str) -> None:
    options = [SHM, "--health-interval=1s", "--health-start-period=30s", "--health-retries=1"]
    with started(mode, options=options) as container:
        wait_until(lambda: container.health() == "healthy", "healthy")
        if mode == "jupyter":  # it hangs
            container.execute("pkill", "-STOP", "-f", "jupyter-lab")
        else:  # the port it should listen on is another one
            container.execute("sed", "-i", "s/2222/2299/", "/run/pytorch-cuda/mode.json")
        wait_until(lambda: container.health() == "unhealthy", "unhealthy")
        container.execute("pkill", "-CONT", "-f", "jupyter-lab", check=False)


def test_program_beside_the_server_is_healthy() -> None:
    """`jupyter execute` may run for hours without a port."""
    entrypoint = "/usr/bin/python3 -I /opt/entrypoints"
    done = run_once(
        "-c",
        f"{entrypoint} jupyter --version && {entrypoint} health",
        options=["--entrypoint=bash"],
    )
    assert done.returncode == 0, done.stderr


def test_soft_limit_of_open_files_is_raised_to_the_hard_one() -> None:
    done = run_once("bash", "-c", "ulimit -Sn; ulimit -Hn", options=["--ulimit=nofile=1024:4096"])
    assert done.stdout.split() == ["4096", "4096"]


@pytest.mark.parametrize(("cpus", "threads"), [("1", "1"), ("1.5", "2"), ("2", "2")])
def test_threads_follow_the_quota(cpus: str, threads: str) -> None:
    code = "import os, torch; print(os.environ['OMP_NUM_THREADS'], torch.get_num_threads())"
    done = run_once("python", "-c", code, options=[f"--cpus={cpus}"])
    assert done.stdout.split() == [threads, threads], done.stderr


def test_user_s_thread_count_is_kept() -> None:
    done = run_once("printenv", "OMP_NUM_THREADS", options=["--cpus=1", "--env=OMP_NUM_THREADS=7"])
    assert done.stdout.strip() == "7"


@pytest.mark.parametrize(("quota", "cpus"), [("0.3", 1), ("1.5", 2)])
def test_threads_of_the_container_and_of_amptrain_follow_the_quota_alike(
    quota: str, cpus: int
) -> None:
    script = (
        "import os; from amptrain.limits import usable_cpus as u; print(u(), "
        "os.environ['OMP_NUM_THREADS'])"
    )
    done = run_once("python", "-c", script, options=[f"--cpus={quota}"])
    assert done.stdout.split() == [str(cpus), str(cpus)], done.stderr
