"""What a run says and writes: lines, metrics.jsonl through kills and full disks, TensorBoard, the
bar of a terminal."""

import json
import math
import os
import pty
import re
import subprocess
import sys
import termios
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from amptrain.config import TrainConfig
from amptrain.report.log import METRICS, EpochRecord, RunLog, Window, read_metrics
from amptrain.train import train

WINDOW = Window(
    step=20, epoch=2, loss=0.51234, lr=4.5e-3, scale=32768.0, skips=0, skipped_steps=(),
    images_per_s=1234.0,
    images_per_s_compute=2468.0, data_wait_share=0.5,
    memory_allocated=2**30, memory_reserved=3 * 2**29,
    grad_norm=1.5,
)  # fmt: skip
EPOCH = EpochRecord(epoch=2, step=20, val_loss=0.25, val_accuracy=0.98, skips=1, seconds=3.5)


def test_a_window_is_one_line_with_all_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = RunLog(tmp_path, 460, enabled=True)
    log.window(replace(WINDOW, gpu_utilisation=93.4))
    assert capsys.readouterr().out == (
        "step  20/460  epoch 2  loss 0.5123  lr 4.50e-03  scale 32768  skips 0  1234 images/s "
        "(2468 without waiting "
        "for data)  data wait 50%  memory 1.00 GiB allocated, 1.50 GiB reserved  GPU busy 93%\n"
    )


def test_skips_stand_out_and_what_is_not_measured_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = RunLog(tmp_path, 460, enabled=True)
    log.window(
        replace(WINDOW, skips=2, skipped_steps=(7, 9), memory_allocated=0, memory_reserved=0)
    )
    line = capsys.readouterr().out
    assert "SKIPS 2" in line
    assert "memory" not in line
    assert "GPU" not in line


def test_an_epoch_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RunLog(tmp_path, 460, enabled=True).epoch(EPOCH)
    assert capsys.readouterr().out == (
        "epoch 2 done: validation loss 0.2500, accuracy 98.00%, skipped steps 1, 3.5 s since the "
        "start\n"
    )


def test_other_ranks_say_and_write_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = RunLog(tmp_path, 460, enabled=False)
    log.window(WINDOW)
    log.epoch(EPOCH)
    log.message("a sentence")
    log.close()
    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []


def test_records_are_on_the_disk_at_once_and_are_strict_json(tmp_path: Path) -> None:
    """A watcher, or a person after a kill, sees the last line. NaN is no JSON: other languages'
    readers refuse it."""
    log = RunLog(tmp_path, 460, enabled=True)
    log.window(
        replace(
            WINDOW, loss=math.nan, grad_norm=math.inf, skips=20, skipped_steps=tuple(range(1, 21))
        )
    )
    log.epoch(EPOCH)
    lines = (tmp_path / METRICS).read_text().splitlines()
    assert len(lines) == 2
    first, second = (json.loads(line, parse_constant=pytest.fail) for line in lines)
    assert (first["kind"], first["loss"], first["grad_norm"], first["lr"]) == (
        "window",
        None,
        None,
        4.5e-3,
    )
    assert first["skipped_steps"] == list(range(1, 21))
    assert (second["kind"], second["val_accuracy"], second["skips"]) == ("epoch", 0.98, 1)


def test_continuing_drops_what_comes_after_and_the_half_line_of_a_kill(tmp_path: Path) -> None:
    log = RunLog(tmp_path, 460, enabled=True)
    for step in (20, 40, 60):
        log.window(replace(WINDOW, step=step))
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"kind": "window", "step": 80, "lo')
    again = RunLog(tmp_path, 460, enabled=True, start_step=40)
    again.window(replace(WINDOW, step=60, loss=9.0))
    records = read_metrics(tmp_path / METRICS)
    assert [(record["step"], record["loss"]) for record in records] == [
        (20, 0.51234),
        (40, 0.51234),
        (60, 9.0),
    ]
    assert len((tmp_path / METRICS).read_text().splitlines()) == 3


