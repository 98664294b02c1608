"""The chart of docs/measurements.md."""

import subprocess

from host.build import IMAGE
from host.engine import require_engine
from host.versions import ROOT


def draw() -> str:
    """The SVG."""
    mount = f"--volume={ROOT}/benchmarks/chart/inside.py:/tmp/chart.py:ro"
    command = [require_engine(), "run", "--rm", "--interactive", mount, IMAGE]
    tables = (ROOT / "docs/measurements.md").read_text("utf-8")
    return subprocess.run(
        [*command, "python", "/tmp/chart.py"],
        input=tables,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        check=True,
    ).stdout
