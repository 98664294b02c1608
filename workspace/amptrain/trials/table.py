"""Measurements of precisions as Markdown and as a chart."""

import statistics
from dataclasses import dataclass
from pathlib import Path

from amptrain.trials.process import GIB, Facts, Fit, Speed
from amptrain.words import counted


@dataclass(frozen=True)
class Row:
    """One precision."""

    name: str
    images: int
    """Training images of an epoch."""
    speeds: tuple[Speed, ...]
    """One of each process, at least one."""
    largest: int | None = None
    """The largest micro-batch that fits, 0 where none does; None where it was not looked for."""
    largest_peak: Fit | None = None

    @property
    def rates(self) -> list[float]:
        """Images/s without loading."""
        return [speed.images_per_s for speed in self.speeds]

    @property
    def data_rates(self) -> list[float]:
        """Images/s through the loader."""
        return [speed.data_images_per_s for speed in self.speeds if speed.data_images_per_s]

    @property
    def memory(self) -> int:
        """Bytes at the peak, allocated on CUDA, resident on a CPU: the median."""
        return int(statistics.median(_bytes(speed.peak) for speed in self.speeds))


def markdown(title: str, rows: list[Row], known: Facts) -> str:
    """The table, and below it what it needs to be understood."""
    head = [
        *("precision", "images/s", "× FP32", "images/s with loading", "an epoch"),
        *("peak memory", "× FP32", "largest micro-batch", "its peak memory"),
    ]
    lines = [f"**{title}**", "", _line(head), _line(["---"] + ["---:"] * (len(head) - 1))]
    base = next((row for row in rows if row.name == "fp32"), rows[0])
    lines += [_line(_cells(row, base)) for row in rows]
    lines += ["", *notes(rows, known)]
    return "\n".join(lines) + "\n"


def notes(rows: list[Row], known: Facts) -> list[str]:
    """Sentences below the table."""
    repeats = max(len(row.speeds) for row in rows)
    found = [f"- {name} is not measured: {why}." for name, why in _tidy(known.emulated)]
    if repeats > 1:
        found.append(f"- Medians of {counted(repeats, 'process')}, with the least and the most.")
    images, workers = rows[0].images, rows[0].speeds[0].workers
    found.append(
        f"- An epoch is {images:,} images with loading, by {counted(workers or 0, 'worker')}"
        + (" from made JPEGs of 500×375 pixels." if known.is_made else ".")
    )
    found.append(
        "- Memory is what torch allocated at the peak."
        if known.is_cuda
        else "- Memory is the process's resident set at the peak, torch's own code in it."
    )
    throttled = sorted({why for row in rows for speed in row.speeds for why in speed.throttled})
    if throttled:
        found.append(f"- The GPU lowered its clock: {', '.join(throttled)}.")
    clocks = [speed.clock_mhz for row in rows for speed in row.speeds if speed.clock_mhz]
    if clocks:
        highest = max(speed.max_clock_mhz or 0 for row in rows for speed in row.speeds)
        found.append(f"- Clock: {statistics.median(clocks):.0f} of {highest:.0f} MHz.")
    versions = ", ".join(f"{name} {version}" for name, version in known.versions.items())
    return [*found, f"- {versions}; {counted(known.cpus, 'CPU')}."]


def chart(title: str, rows: list[Row], path: Path) -> None:
    """Speed and memory of each precision as bars, a PNG."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from amptrain.report.plot import COLOURS, STYLE

    with rc_context(STYLE):
        figure = Figure(figsize=(8, 0.5 * len(rows) + 1.6), layout="constrained")
        names = [row.name for row in rows]
        speed, memory = figure.subplots(1, 2, sharey=True)
        rates = [statistics.median(row.rates) for row in rows]
        speed.barh(names, rates, color=COLOURS[0])
        memory.barh(names, [row.memory / GIB for row in rows], color=COLOURS[1])
        speed.set_xlabel("images/s without loading")
        memory.set_xlabel("GiB at the peak")
        speed.invert_yaxis()
        for axes in (speed, memory):
            axes.grid(visible=False, axis="y")
        figure.suptitle(title, fontsize=10)
        figure.savefig(path, dpi=150)


def _cells(row: Row, base: Row) -> list[str]:
    with_data, peak = row.data_rates, row.largest_peak
    seconds = row.images / statistics.median(with_data) if with_data else None
    return [
        row.name,
        spread(row.rates),
        f"{statistics.median(row.rates) / statistics.median(base.rates):.2f}",
        spread(with_data) if with_data else "-",
        duration(seconds) if seconds is not None else "-",
        f"{row.memory / GIB:.2f} GiB",
        f"{row.memory / base.memory:.2f}",
        "not searched" if row.largest is None else str(row.largest),
        f"{_bytes(peak) / GIB:.2f} GiB" if peak else "-",
    ]


def spread(values: list[float]) -> str:
    """`812 (805–820)`: the median, the least and the most."""
    middle = f"{statistics.median(values):.3g}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.3g}–{max(values):.3g})"


def duration(seconds: float) -> str:
    """`3 h 20 min`, `4 min 10 s` or `12 s`."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{seconds:.2g} s"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _bytes(peak: Fit) -> int:
    return peak.allocated or peak.resident


def _tidy(emulated: dict[str, str]) -> list[tuple[str, str]]:
    return [(name, why.rstrip(".")) for name, why in emulated.items()]
