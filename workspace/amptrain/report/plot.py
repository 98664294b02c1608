"""Curves of one or more runs, from their metrics.jsonl, also while they go on elsewhere.

Figures are drawn without pyplot: no display is needed, and a notebook does not show them twice.
"""

import io
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from amptrain.errors import ConfigError
from amptrain.report.log import METRICS, read_metrics

# Okabe and Ito's palette, which people with any colour vision can tell apart; without its yellow,
# too pale for a line.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
DASHES = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (6, 2, 1.5, 2)))
"""One run's line may hide another's, where they agree; dashes let both be seen."""
STYLE: Any = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "font.size": 10,
}


@dataclass
class Run:
    """The records of one run."""

    name: str
    windows: list[dict[str, Any]]
    epochs: list[dict[str, Any]]
    done: bool
    """It reached its last step."""

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Steps, and the values of `key` in the windows; NaN where there was none."""
        return [w["step"] for w in self.windows], [
            math.nan if w[key] is None else w[key] for w in self.windows
        ]

    def skips(self) -> list[tuple[int, float]]:
        """Each skipped step, and the scale after its window."""
        return [(step, w["scale"]) for w in self.windows for step in w["skipped_steps"]]

    @property
    def scaled(self) -> bool:
        """It has a loss scale that says something."""
        return any(w["scale"] != 1 or w["skips"] for w in self.windows)


def load(run_dir: Path) -> Run:
    """A run's records so far. Raises ConfigError where there is no run."""
    path = run_dir / METRICS
    try:
        records = read_metrics(path)
    except FileNotFoundError:
        raise ConfigError(
            f"There is no run in {run_dir}: it has no {METRICS}. Give the directory of a run."
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from None
    windows = [record for record in records if record["kind"] == "window"]
    epochs = [record for record in records if record["kind"] == "epoch"]
    result = (
        run_dir / "result.json"
    )  # written last; one that is older is of a run that now goes on further
    done = result.exists() and result.stat().st_mtime_ns >= path.stat().st_mtime_ns
    return Run(run_dir.name, windows, epochs, done)


def figure(runs: Sequence[Run]) -> Figure:
    """Loss, learning rate and, where a run has one, loss scale with skipped steps marked, by
    step."""
    import matplotlib

    scaled = any(run.scaled for run in runs)
    with matplotlib.rc_context(STYLE):
        result = Figure(figsize=(9, 8 if scaled else 5.6), layout="constrained")
        heights = [2.2, 1, 1.2] if scaled else [2.2, 1]
        axes = result.subplots(len(heights), 1, sharex=True, height_ratios=heights)
        for number, run in enumerate(runs):
            look = {
                "color": COLOURS[number % len(COLOURS)],
                "linestyle": DASHES[number % len(DASHES)],
            }
            _draw_loss(axes[0], run, look)
            axes[1].plot(*run.series("lr"), linewidth=1.8, **look)
            if run.scaled:
                _draw_scale(axes[2], run, look)
        _label(axes, runs)
    return result


def _draw_loss(axes: Axes, run: Run, look: dict[str, Any]) -> None:
    axes.plot(*run.series("loss"), linewidth=1.8, label=run.name, **look)
    points = [(e["step"], e["val_loss"]) for e in run.epochs if e["val_loss"] is not None]
    if points:
        axes.plot(
            *zip(*points, strict=True),
            "o",
            color=look["color"],
            markersize=5,
            markerfacecolor="white",
        )


def _draw_scale(axes: Axes, run: Run, look: dict[str, Any]) -> None:
    axes.plot(*run.series("scale"), drawstyle="steps-pre", linewidth=1.8, **look)
    if skips := run.skips():
        axes.plot(
            *zip(*skips, strict=True),
            "x",
            color=look["color"],
            markersize=7,
            markeredgewidth=2,
            zorder=3,
        )


def _label(axes: Sequence[Axes], runs: Sequence[Run]) -> None:
    """Titles in words, a legend outside of the curves, ticks that can be read."""
    validation = Line2D(
        [],
        [],
        marker="o",
        color="0.3",
        markerfacecolor="white",
        linestyle="none",
        label="validation",
    )
    handles = [*axes[0].get_legend_handles_labels()[0], validation]
    axes[0].legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0, 1.01),
        ncols=min(4, len(handles)),
        frameon=False,
    )
    axes[0].set_ylabel("loss")
    axes[1].set_ylabel("learning rate")
    axes[1].ticklabel_format(axis="y", style="sci", scilimits=(-2, 2), useMathText=True)
    if len(axes) > 2:
        axes[2].set_ylabel("loss scale")
        axes[2].set_yscale("log", base=2)
        axes[2].yaxis.set_major_locator(LogLocator(base=2, numticks=6))
        axes[2].yaxis.set_major_formatter(
            FuncFormatter(lambda value, _: f"$2^{{{math.log2(value):.0f}}}$")
        )
        axes[2].yaxis.set_minor_locator(LogLocator(base=2, subs=(), numticks=1))
        axes[2].margins(y=0.15)
        if any(run.skips() for run in runs):
            mark = Line2D(
                [],
                [],
                marker="x",
                color="0.3",
                markersize=7,
                markeredgewidth=2,
                linestyle="none",
                label="skipped step",
            )
            axes[2].legend(handles=[mark], loc="best", frameon=False)
    axes[-1].set_xlabel("step")
    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))


