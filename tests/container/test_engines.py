"""What Slurm, Kubernetes, Kubeflow, Ray and the like count on: the image runs their command as it
is, finds torchrun in every kind of shell, and takes any user."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.container.conftest import KeyPair, Ssh
from tests.support import Container, docker_process, make_folder, run_once, started

TORCHRUN = "/opt/venv/bin/torchrun"
# As the engines write it: words, quotes and empty arguments come through as they are.
ARGUMENTS = ["-c", "", "a b", 'it\'s "quoted" $HOME `id` \\', "--flag=1", "two\nlines", "é"]
TELL = """
import json, os, sys
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status") if ":\\t" in line)
print(json.dumps({
    "argv": sys.argv[1:],
    "parent": open(f"/proc/{os.getppid()}/comm").read().strip(),
    "others": [p for p in os.listdir("/proc") if p.isdecimal() and int(p) not in (1, os.getpid())],
    "ignored": int(status["SigIgn"], 16) & ~(1 << 12 | 1 << 24),
    "blocked": int(status["SigBlk"], 16),
    "given": {name: os.environ.get(name) for name in ("RANK", "MASTER_ADDR", "PET_NNODES")},
}))
"""
GIVEN = {"RANK": "3", "MASTER_ADDR": "node-0.job", "PET_NNODES": "2"}


def test_command_is_run_as_it_is_and_in_the_place_of_the_entrypoint() -> None:
    """Below tini, nothing between; no signal is ignored or blocked but those that Python itself
    ignores (SIGPIPE, SIGXFSZ) and those that the engine hands down: an engine that was started
    with a signal ignored starts every container so."""
    options = [f"--env={name}={value}" for name, value in GIVEN.items()]
    done = run_once("python", "-c", TELL, *ARGUMENTS, options=options)
    bare = run_once("--", "python", "-c", TELL, options=["--entrypoint=tini"])
    handed_down = json.loads(bare.stdout)["ignored"]
    assert json.loads(done.stdout) == {
        "argv": ARGUMENTS,
        "parent": "tini",
        "others": [],
        "ignored": handed_down,
        "blocked": 0,
        "given": GIVEN,
    }, done.stderr


def test_torchrun_as_command_starts_its_ranks_and_stops_them() -> None:
    script = (
        'trap "echo rank $RANK of $WORLD_SIZE stopped; exit 0" TERM; echo ready; '
        "while :; do sleep 0.1; done"
    )
    command = ["torchrun", "--standalone", "--nproc-per-node=2", "--no-python", "bash", "-c"]
    # torchrun itself tells the signal as an exception of its own.
    with started(*command, script, announced=[""]) as container:
        container.wait_for_log(r"ready\n(.*\n)*.*ready")
        container.stop()
        assert container.exit_code() == 1  # torchrun's own; 137 would be SIGKILL
        log = container.log()
    assert {f"rank {rank} of 2 stopped" in log for rank in (0, 1)} == {True}, log


@pytest.fixture(scope="module")
def sshd(key: KeyPair) -> Iterator[Container]:
    options = ["--shm-size=1g", "--publish=127.0.0.1::2222", f"--env=SSH_PUBLIC_KEY={key.public}"]
    with started("ssh", options=options) as container:
        yield container


@pytest.mark.parametrize("user", ["dev", "root"])
def test_torchrun_is_found_by_ssh_without_a_login_shell(
    sshd: Container, ssh: Ssh, user: str
) -> None:
    assert ssh(sshd, "command -v torchrun", user=user).stdout.strip() == TORCHRUN
    done = ssh(sshd, "torchrun --help", user=user)
    assert (done.returncode, "--nproc-per-node" in done.stdout) == (0, True), done.stderr


def test_torchrun_is_found_by_a_login_shell_of_docker_run() -> None:
    """As Kubeflow's container backend calls it; Debian's /etc/profile resets PATH."""
    script = "command -v torchrun; torchrun --help | grep -c nproc-per-node"
    done = run_once("bash", "-lc", script)
    assert (done.returncode, done.stdout.split()[0]) == (0, TORCHRUN), done.stderr


def test_any_user_with_a_read_only_root_and_a_home_elsewhere(tmp_path: Path) -> None:
    """As Apptainer, enroot and OpenShift start it. torchrun runs there, and nothing needs the
    image's own home."""
    home = make_folder(tmp_path / "home", 12345, 0o700)
    options = ["--read-only", "--tmpfs=/tmp", "--tmpfs=/run/pytorch-cuda:mode=1777"]
    options += ["--user=12345:12345", f"--volume={home}:/scratch", "--env=HOME=/scratch"]
    script = (
        "set -e; echo $HOME; cd ~; echo 'import os; print(os.environ[\"WORLD_SIZE\"])' > x.py; "
        "torchrun --standalone --nproc-per-node=1 x.py"
    )
    done = run_once("bash", "-c", script, options=options)
    assert done.stdout.split() == ["/scratch", "1"], done.stderr
    assert (home / "x.py").stat().st_uid == 12345


MEET = """
import os, sys, time, torch, torch.distributed as dist
own, other = sys.argv[1:]
dist.init_process_group("gloo")
open(f"/tmp/up-{own}", "w").close()
while not os.path.exists(f"/tmp/up-{other}"):  # both are there before either goes on
    time.sleep(0.05)
total = torch.tensor([float(own)])
dist.all_reduce(total)
sys.stdout.write(f"{own}: {dist.get_world_size()} ranks, sum {total.item():g}\\n")
dist.barrier()
dist.destroy_process_group()
"""


def test_two_standalone_jobs_of_one_container_do_not_meet(sshd: Container) -> None:
    """Each on a port of its own, at the same time; with one port the second would join the first
    or fail."""
    sshd.execute("sh", "-c", "cat > /tmp/meet.py", stdin=MEET)
    job = "torchrun --standalone --nproc-per-node=2 /tmp/meet.py"
    script = f"{job} 1 100 & first=$!; {job} 100 1 && wait $first"
    done = docker_process("exec", "--user=dev", sshd.name, "timeout", "100", "bash", "-lc", script)
    assert done.returncode == 0, done.stderr
    lines = ["1: 2 ranks, sum 2"] * 2 + ["100: 2 ranks, sum 200"] * 2
    assert sorted(done.stdout.splitlines()) == sorted(lines), done.stderr
