"""How runs end: done, refused, or with a sentence about a broken image or a worker that died."""

import errno
import json
import os
import pty
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import torch
from amptrain.checkpoint.lock import alone_in
from amptrain.checkpoint.store import sync_directory
from amptrain.cli import run as run_command
from amptrain.config import from_flat, save_yaml
from amptrain.errors import CheckpointError, ConfigError, TrainingError
from amptrain.files import atomic_write
from amptrain.train import train

from .support import Make, broken_folder, command, trainer_of, wait_for


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_finished_run_says_its_result_again_and_changes_no_file(
    make_config: Make, messages: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config()
    assert train(config) == 0
    before = contents(config.run_dir)
    assert train(make_config(workers=1, log_every=3)) == 0
    said = capsys.readouterr().out
    assert "is finished at step 12: there is nothing to train" in said
    assert messages[-1] in said
    assert contents(config.run_dir) == before


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"lr": 1e-4}, "lr0.0001"),
        ({"precision": "bf16"}, "precisionbf16"),
        ({"max_steps": 3}, "max_steps3"),
    ],
)
def test_a_finished_run_is_not_told_as_one_of_other_settings(
    changed: dict[str, object], name: str, make_config: Make
) -> None:
    """Another learning rate printed the old accuracy, and config.yaml said the new rate."""
    config = make_config(precision="fp32")
    assert train(config) == 0
    before = contents(config.run_dir)
    with pytest.raises(ConfigError, match=f"--name {config.run_dir.name}-{name}"):
        train(make_config(**{"precision": "fp32", **changed}))
    assert contents(config.run_dir) == before


def test_a_loop_over_learning_rates_gives_as_many_runs() -> None:
    runs = {from_flat({"lr": lr}).run_dir for lr in (5e-3, 1e-3, 1e-4)}
    assert len(runs) == 3
    assert from_flat({"epochs": 3}).run_dir == from_flat({}).run_dir  # it continues


def test_a_checkpoint_of_another_model_is_told_in_a_sentence(make_config: Make) -> None:
    config = make_config(epochs=1)
    assert train(config) == 0
    (path,) = (config.run_dir / "checkpoints").glob("step-*.pt")
    state = torch.load(path, weights_only=True)
    state["model"] = {"other": torch.zeros(2)}
    torch.save(state, path)
    with pytest.raises(CheckpointError, match=r"does not fit this model"):
        train(make_config(epochs=2))


