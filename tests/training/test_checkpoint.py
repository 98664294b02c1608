"""Checkpoints outlive kills, full disks and damage; what cannot be used is named."""

import os
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from amptrain.checkpoint.store import CheckpointError, CheckpointStore
from amptrain.config import TrainConfig
from amptrain.train import train

Make = Callable[..., TrainConfig]
EMPTY: dict[str, object] = {
    "model": {},
    "optimizer": {},
    "scaler": {},
    "progress": {},
    "rng": [],
    "config": {},
}


def content(step: int, numbers: int = 1000) -> dict[str, object]:
    """A state whose every number is the step."""
    return {**EMPTY, "model": {"weight": torch.full((numbers,), float(step))}}


def step_of(store: CheckpointStore) -> int:
    """The step of the newest good checkpoint, all of whose numbers must agree with it."""
    loaded = store.load_latest()
    assert loaded is not None
    model = loaded.state["model"]
    assert isinstance(model, dict)
    assert bool((model["weight"] == loaded.step).all())
    return loaded.step


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """Two checkpoints, of steps 1 and 2."""
    store = CheckpointStore(tmp_path / "checkpoints")
    for step in (1, 2):
        store.save(content(step), step)
    return store


def names(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.directory.iterdir())


def test_two_are_kept_and_nothing_else(store: CheckpointStore) -> None:
    store.save(content(10), 10)
    assert names(store) == ["step-000000002.pt", "step-000000010.pt"]
    assert step_of(store) == 10


def test_there_may_be_none_yet(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "nowhere").load_latest() is None


def test_torch_alone_can_read_one(store: CheckpointStore) -> None:
    loaded = torch.load(store.directory / "step-000000002.pt", weights_only=True)
    assert loaded["step"] == 2


def foreign(path: Path) -> None:
    torch.save({"state_dict": {"weight": torch.ones(3)}}, path)


def without_a_number(path: Path) -> None:
    torch.save({**content(2), "format": "amptrain checkpoint 1", "step": "two"}, path)


def with_code(path: Path) -> None:
    torch.save({**content(2), "format": "amptrain checkpoint 1", "hook": subprocess.run}, path)


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    at = data.index(
        torch.full((8,), 2.0).numpy().tobytes()
    )  # in the weights, where no pickle would notice
    data[at + 2] ^= 0x10
    path.write_bytes(bytes(data))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-700])


UNUSABLE: dict[str, Callable[[Path], object]] = {
    "is empty": lambda path: path.write_bytes(b""),
    "is damaged or cut short": cut,
    "is damaged (in archive/data/0)": flipped,
    "was not written by this version of amptrain": foreign,
    "was not written by this version": without_a_number,
    "holds something other than tensors and plain types": with_code,
}


@pytest.mark.parametrize("text", UNUSABLE)
def test_what_cannot_be_used_is_named_and_the_one_before_is_taken(
    text: str, store: CheckpointStore
) -> None:
    newest = store.directory / "step-000000002.pt"
    UNUSABLE[text](newest)
    loaded = store.load_latest()
    assert loaded is not None
    assert loaded.step == 1
    [message] = loaded.messages
    assert message.startswith(f"The checkpoint {newest} ")
    assert text.partition("archive/")[0] in message
    assert names(store) == [
        "step-000000001.pt",
        "step-000000002.unusable",
    ]  # not lost, and not in the way
    store.save(content(3), 3)
    assert step_of(store) == 3


def test_if_none_can_be_used_it_does_not_start_from_nothing(make_config: Make) -> None:
    config = make_config(save_every=5)
    assert train(config) == 0
    for path in (config.run_dir / "checkpoints").glob("*.pt"):
        cut(path)
    with pytest.raises(CheckpointError, match="start anew with another --name") as caught:
        train(config)
    assert str(caught.value).count("is damaged or cut short") == 2