def test_a_run_that_was_stopped_has_each_step_once(
    make_config: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    """As a run killed after its last checkpoint: more is in the log than in the checkpoint."""
    whole = make_config(
        name="whole", log_every=1, save_every=4, precision="fp32", deterministic=True
    )
    assert train(whole) == 0
    with_kill = make_config(
        name="killed", log_every=1, save_every=4, precision="fp32", deterministic=True
    )
    code = (
        "import os, sys; from pathlib import Path\n"
        "from amptrain import train as module; from amptrain.config import load_yaml\n"
        "settle = module.Trainer._close_window\n"
        "def close(self):\n"
        "    settle(self)\n"
        "    if self.state.progress.step == 7: os.kill(os.getpid(), 9)\n"
        "module.Trainer._close_window = close\n"
        "module.train(load_yaml(Path(sys.argv[1])))"
    )
    settings = tmp_path / "settings.yaml"
    settings.write_text(
        (whole.run_dir / "config.yaml").read_text().replace("name: whole", "name: killed")
    )
    killed = subprocess.run(
        [sys.executable, "-c", code, str(settings)], capture_output=True, text=True, check=False
    )
    assert killed.returncode == -9, killed.stderr
    assert [r["step"] for r in read_metrics(with_kill.run_dir / METRICS)] == list(range(1, 8))
    assert train(with_kill) == 0
    wanted, found = (
        [
            (r["step"], r["loss"], r["lr"])
            for r in read_metrics(config.run_dir / METRICS)
            if r["kind"] == "window"
        ]
        for config in (whole, with_kill)
    )
    assert found == wanted


def test_a_kill_while_the_log_is_cut_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written aside first: a kill before the rename leaves the old file."""
    RunLog(tmp_path, 460, enabled=True).window(WINDOW)
    before = (tmp_path / METRICS).read_bytes()

    def killed(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        RunLog(tmp_path, 460, enabled=True, start_step=0)
    assert (tmp_path / METRICS).read_bytes() == before


def test_a_full_disk_is_said_once_and_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """/dev/full is a file on a disk that is full."""
    log = RunLog(tmp_path, 460, enabled=True)
    (tmp_path / METRICS).symlink_to("/dev/full")
    log.window(WINDOW)
    log.window(WINDOW)
    said = capsys.readouterr().out
    assert said.count("cannot be written") == 1
    assert "No space left on device" in said
    assert said.count("loss 0.5123") == 2
    (tmp_path / METRICS).unlink()
    log.window(replace(WINDOW, step=40))
    assert [record["step"] for record in read_metrics(tmp_path / METRICS)] == [40]


# The second thread is none of TensorBoard's: what it raises is still shown.
FULL = """
import resource, sys, threading; from pathlib import Path
sys.path.insert(0, {tests!r})
from test_log import WINDOW, RunLog
log = RunLog(Path({run!r}), 100, enabled=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
for _ in range(8):
    log.window(WINDOW)
log.close()
RunLog(Path({run!r} + "2"), 100, enabled=True)
other = threading.Thread(target=open, args=["/nowhere/other"])
other.start()
other.join()
"""


def test_the_thread_of_tensorboard_prints_no_traceback(tmp_path: Path) -> None:
    """In a process of its own: pytest has a hook for threads, too."""
    code = FULL.format(tests=str(Path(__file__).parent), run=str(tmp_path / "run"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.count("cannot be written") == 1
    assert done.stdout.count("loss 0.5123") == 8
    assert "File too large" not in done.stderr
    assert done.stderr.count("Traceback") == 1
    assert "/nowhere/other" in done.stderr


def test_tensorboard_reads_the_curves_and_only_the_last_of_each_step(tmp_path: Path) -> None:
    log = RunLog(tmp_path, 460, enabled=True)
    for step in (20, 40):
        log.window(replace(WINDOW, step=step, loss=1.0))
    log.close()
    again = RunLog(tmp_path, 460, enabled=True, start_step=20)
    again.window(replace(WINDOW, step=40, loss=2.0))
    again.epoch(replace(EPOCH, step=40))
    again.close()
    code = (
        "import sys; from tensorboard.backend.event_processing.event_accumulator import "
        "EventAccumulator\n"
        "events = EventAccumulator(sys.argv[1]); events.Reload()\n"
        "for tag in ('train/loss', 'train/lr', 'train/scale', 'validation/val_accuracy'):\n"
        "    print(tag, [(e.step, round(e.value, 4)) for e in events.Scalars(tag)])"
    )  # in a process of its own: TensorBoard's reader uses NumPy names that are deprecated
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "tensorboard")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        "train/loss [(20, 1.0), (40, 2.0)]",
        "train/lr [(20, 0.0045), (40, 0.0045)]",
        "train/scale [(20, 32768.0), (40, 32768.0)]",
        "validation/val_accuracy [(40, 0.98)]",
    ]


def in_terminal(code: str, term: str, **variables: str) -> str:
    """What `python -c code` shows in a real terminal of type `term`."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, 80))
    shown: list[bytes] = []

    def read() -> None:
        try:
            while data := os.read(master, 4096):
                shown.append(data)
        except OSError:  # the other end was closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    environment = {**os.environ, "TERM": term, **variables}
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=slave, stderr=slave, env=environment, check=False
    )
    os.close(slave)
    reader.join(timeout=60)
    os.close(master)
    text = b"".join(shown).decode()
    assert done.returncode == 0, text
    return text


CONTROL = r"\x1b\[[0-9;?]*[A-Za-z]"
CODE = """
from dataclasses import replace; from pathlib import Path; import sys, time
sys.path.insert(0, {tests!r})
from test_log import WINDOW, RunLog
log = RunLog(Path({run!r}), 100, enabled=True)
for step in (20, 40, 60):
    log.window(replace(WINDOW, step=step))
    time.sleep(0.3)
log.message("[bold] is no markup here")
log.close()
"""


@pytest.mark.parametrize(("term", "bar"), [("xterm-256color", True), ("dumb", False)])
def test_a_terminal_has_a_bar_with_the_time_left(term: str, bar: bool, tmp_path: Path) -> None:
    code = CODE.format(tests=str(Path(__file__).parent), run=str(tmp_path))
    text = re.sub(CONTROL, "", in_terminal(code, term, COLUMNS="120"))
    assert text.count("loss 0.5123") == 3
    assert "[bold] is no markup here" in text
    assert ("━" in text) == bar
    assert bool(re.search(r"60/100 steps, elapsed 0:00:0\d left 0:00:0\d", text)) == bar


def test_with_a_long_name_the_bar_and_all_its_numbers_fit_80_columns(tmp_path: Path) -> None:
    """The name pushed out the steps first, and then all the rest."""
    run = tmp_path / "imagefolder-resnet50-precisionbf16-batch_size256-weightsDEFAULT-lr0.001"
    code = CODE.format(tests=str(Path(__file__).parent), run=str(run))
    shown = re.sub(CONTROL, "", in_terminal(code.replace(", 100,", ", 125000,"), "xterm-256color"))
    bars = [line for line in re.split(r"[\r\n]+", shown) if "elapsed" in line]
    assert any(
        re.search(r"^….*-lr0\.001 ━+ +60/125000 steps, elapsed 0:00:\d\d left 0:\d\d:\d\d$", bar)
        for bar in bars
    ), bars
    assert max(map(len, bars)) <= 80


def test_elsewhere_lines_are_plain_and_come_at_once(tmp_path: Path) -> None:
    """Through a pipe, as in `docker logs`: no control characters, and no waiting for a full
    buffer."""
    code = CODE.format(tests=str(Path(__file__).parent), run=str(tmp_path)).replace(
        "log.close()", "import os; os._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.count("\n") == 4
    assert "\x1b" not in done.stdout
    assert "━" not in done.stdout


HELP = """
import contextlib, sys
from amptrain.cli import COMMANDS, run

for command in COMMANDS.values():
    with contextlib.suppress(SystemExit):
        run(command, ["--help"])
with contextlib.suppress(SystemExit):
    run(COMMANDS["train"], ["--no-such-flag", "1"])
"""


@pytest.mark.parametrize(
    ("term", "variables", "coloured"),
    [
        ("xterm-256color", {}, True),
        ("xterm-256color", {"NO_COLOR": "1"}, False),
        ("dumb", {}, False),
    ],
    ids=["colours", "NO_COLOR", "dumb"],
)
def test_help_has_colours_where_they_are_wanted_and_fits_80_columns(
    term: str, variables: dict[str, str], coloured: bool
) -> None:
    """An agent's log, or a pager, shows each code as ←[1m (no-color.org)."""
    text = in_terminal(HELP, term, **variables)
    assert ("\x1b" in text) == coloured
    lines = re.sub(CONTROL, "", text).splitlines()
    assert len(lines) > 300
    assert [line for line in lines if len(line) > 80] == []
    assert any("--no-such-flag" in line for line in lines)