def test_memory_that_runs_out_is_told_with_what_to_set(
    make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a real allocation of 8 EiB, which torch's allocator for the CPU refuses."""
    monkeypatch.setattr("amptrain.train.backward", lambda *_, **__: torch.empty(2**60).double())
    with pytest.raises(
        TrainingError, match=r"Out of memory: .*--grad-accum-steps 2 gives the same step"
    ):
        train(make_config())


def test_a_reader_that_goes_away_ends_no_run(make_config: Make) -> None:
    """`amptrain train | head -1`."""
    config = make_config(epochs=2, log_every=1)
    reader = ["head", "-1"]
    with subprocess.Popen(command(config), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        subprocess.run(reader, stdin=run.stdout, check=True, stdout=subprocess.DEVNULL)
        run.stdout.close()
        errors = run.stderr.read()
    assert (run.returncode, errors) == (0, b"")
    assert (config.run_dir / "result.json").exists()


def test_a_terminal_that_closes_ends_no_run(make_config: Make) -> None:
    """Without a signal, as that of a session the run was moved out of: a write gives EIO, and the
    bar writes from a thread of its own."""
    config = make_config(epochs=3, log_every=1, precision="fp32")
    master, slave = pty.openpty()
    with subprocess.Popen(
        command(config),
        stdout=slave,
        stderr=subprocess.PIPE,
        env={**os.environ, "TERM": "xterm-256color"},
    ) as run:
        os.close(slave)
        shown = b""
        while b"step  5/36" not in shown:
            shown += os.read(master, 4096)
        os.close(master)
        assert run.stderr is not None
        errors = run.stderr.read()
    assert (run.returncode, errors) == (0, b"")
    assert "━" in shown.decode(errors="ignore")
    assert (config.run_dir / "result.json").exists()


def test_a_full_disk_below_standard_output_ends_no_run(make_config: Make) -> None:
    """`amptrain train > log`; the run itself is on another disk."""
    config = make_config(log_every=1, precision="fp32")
    with Path("/dev/full").open("wb") as full:
        run = subprocess.run(command(config), stdout=full, stderr=subprocess.PIPE, check=False)
    assert (run.returncode, run.stderr) == (0, b"")
    assert (config.run_dir / "result.json").exists()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_thread_trains_and_continues(workers: int, make_config: Make) -> None:
    """As in a notebook's or a server's; only the main thread may set handlers of signals."""
    for epochs in (1, 2):
        config = make_config(epochs=epochs, num_workers=workers, precision="fp32")
        with ThreadPoolExecutor() as threads:
            assert threads.submit(train, config).result() == 0
    assert json.loads((config.run_dir / "result.json").read_text())["epochs"] == 2


def test_two_runs_in_one_directory_are_refused(make_config: Make) -> None:
    config = make_config()
    config.run_dir.mkdir(parents=True)
    lock = "f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX)"
    holder = f"import fcntl, sys; {lock}; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", holder, config.run_dir / ".lock"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(ConfigError, match="Another process is training in"):
            train(config)
        process.communicate()


def test_what_is_refused_leaves_nothing_behind(make_config: Make, tmp_path: Path) -> None:
    config = make_config(data=f"imagefolder:{tmp_path}/nothing")
    with pytest.raises(ConfigError):
        train(config)
    assert not config.run_dir.exists()
    assert train(make_config(max_steps=1)) == 0
    with pytest.raises(ConfigError):
        train(make_config(max_steps=1, batch_size=64))
    assert (config.run_dir / "result.json").exists()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_image_ends_the_run_with_its_path(
    workers: int, make_config: Make, tmp_path: Path
) -> None:
    root = broken_folder(tmp_path)
    config = make_config(
        data=f"imagefolder:{root}", image_size=16, model="small_cnn", batch_size=8, workers=workers
    )
    with pytest.raises(
        TrainingError, match=rf"The image {root}/train/black/1.png: .*--skip-broken"
    ):
        train(config)


def test_broken_images_are_left_out_counted_and_listed(
    make_config: Make, tmp_path: Path, messages: list[str]
) -> None:
    root = broken_folder(tmp_path)
    config = make_config(
        data=f"imagefolder:{root}",
        image_size=16,
        model="small_cnn",
        batch_size=8,
        epochs=3,
        skip_broken=True,
        workers=1,
    )
    assert train(config) == 0
    listed = (config.run_dir / "broken.txt").read_text().splitlines()
    assert [line.split(":")[0] for line in listed] == [
        f"{root}/train/black/1.png",
        f"{root}/val/white/2.png",
    ]
    assert json.loads((config.run_dir / "result.json").read_text())["broken_images"] == 2
    assert "2 images could not be read, see broken.txt" in messages[-1]
    assert len([text for text in messages if text.startswith("Skipped unreadable image")]) == 2


def test_a_worker_that_dies_ends_the_run_with_a_sentence(make_config: Make) -> None:
    with subprocess.Popen(
        command(make_config(workers=1, epochs=500)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        metrics = make_config().run_dir / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and metrics.stat().st_size > 0)
        for child in children.read_text().split():
            subprocess.run(["kill", "-KILL", child], check=True)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert (
        error.strip()
        .splitlines()[-1]
        .startswith("amptrain: A loader worker died or hangs (DataLoader worker (pid")
    )
    assert "Traceback" not in error


def test_a_broken_validation_image_loses_no_epoch(make_config: Make, tmp_path: Path) -> None:
    """One that broke after the data were looked at."""
    folder = broken_folder(tmp_path)
    (folder / "train/black/1.png").unlink()
    settings = {"data": f"imagefolder:{folder}", "image_size": 16, "model": "small_cnn"}
    config = make_config(batch_size=4, **settings)
    trainer = trainer_of(config)
    trainer.checkpoints.is_known_data = True
    with closing(trainer.feed), pytest.raises(TrainingError, match=r"2\.png"):
        trainer.fit()
    assert [path.name for path in (config.run_dir / "checkpoints").iterdir()] == [
        "step-000000002.pt"
    ]


LEFT_OPEN = """
import os, sys
from pathlib import Path
from amptrain.config import load_yaml
from amptrain.distributed import Processes
from amptrain.signals import StopSignal
from amptrain.train import Trainer

trainer = Trainer(load_yaml(Path(sys.argv[1])), Processes("cpu"), StopSignal())
trainer.feed.open(0, 2, trainer.report.log)
next(iter(trainer.feed.training))
if sys.argv[2] == "collected":
    workers = trainer.feed.training.batches._workers
    for worker in workers:  # one that does not see the end of its queue
        os.kill(worker.pid, 19)
    del trainer
print("end of the program", flush=True)
"""


@pytest.mark.parametrize("feed", ["held", "collected"])
def test_a_program_that_does_not_close_its_feed_ends(
    feed: str, make_config: Make, tmp_path: Path
) -> None:
    """Loader workers ignore SIGTERM, and Python's exit sends just that and waits for them."""
    config = make_config(num_workers=1)
    config.run_dir.mkdir()
    settings = tmp_path / "settings.yaml"
    save_yaml(config, settings)
    done = subprocess.run(
        [sys.executable, "-c", LEFT_OPEN, str(settings), feed],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "end of the program" in done.stdout


def test_more_epochs_after_the_end_announce_the_jump_of_the_rate(
    make_config: Make, messages: list[str]
) -> None:
    config = make_config(precision="fp32", lr=1e-3)
    assert train(config) == 0
    assert train(make_config(precision="fp32", lr=1e-3, epochs=4)) == 0
    (text,) = [message for message in messages if "learning rate jumps" in message]
    before, now = (float(word.rstrip(",")) for word in text.split() if word[0].isdigit())
    assert now > 2 * before > 0
    assert now == pytest.approx(1e-3, rel=0.5)


@pytest.mark.parametrize("words", [["verify-resume"], ["predict", "run", "images"]])
def test_ctrl_c_gives_no_traceback(words: list[str], tmp_path: Path) -> None:
    """While torch is imported, which takes a second."""
    line = [sys.executable, "-m", "amptrain", *words]
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as run:
        wait_for(lambda: "libtorch" in Path(f"/proc/{run.pid}/maps").read_text())
        run.send_signal(signal.SIGINT)
        _, errors = run.communicate(timeout=20)
    assert (run.returncode, errors) == (130, "amptrain: Stopped by Ctrl-C.\n")


def test_a_reader_of_a_table_that_goes_away_gives_no_traceback() -> None:
    """`amptrain train --help | head -1`."""
    with subprocess.Popen(
        [sys.executable, "-m", "amptrain", "train", "--help"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        run.stdout.close()
        errors = run.stderr.read()
    assert (run.returncode, errors) == (141, b"")


def test_without_a_standard_output_a_run_goes_well(make_config: Make) -> None:
    """`nohup … >&-`, and some services."""
    config = make_config(precision="fp32")
    line = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *command(config)]
    subprocess.run(line, check=True)
    assert (config.run_dir / "result.json").exists()


def test_a_disk_without_locks_is_said_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lockf(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.lockf", lockf)
    with alone_in(tmp_path / "run", True):
        assert "is on a file system without locks (No locks available)" in caplog.text


def test_a_disk_that_cannot_sync_a_folder_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("os.fsync", fsync)
    number = errno.EINVAL
    sync_directory(tmp_path)
    number = errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        sync_directory(tmp_path)


STREAMS = """
import json, os, sys
from amptrain.cli import main

def ending(words, stdout):
    errors = os.memfd_create("errors")
    if (child := os.fork()) == 0:
        os.dup2(errors, 2)
        if stdout == "/dev/full":
            os.dup2(os.open(stdout, os.O_WRONLY), 1)
        elif stdout == "a pipe nobody reads":
            reader, writer = os.pipe()
            os.close(reader)
            os.dup2(writer, 1)
        else:
            os.close(1)
            sys.stdout = None  # as Python itself makes it
        sys.exit(main(words))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code, os.pread(errors, 10**6, 0).decode()

words = [[], ["--help"], ["--version"], ["check", "--help"], ["train", "--help"]]
places = ["/dev/full", "a pipe nobody reads", "closed"]
found = [(" ".join(w), place, *ending(w, place)) for w in words for place in places]
print(json.dumps(found))
"""
"""One of argparse and one of tyro: all commands end in `cli.run`, and those that import torch for
their help take seconds each to end."""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_no_way_out_of_the_command_line_fails_at_pythons_last_flush(unbuffered: str) -> None:
    """It exits with 120 there, and says `Exception ignored`."""
    variables = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    run = subprocess.run(
        [sys.executable, "-c", STREAMS], stdout=subprocess.PIPE, env=variables, check=True
    )
    found = json.loads(run.stdout)
    assert len(found) == 3 * 5
    full = [(code, errors.count("\n")) for _, place, code, errors in found if "full" in place]
    assert set(full) == {(1, 1)}
    assert all("No space left" in errors for _, place, _, errors in found if "full" in place)
    assert {(code, errors) for _, place, code, errors in found if "pipe" in place} == {(141, "")}
    assert {(code, errors) for _, place, code, errors in found if place == "closed"} == {(0, "")}


def test_a_sentence_that_nobody_can_read_keeps_its_exit_code() -> None:
    with Path("/dev/full").open("wb") as full:
        run = subprocess.run(
            [sys.executable, "-m", "amptrain", "launch"], stdout=full, stderr=full, check=False
        )
    assert run.returncode == 2


def test_a_run_is_quiet_where_warnings_are_errors(make_config: Make) -> None:
    config = make_config(num_workers=1, precision="fp32")
    run = subprocess.run(
        command(config),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONWARNINGS": "error"},
        check=False,
    )
    assert (run.returncode, run.stderr) == (0, b"")


def test_a_result_that_cannot_be_written_says_what_is_safe_and_is_made_later(
    make_config: Make, messages: list[str]
) -> None:
    """/dev/full is a file on a disk that is full."""
    config = make_config()
    config.run_dir.mkdir(parents=True)
    aside = config.run_dir / "result.json.tmp"
    aside.symlink_to("/dev/full")
    with pytest.raises(
        TrainingError,
        match=r"last checkpoint is written, but .*/run/result.json could not be: No space left on ",
    ):
        train(config)
    aside.unlink()
    steps = (config.run_dir / "metrics.jsonl").read_bytes()
    assert train(config) == 0
    assert (config.run_dir / "metrics.jsonl").read_bytes() == steps
    assert json.loads((config.run_dir / "result.json").read_text())["steps"] == 12


def test_a_file_that_cannot_be_written_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "contents.json"
    path.with_name("contents.json.tmp").symlink_to("/dev/full")

    def write(_: object) -> int:
        atomic_write(path, "{}")
        return 0

    assert run_command(write, []) == 1
    said = capsys.readouterr().err
    assert said == f"amptrain: The file system refused {path}: No space left on device.\n"


def test_a_lock_that_a_file_system_refuses_with_einval_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr("fcntl.lockf", refuse)

    def lock(_: object) -> int:
        with alone_in(tmp_path / "run", is_main=True):
            return 0

    assert run_command(lock, []) == 1
    assert f"refused {tmp_path}/run/.lock: Invalid argument" in capsys.readouterr().err