def test_every_flipped_byte_is_noticed_or_means_nothing(store: CheckpointStore) -> None:
    """300 places over the whole file: either the file is passed over, or what it holds is what was
    saved."""
    path = store.directory / "step-000000002.pt"
    good, noticed = path.read_bytes(), 0
    chosen = random.Random(0)
    for _ in range(300):
        data = bytearray(good)
        data[chosen.randrange(len(data))] ^= 1 << chosen.randrange(8)
        path.write_bytes(bytes(data))
        if step_of(store) == 1:
            noticed += 1
            (store.directory / "step-000000002.unusable").unlink()
    assert noticed > 150


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_one_that_may_not_be_read_is_no_reason_to_go_back(store: CheckpointStore) -> None:
    newest = store.directory / "step-000000002.pt"
    newest.chmod(0)
    with pytest.raises(CheckpointError, match=rf"{newest} may not be read by uid {os.getuid()}"):
        store.load_latest()
    assert newest.exists()


def test_a_full_disk_leaves_the_old_ones_and_nothing_half_written(store: CheckpointStore) -> None:
    """A limit on the size of files, which write(2) meets in the middle of the file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        with pytest.raises(
            CheckpointError, match=r"File too large\. The checkpoints from before are untouched"
        ):
            store.save(content(3, numbers=1_000_000), 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert names(store) == ["step-000000001.pt", "step-000000002.pt"]
    assert step_of(store) == 2


@pytest.mark.parametrize("later", [False, True])
def test_a_run_on_a_full_disk_goes_on_says_so_and_does_not_end_well(
    later: bool, make_config: Make, messages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(save_every=5, async_checkpoint=later)

    def full(self: CheckpointStore, state: dict[str, object], step: int) -> Path:
        if step == 5:
            return save(self, state, step)
        raise CheckpointError("No space left on device.")

    save = CheckpointStore.save
    monkeypatch.setattr(CheckpointStore, "save", full)
    with pytest.raises(CheckpointError, match="the last checkpoint of this run is of step 5"):
        train(config)
    assert messages.count("No space left on device.") == 2
    assert [path.name for path in (config.run_dir / "checkpoints").iterdir()] == [
        "step-000000005.pt"
    ]
    monkeypatch.undo()
    assert train(config) == 0


SAVER = """
import os
import sys
from pathlib import Path
import torch
from amptrain.checkpoint.store import CheckpointStore

torch.set_num_threads(1)
store = CheckpointStore(Path(sys.argv[1]))
loaded = store.load_latest()
step = 0 if loaded is None else loaded.step
empty = {"model": {}, "optimizer": {}, "scaler": {}, "progress": {}, "rng": [], "config": {}}
while True:
    step += 1
    store.save({**empty, "model": {"weight": torch.full((200_000,), float(step))}}, step)
    os.write(1, f"{step}\\n".encode())  # whole, or not at all
"""
# A process that has imported torch forks the ones that are killed, which so begin to save within
# milliseconds.
FORKER = """
import os, signal, sys
from amptrain.checkpoint import store as checkpoint
for line in sys.stdin:
    child = os.fork()
    if child == 0:  # says who it is itself: its parent may be later than its first save
        print("forked", os.getpid(), flush=True)
        exec(compile(SAVER, "saver", "exec"))
    os.waitpid(child, 0)
    print("dead", flush=True)
"""


def test_killed_at_100_random_moments_while_saving(tmp_path: Path) -> None:
    """No save that was reported is lost, and no file that is half written is read."""
    program = f"SAVER = {SAVER!r}\n{FORKER}"
    half_written, waits = 0, random.Random(0)
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as forker:
        assert forker.stdin is not None
        assert forker.stdout is not None
        for _ in range(100):
            forker.stdin.write("next\n")
            forker.stdin.flush()
            child = int(forker.stdout.readline().split()[1])
            saved = int(forker.stdout.readline())  # it is saving now, one after the other
            signal.sigtimedwait(set(), waits.uniform(0, 0.02))
            os.kill(child, signal.SIGKILL)
            while (line := forker.stdout.readline().strip()) != "dead":
                saved = int(line)
            half_written += len(list(tmp_path.glob("*.tmp")))
            assert step_of(CheckpointStore(tmp_path)) in {
                saved,
                saved + 1,
            }  # renamed, and killed before it said so
        forker.stdin.close()
    assert half_written > 20, "the kills came in the middle of saves"
