"""In the container: docs/measurements.md on stdin, its chart as SVG on stdout."""

import re
import sys
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

GREY = "#767676"  # can be read on white and on a dark page
COLOURS = {
    "amptrain": "#1F83C9",
    "Lightning Fabric": "#D55E00",
    "Accelerate": "#009E73",
    "timm's way": "#CC79A7",
    "torchvision's way": "#E69F00",
}
STYLE: Any = {
    "svg.fonttype": "none",  # text stays text: it can be searched, and the page's font draws it
    "svg.hashsalt": "chart",
    "font.size": 10,
    "text.color": GREY,
    "axes.labelcolor": GREY,
    "axes.edgecolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
INTERVAL = re.compile(r"(\d\.\d+) \((\d\.\d+)–(\d\.\d+)\)")


class Ratio(NamedTuple):
    """A speed over another, with its interval."""

    value: float
    low: float
    high: float


Rows = list[list[str]]


def tables(text: str) -> list[Rows]:
    """The cells of each Markdown table, its head first."""
    found: list[Rows] = [[]]
    for line in text.splitlines():
        if line.startswith("|"):
            found[-1].append([cell.strip() for cell in line.strip("|").split("|")])
        elif found[-1]:
            found.append([])
    return [[rows[0], *rows[2:]] for rows in found if len(rows) > 2]


def ratio(cell: str) -> Ratio:
    """`1.099 (1.081–1.114)`."""
    match = INTERVAL.fullmatch(cell)
    assert match, cell
    return Ratio(*(float(part) for part in match.groups()))


def step_ratios(every: list[Rows]) -> dict[str, dict[str, Ratio]]:
    """Of each model in bf16, the speed of each way to the bare loop's."""
    found: dict[str, dict[str, Ratio]] = {}
    for head, *rows in (rows for rows in every if rows[0][0] == "way"):
        for column, title in enumerate(head):
            if title.endswith(", bf16"):
                name = title.removesuffix(", bf16").replace("small_cnn", "digits' small CNN")
                ways = [row for row in rows if not row[0].startswith("bare loop")]
                found[name] = {row[0]: ratio(row[column]) for row in ways}
    return found


def loading_ratios(every: list[Rows]) -> dict[str, Ratio]:
    """Of each size of JPEG, amptrain's loading in training to torchvision's."""
    head, *rows = next(rows for rows in every if rows[0][0] == "JPEGs")
    column = next(i for i, title in enumerate(head) if "to torchvision" in title)
    return {row[0]: ratio(row[column]) for row in rows if row[1] == "training"}


def draw_steps(axes: Axes, models: dict[str, dict[str, Ratio]]) -> None:
    """A dot for each way, its interval as a bar."""
    for place, (way, colour) in enumerate(COLOURS.items()):
        ratios = [models[model][way] for model in models]
        axes.errorbar(
            [item.value for item in ratios],
            [row + (place - 2) * 0.15 for row in range(len(models))],
            xerr=[
                [item.value - item.low for item in ratios],
                [item.high - item.value for item in ratios],
            ],
            fmt="o",
            markersize=6 if way == "amptrain" else 4,
            color=colour,
            label=way,
        )
    axes.axvline(1, color=GREY, linewidth=0.8)
    axes.set_yticks(range(len(models)), models)
    axes.invert_yaxis()
    axes.set_title("Steps in bf16, to a bare loop's", fontsize=10)
    axes.set_xlabel("speed; right of 1 is faster")


def draw_loading(axes: Axes, sizes: dict[str, Ratio]) -> None:
    """A bar for each size."""
    bars = axes.barh(
        list(sizes), [item.value for item in sizes.values()], 0.5, color=COLOURS["amptrain"]
    )
    axes.bar_label(bars, [f"{item.value:.2f}" for item in sizes.values()], padding=3, color=GREY)
    axes.axvline(1, color=GREY, linewidth=0.8)
    axes.invert_yaxis()
    axes.set_title("JPEGs read, to torchvision's", fontsize=10)
    axes.set_xlabel("images/s a core; right of 1 is faster")
    axes.margins(x=0.15)


def main() -> None:
    """Draw."""
    every = tables(sys.stdin.read())
    with rc_context(STYLE):
        figure = Figure(figsize=(9, 3.9), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=[3, 2])
        draw_steps(left, step_ratios(every))
        draw_loading(right, loading_ratios(every))
        figure.legend(frameon=False, fontsize=9, ncols=5, loc="outside lower center")
        options: Any = {"format": "svg", "transparent": True, "metadata": {"Date": None}}
        figure.savefig(sys.stdout.buffer, **options)


if __name__ == "__main__":
    main()
