"""deploy/slurm/train.sbatch on a real cluster: Debian's slurmctld and two slurmd in containers."""

import shutil
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from host.build import build_secrets
from tests.support import IMAGE, ROOT, docker, wait_until

NODE_IMAGE = f"{IMAGE}-slurm"
SCRIPT = "deploy/slurm/train.sbatch"
SETTINGS = ["--device", "cpu", "--precision", "fp32"]


@dataclass(frozen=True)
class Cluster:
    """Two nodes that share /workspace, which `folder` is on the host."""

    controller: str
    folder: Path

    def execute(self, *command: str, variables: Sequence[str] = ()) -> str:
        """Run a command on the first node, as `dev`."""
        as_dev = ["setpriv", "--reuid=dev", "--regid=dev", "--clear-groups"]
        env = ["env", "HOME=/home/dev", "USER=dev", "NPROC=1", *variables]
        return docker("exec", "-w", "/workspace", self.controller, *as_dev, *env, *command)

    def submit(self, *arguments: str, variables: Sequence[str] = ()) -> str:
        """Submit a job and return its id."""
        return self.execute("sbatch", "--parsable", *arguments, variables=variables).strip()

    def state(self, job: str) -> str:
        """State and exit code as `scontrol show job` tells them, of each job of an array."""
        shown = self.execute("scontrol", "--oneliner", "show", "job", job)
        wanted = ("JobState", "ExitCode", "Restarts")
        fields = (field for field in shown.split() if field.startswith(wanted))
        return " ".join(fields)

    def wait_for_end(self, job: str) -> str:
        """Wait until a job has ended, and return its state."""

        def ended() -> str:
            state = self.state(job)
            running = ("PENDING", "RUNNING", "COMPLETING", "REQUEUED", "CONFIGURING")
            return "" if any(word in state for word in running) else state

        return wait_until(ended, f"the end of job {job}", 300, 0.5)

    def log(self, job: str) -> str:
        """What a job printed."""
        return (self.folder / f"amptrain-{job}.log").read_text()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    secrets = build_secrets()
    image = ["--quiet", f"--tag={NODE_IMAGE}", f"--build-arg=IMAGE={IMAGE}", *secrets]
    docker("buildx", "build", *image, str(ROOT / "tests/scale/slurm"), timeout_s=600)
    name = f"test-{uuid.uuid4().hex[:8]}"
    folder = tmp_path_factory.mktemp("cluster") / "workspace"
    shutil.copytree(ROOT / "workspace", folder)
    shutil.copytree(ROOT / "deploy/slurm", folder / "deploy/slurm")
    # Jobs run as `dev`, whose uid in the image is 1000.
    docker("run", "--rm", f"--volume={folder}:/w", "--entrypoint=chown", IMAGE, "-R", "1000", "/w")
    docker("network", "create", name)
    try:
        for node, role in (("node1", ["controller"]), ("node2", [])):
            options = [f"--name={name}-{node}", f"--hostname={node}", f"--network={name}"]
            options += [f"--network-alias={node}", "--shm-size=1g", f"--volume={folder}:/workspace"]
            start = ["--entrypoint=tini", NODE_IMAGE, "--", "start-node", *role]
            docker("run", "--detach", *options, *start)
        cluster = Cluster(f"{name}-node1", folder)
        nodes = ["exec", cluster.controller, "sinfo", "--noheader", "--format=%D %t"]
        wait_until(lambda: docker(*nodes, check=False).strip() == "2 idle", "two idle nodes", 60)
        yield cluster
    finally:
        docker("rm", "--force", "--volumes", f"{name}-node1", f"{name}-node2", check=False)
        docker("network", "rm", name, check=False)


def digests(cluster: Cluster, name: str) -> str:
    """SHA-256 of the weights in a run's newest checkpoint."""
    code = (
        "import hashlib, sys; from pathlib import Path\n"
        f"import torch; path = max(Path('runs/{name}/checkpoints').glob('*.pt'))\n"
        "model = torch.load(path, weights_only=True)['model']\n"
        "for key in sorted(model):\n"
        " print(key, hashlib.sha256(model[key].contiguous().numpy().tobytes()).hexdigest())"
    )
    return cluster.execute("/opt/venv/bin/python", "-c", code)


def test_a_requeued_job_ends_as_one_that_ran_through(cluster: Cluster) -> None:
    """`scontrol requeue` is what a preemption does: SIGTERM to all processes, then the queue."""
    epochs = ["--epochs", "6", *SETTINGS]
    through = cluster.submit(SCRIPT, "--name", "through", *epochs)
    assert "JobState=COMPLETED" in cluster.wait_for_end(through), cluster.log(through)
    assert "2 processes" in cluster.log(through)
    job = cluster.submit(SCRIPT, "--name", "requeued", *epochs)
    metrics = cluster.folder / "runs/requeued/metrics.jsonl"
    wait_until(lambda: metrics.exists() and '"step": 20' in metrics.read_text(), "20 steps", 120)
    cluster.execute("scontrol", "requeue", job)
    state = cluster.wait_for_end(job)
    assert "JobState=COMPLETED" in state, cluster.log(job)
    assert "Restarts=1" in state
    stopped = cluster.log(job).split("Stopped as asked at step ")[1].split(".")[0]
    assert f"Continuing at step {stopped} of" in cluster.log(job)
    assert digests(cluster, "requeued") == digests(cluster, "through")


def test_a_job_at_its_time_limit_saves_and_requeues_itself(cluster: Cluster) -> None:
    """Slurm sends USR1 before the limit, here an operator does, to the batch script alone."""
    job = cluster.submit(SCRIPT, "--name", "limit", "--epochs", "4000", *SETTINGS)
    metrics = cluster.folder / "runs/limit/metrics.jsonl"
    wait_until(lambda: metrics.exists() and '"step": 20' in metrics.read_text(), "20 steps", 120)
    cluster.execute("scancel", "--batch", "--signal=USR1", job)
    wait_until(lambda: "Continuing at step" in cluster.log(job), "the job's second start", 120)
    stopped = cluster.log(job).split("Stopped as asked at step ")[1].split(".")[0]
    assert f"Continuing at step {stopped} of" in cluster.log(job)
    cluster.execute("scancel", job)
    assert "JobState=CANCELLED" in cluster.wait_for_end(job)


def test_a_failing_script_is_a_failing_job(cluster: Cluster) -> None:
    job = cluster.submit(SCRIPT, "--name", "broken", "--data", "imagefolder:/nowhere", *SETTINGS)
    state = cluster.wait_for_end(job)
    assert "JobState=FAILED" in state
    assert "/nowhere" in cluster.log(job)


def test_an_array_over_learning_rates_gives_as_many_runs(cluster: Cluster) -> None:
    # By the environment: with `--export=NAME=…` slurmd unshares mounts, which containers may not.
    variables = ["LEARNING_RATES=0.001 0.005"]
    array = ["--array=0-1", "--nodes=1"]
    job = cluster.submit(*array, SCRIPT, "--epochs", "1", *SETTINGS, variables=variables)
    assert cluster.wait_for_end(job).count("JobState=COMPLETED") == 2
    for rate in ("0.001", "0.005"):
        config = (cluster.folder / f"runs/lr-{rate}/config.yaml").read_text()
        assert f"lr: {rate}\n" in config
