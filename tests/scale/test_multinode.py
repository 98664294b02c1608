"""compose/multinode.yml for real: two containers train, die, and come back."""

import json
import os
import shutil
import subprocess
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support import IMAGE, ROOT, docker, wait_until

IMAGES, BATCH, EPOCHS, SAVE_EVERY = 1437, 64, 12, 5
STEPS_PER_EPOCH = 23  # 22 of 64 images, and one of 29
SETTINGS = f"--name elastic --epochs {EPOCHS} --global-batch-size {BATCH} --log-every 1"
SETTINGS += f" --save-every {SAVE_EVERY} --model small_cnn --precision fp32"
SETTINGS += " --data recorded.py:digits"


@dataclass(frozen=True)
class Record:
    """What one rank of one generation read: (epoch, index) in order."""

    generation: str
    host: str
    rank: int
    world_size: int
    start: int
    time: float
    keys: list[tuple[int, int]]


@dataclass(frozen=True)
class Nodes:
    """The containers of a started compose/multinode.yml, by the first 12 digits of their ids, which
    are their host names."""

    hosts: list[str]
    folder: Path

    def records(self) -> list[Record]:
        """Of all ranks so far, oldest first."""
        found = []
        for path in sorted((self.folder / "reads").glob("*-*")):
            head, _, lines = path.read_text().partition("\n")
            if head and lines:
                keys = [(int(e), int(i)) for e, i in map(str.split, lines.splitlines())]
                found.append(Record(**json.loads(head), keys=keys))
        return found

    def wait_for_ranks(self, world_size: int, after: float) -> list[Record]:
        """Wait until all ranks of a generation of this size have begun after that time."""

        def begun() -> list[Record]:
            new = [record for record in self.records() if record.time > after]
            new = [record for record in new if record.world_size == world_size]
            return new if len(new) == world_size else []

        what = f"{world_size} ranks\n{self.logs()}"
        return sorted(wait_until(begun, what, 240), key=lambda record: record.rank)

    def logs(self) -> str:
        """What both printed."""
        return "\n".join(docker("logs", host, check=False) for host in self.hosts)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Callable[[], Nodes]]:
    folder = tmp_path / "workspace"
    shutil.copytree(ROOT / "workspace", folder)
    shutil.copy(ROOT / "tests/scale/multinode/recorded.py", folder)
    (folder / "reads").mkdir()
    subprocess.run(["chown", "-R", "1000:1000", str(folder)], check=True)
    variables = tmp_path / "variables"
    variables.write_text(
        f"WORKSPACE={folder}\nTRAIN_ARGS={SETTINGS}\nIMAGE={IMAGE}\nACCELERATOR=cpu\n"
    )
    project = [f"--project-name=test-{uuid.uuid4().hex[:8]}", f"--env-file={variables}"]
    files = [f"--file={ROOT / name}" for name in ("docker-compose.yml", "compose/multinode.yml")]
    compose = ["compose", *project, *files]

    def up() -> Nodes:
        docker(*compose, "up", "--detach", "node")
        return Nodes([host[:12] for host in docker(*compose, "ps", "-q", "node").split()], folder)

    try:
        yield up
    finally:
        docker(*compose, "down", "--volumes", "--timeout=1", check=False)


def counted(records: list[Record], total_steps: int) -> Counter[tuple[int, int]]:
    """How often each image of each epoch went into the weights that the run ended with: of each
    generation the steps before the one at which the next began."""
    generations: dict[str, list[Record]] = {}
    for record in records:
        generations.setdefault(record.generation, []).append(record)
    starts = [ranks[0].start for ranks in generations.values()]
    taken: Counter[tuple[int, int]] = Counter()
    for ranks, (begin, end) in zip(
        generations.values(), pairwise([*starts, total_steps]), strict=True
    ):
        assert [record.rank for record in sorted(ranks, key=lambda r: r.rank)] == list(
            range(ranks[0].world_size)
        )
        for record in ranks:
            images = 0
            for step in range(begin, end):
                last = step % STEPS_PER_EPOCH == STEPS_PER_EPOCH - 1
                size = IMAGES % BATCH if last else BATCH
                images += size // record.world_size
                images += record.rank < size % record.world_size
            assert len(record.keys) >= images
            taken.update(record.keys[:images])
    return taken


def test_either_node_may_die_and_return(nodes: Callable[[], Nodes]) -> None:
    """First the node of rank 0 dies, whose torchrun and store the ranks' group hung on; then, when
    it is back, the other. Each image is learned from once in each epoch all the same."""
    run = nodes()
    folder, total = run.folder / "runs/elastic", EPOCHS * STEPS_PER_EPOCH
    first, second = (record.host for record in run.wait_for_ranks(2, after=0))
    metrics = folder / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and '"step": 28,' in metrics.read_text(), "28 steps", 240)
    docker("kill", first)
    (alone,) = run.wait_for_ranks(1, after=run.records()[-1].time)
    assert alone.host == second
    assert alone.start >= 25
    docker("start", first)
    both = run.wait_for_ranks(2, after=alone.time)
    assert {record.host for record in both} == {first, second}
    # The ranks were asked to stop, and saved: no step is made again.
    (before,) = (record for record in run.records() if record.time == alone.time)
    assert both[0].start > alone.start
    at_join = counted([before], both[0].start)
    assert len(before.keys) == at_join.total()
    docker("kill", second)
    (last,) = run.wait_for_ranks(1, after=both[-1].time)
    assert last.host == first
    (run.folder / "reads/gate").touch()
    assert int(docker("wait", first)) == 0, run.logs()
    assert json.loads((folder / "result.json").read_text())["accuracy"] >= 0.98
    taken = counted(run.records(), total)
    assert taken == Counter((epoch, image) for epoch in range(EPOCHS) for image in range(IMAGES))
    windows = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [window["step"] for window in windows if window["kind"] == "window"]
    assert steps == list(range(1, total + 1))


def test_make_multinode(tmp_path: Path) -> None:
    """To its end and with its exit code; nothing runs on."""
    folder = tmp_path / "workspace"
    shutil.copytree(ROOT / "workspace", folder)
    subprocess.run(["chown", "-R", "1000:1000", str(folder)], check=True)
    project = f"test-{uuid.uuid4().hex[:8]}"
    variables = {"WORKSPACE": str(folder), "COMPOSE_PROJECT_NAME": project, "IMAGE": IMAGE}
    try:
        done = subprocess.run(
            ["make", "multinode", "ARGS=--epochs 1 --name short"],
            cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert "2 processes" in done.stdout
        assert (folder / "runs/short/result.json").exists()
        mine = f"--filter=label=com.docker.compose.project={project}"
        assert docker("ps", "--all", "--quiet", mine) == ""
    finally:
        compose = ["compose", f"--project-name={project}", f"--file={ROOT}/docker-compose.yml"]
        docker(*compose, "down", "--volumes", "--remove-orphans", "--timeout=1", check=False)
