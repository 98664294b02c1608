"""Plots: what is in the figure, several runs, a run that goes on, and what is no run."""

import itertools
import json
import math
import os
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from amptrain.cli import main
from amptrain.report.log import METRICS, EpochRecord, RunLog, Window
from amptrain.report.plot import figure, follow, load, plot_runs
from matplotlib.figure import Figure

PNG = b"\x89PNG\r\n\x1a\n"


def window(step: int, **values: object) -> Window:
    base = Window(
        step=step, epoch=1, loss=2.0 - step / 100, lr=0.1 * step, scale=1.0, skips=0,
        skipped_steps=(),
        images_per_s=100.0, images_per_s_compute=100.0, data_wait_share=0.0, memory_allocated=0,
        memory_reserved=0,
        grad_norm=1.0,
    )  # fmt: skip
    return replace(base, **values)  # type: ignore[arg-type]


@pytest.fixture
def fp16(tmp_path: Path) -> Path:
    """A run with a skip in its second window, of which all steps of the third were skipped."""
    run = tmp_path / "fp16"
    run.mkdir()
    log = RunLog(run, 40, enabled=True)
    log.window(window(10, scale=2.0**16))
    log.window(window(20, scale=2.0**15, skips=1, skipped_steps=(13,)))
    log.window(window(22, scale=2.0**13, skips=2, skipped_steps=(21, 22), loss=math.nan))
    log.epoch(EpochRecord(epoch=1, step=22, val_loss=0.7, val_accuracy=0.9, skips=3, seconds=1.0))
    log.close()
    return run


@pytest.fixture
def fp32(tmp_path: Path) -> Path:
    run = tmp_path / "fp32"
    run.mkdir()
    log = RunLog(run, 40, enabled=True)
    for step in (10, 20, 30):
        log.window(window(step))
    log.close()
    return run


def lines(result: Figure, axes: int) -> list[tuple[list[float], list[float], str]]:
    return [
        (list(line.get_xdata()), list(line.get_ydata()), str(line.get_marker()))
        for line in result.axes[axes].get_lines()
    ]


def test_loss_rate_and_scale_with_its_skips(fp16: Path) -> None:
    result = figure([load(fp16)])
    assert [axes.get_ylabel() for axes in result.axes] == ["loss", "learning rate", "loss scale"]
    assert result.axes[-1].get_xlabel() == "step"
    (steps, losses, _), validation = lines(result, 0)
    assert steps == [10, 20, 22]
    assert losses[:2] == [1.9, 1.8]
    assert math.isnan(losses[2])
    assert validation == ([22], [0.7], "o")
    assert lines(result, 1) == [([10, 20, 22], [1.0, 2.0, 2.2], "None")]
    assert lines(result, 2) == [
        ([10, 20, 22], [2.0**16, 2.0**15, 2.0**13], "None"),
        ([13, 21, 22], [2.0**15, 2.0**13, 2.0**13], "x"),
    ]


def test_runs_lie_over_each_other_and_can_be_told_apart(fp16: Path, fp32: Path) -> None:
    result = figure([load(fp16), load(fp32)])
    curves = [line for line in result.axes[0].get_lines() if line.get_marker() == "None"]
    assert [line.get_label() for line in curves] == ["fp16", "fp32"]
    assert len({line.get_color() for line in curves}) == 2
    assert len({str(line.get_linestyle()) for line in curves}) == 2
    legend = result.axes[0].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["fp16", "fp32", "validation"]


def test_without_a_scaler_there_is_no_empty_panel(fp32: Path) -> None:
    assert [axes.get_ylabel() for axes in figure([load(fp32)]).axes] == ["loss", "learning rate"]


def test_nothing_overlaps(fp16: Path, fp32: Path) -> None:
    """Labels, titles and legends of one panel stay out of the others, and within the picture."""
    result = figure([load(fp16), load(fp32)])
    result.canvas.draw()
    boxes = [axes.get_tightbbox() for axes in result.axes]
    for upper, lower in itertools.pairwise(boxes):
        assert upper.y0 >= lower.y1 - 1
    assert all(
        result.bbox.x0 <= box.x0 and box.x1 <= result.bbox.x1 and box.y1 <= result.bbox.y1
        for box in boxes
    )


