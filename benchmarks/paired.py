"""Ways to do the same step, timed in turn within one process, so that a slow minute of the machine
meets all alike."""

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

WARM_UP = 5
RESAMPLES = 2000


@dataclass(frozen=True)
class Ratio:
    """A median with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f}–{self.high:.3f})"


def interleave(
    ways: Mapping[str, Callable[[], float]], seconds: float, rounds: int
) -> dict[str, list[float]]:
    """Seconds of each way in each round. A round does each once, in random order; there are as many
    as fit into `seconds`, at most `rounds`. A way returns what it took."""
    order, rng = list(ways), random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in order}
    for _ in range(WARM_UP):
        for way in ways.values():
            way()
    gc.collect()
    end = time.monotonic() + seconds
    while time.monotonic() < end and len(times[order[0]]) < rounds:
        rng.shuffle(order)
        for name in order:
            times[name].append(ways[name]())
    return times


def ratio(base: list[float], other: list[float]) -> Ratio:
    """How fast `other` is to `base`: the median over the rounds of base's time by other's, and its
    interval by the percentile bootstrap (Efron, 1979)."""
    ratios = [b / o for b, o in zip(base, other, strict=True)]
    rng = random.Random(0)
    medians = sorted(
        statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES)
    )
    low, high = medians[int(RESAMPLES * 0.025)], medians[int(RESAMPLES * 0.975)]
    return Ratio(statistics.median(ratios), low, high)


def timed(step: Callable[[], object]) -> Callable[[], float]:
    """`step`, returning what it took."""

    def run() -> float:
        began = time.perf_counter()
        step()
        return time.perf_counter() - began

    return run