def png(result: Figure) -> bytes:
    """The figure as a PNG, sharp on dense screens."""
    buffer = io.BytesIO()
    result.savefig(buffer, format="png", dpi=140)
    return buffer.getvalue()


def plot_runs(run_dirs: Sequence[Path], out: Path | None = None) -> Path:
    """Draw the runs over each other. Returns the file: `out`, whose suffix chooses the format, or
    plot.png by the run.

    Raises ConfigError for what is no run, has nothing to draw yet, or cannot be written.
    """
    runs = [load(run_dir) for run_dir in run_dirs]
    for run in runs:
        if not run.windows:
            raise ConfigError(
                f"The run {run.name} has no readable line yet in its metrics.jsonl; wait a moment, "
                "or add --follow."
            )
    path = out or (run_dirs[0] if len(runs) == 1 else run_dirs[0].parent) / "plot.png"
    aside = path.with_name(
        f".{path.stem}.part{path.suffix}"
    )  # a viewer that looks on never sees half a picture
    try:
        figure(runs).savefig(aside, dpi=140)
        aside.replace(path)
    except (OSError, ValueError) as error:  # ValueError: matplotlib does not know the suffix
        raise ConfigError(f"The plot cannot be written to {path}: {error}") from None
    return path


def follow(
    run_dirs: Sequence[Path],
    show: Callable[[Figure], None] | None = None,
    *,
    stop: Callable[[], bool] = lambda: False,
    period: float = 2.0,
) -> None:
    """Draw the runs anew each `period` seconds, until all are done, `stop()` is true, or the person
    interrupts.

    A run may not have started yet. Without `show`, the picture appears below the notebook cell and
    changes in place.
    """
    show = show or _Cell()
    drawn: list[int] = []
    try:
        while True:
            stopping = stop()  # asked first, so that what a run wrote before it ended is drawn
            runs = [load(run_dir) for run_dir in run_dirs if (run_dir / METRICS).exists()]
            lengths = [len(run.windows) + len(run.epochs) for run in runs]
            if any(run.windows for run in runs) and lengths != drawn:
                show(figure(runs))
                drawn = lengths
            if stopping or (len(runs) == len(run_dirs) and all(run.done for run in runs)):
                return
            time.sleep(period)
    except KeyboardInterrupt:
        return  # the stop button of the notebook, Ctrl-C in a terminal: the runs go on


class _Cell:
    """One picture below a notebook cell."""

    def __init__(self) -> None:
        self.handle: Any = None

    def __call__(self, result: Figure) -> None:
        from IPython.display import Image, display

        picture = Image(data=png(result), format="png", width=900)  # type: ignore[no-untyped-call]
        if self.handle is None:
            self.handle = display(picture, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self.handle.update(picture)


@dataclass(frozen=True)
class PlotConfig:
    """Draw loss, learning rate and loss scale of one or more runs."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Directories of runs, or their names in runs/."""
    out: Path | None = None
    """File to write; its suffix chooses the format (.png, .svg, .pdf). The default is plot.png by
    the run."""
    follow: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Draw again as the runs go on, until they are done."""


def main(arguments: Sequence[str]) -> int:
    """`amptrain plot`. Returns the exit code. Raises ConfigError."""
    config = tyro.cli(PlotConfig, prog="amptrain plot", args=list(arguments))
    if not config.runs:
        raise ConfigError(
            "Which run? Give the directory of one or more, such as runs/digits-small_cnn-auto."
        )
    run_dirs = [run if run.exists() else Path("runs") / run for run in config.runs]
    if config.follow:
        follow(run_dirs, lambda _: print(f"Drawn: {plot_runs(run_dirs, config.out)}", flush=True))
    print(f"Drawn: {plot_runs(run_dirs, config.out)}")
    return 0