def test_a_half_written_line_is_left_out(fp32: Path) -> None:
    with (fp32 / METRICS).open("a") as file:
        file.write(json.dumps({"kind": "window", **asdict(window(40))})[:-30])
    assert [w["step"] for w in load(fp32).windows] == [10, 20, 30]


@pytest.mark.parametrize(
    ("suffix", "start"), [(".png", PNG), (".svg", b"<?xml"), (".pdf", b"%PDF")]
)
def test_the_file_is_what_its_suffix_says(
    suffix: str, start: bytes, fp16: Path, tmp_path: Path
) -> None:
    out = tmp_path / f"curves{suffix}"
    assert plot_runs([fp16], out) == out
    assert out.read_bytes().startswith(start)
    assert not list(tmp_path.glob(".curves*"))


def test_the_command(
    fp16: Path,
    fp32: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    assert main(["plot", str(fp16)]) == 0
    assert (fp16 / "plot.png").read_bytes().startswith(PNG)
    assert main(["plot", str(fp16), str(fp32)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"Drawn: {fp16}/plot.png",
        f"Drawn: {tmp_path}/plot.png",
    ]
    (tmp_path / "elsewhere" / "runs").mkdir(parents=True)
    fp32.rename(tmp_path / "elsewhere" / "runs" / "fp32")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["plot", "fp32", "--out", "curves.png"]) == 0
    assert Path("curves.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "Which run?"),
        (
            ["nowhere"],
            "There is no run in runs/nowhere: it has no metrics.jsonl. Give the directory of a "
            "run.",
        ),
        (
            ["{empty}"],
            "has no readable line yet in its metrics.jsonl; wait a moment, or add --follow.",
        ),
        (["{fp32}", "--out", "{empty}/a.doc"], "cannot be written to"),
        (["{fp32}", "--out", "/nowhere/a.png"], "cannot be written to /nowhere/a.png"),
    ],
    ids=str,
)
def test_what_cannot_be_drawn_is_a_sentence(
    arguments: list[str],
    sentence: str,
    fp32: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / METRICS).touch()
    assert main(["plot", *(argument.format(empty=empty, fp32=fp32) for argument in arguments)]) == 2
    assert sentence in capsys.readouterr().err


def test_following_draws_what_comes_and_ends_with_the_run(tmp_path: Path) -> None:
    """The run starts after its watcher, and writes lines in two halves."""
    run = tmp_path / "live"
    drawn: list[int] = []
    seen = threading.Event()

    def show(result: Figure) -> None:
        drawn.append(len(lines(result, 0)[0][0]))
        seen.set()

    def writes() -> None:
        time.sleep(0.05)
        run.mkdir()
        for step in (10, 20, 30):
            line = json.dumps({"kind": "window", **asdict(window(step))}) + "\n"
            with (run / METRICS).open("a") as file:
                file.write(line[:50])
                file.flush()
                time.sleep(0.05)
                file.write(line[50:])
            seen.wait(60)
            seen.clear()
        (run / "result.json").write_text("{}")

    writer = threading.Thread(target=writes)
    writer.start()
    follow([run], show, period=0.01)
    writer.join()
    assert drawn == [1, 2, 3]


def test_a_finished_run_that_goes_on_is_not_done(fp32: Path) -> None:
    """With more --epochs: result.json is there, but older than the metrics."""
    (fp32 / "result.json").write_text("{}")
    assert load(fp32).done
    now = time.time_ns()
    os.utime(fp32 / METRICS, ns=(now + 10**9, now + 10**9))
    assert not load(fp32).done


def test_following_ends_when_it_is_told_to(fp32: Path) -> None:
    drawn: list[Figure] = []
    follow([fp32], drawn.append, stop=lambda: True)
    assert len(drawn) == 1


def test_the_stop_button_ends_following_quietly(fp32: Path) -> None:
    def interrupted(_: Figure) -> None:
        raise KeyboardInterrupt

    follow([fp32], interrupted)
