"""The README's chart shows what docs/measurements.md says."""

from benchmarks.chart import draw
from tests.support import ROOT


def test_chart_is_drawn_from_the_tables_as_they_are() -> None:
    drawn = (ROOT / "docs/measurements.svg").read_text("utf-8")
    assert draw() == drawn, "run python3 -m benchmarks.chart"
