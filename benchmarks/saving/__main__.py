"""For how long a checkpoint holds up the next step, written between steps and meanwhile
(`--async-checkpoint`), as Markdown: in turn, in one process of the image.

    python3 -m benchmarks.saving [--seconds 120] [--model resnet152]
"""

import argparse
import subprocess

from host.build import IMAGE
from host.engine import require_engine
from host.versions import ROOT


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--model", default="resnet152")
    asked = parser.parse_args()
    mounts = [
        *("--volume", f"{ROOT}/benchmarks:/bench/benchmarks:ro"),
        *("--volume", f"{ROOT}/workspace:/workspace:ro"),
    ]
    run = [require_engine(), "run", "--rm", "--env=PYTHONPATH=/bench:/workspace", *mounts, IMAGE]
    inside = ["python", "-m", "benchmarks.saving.inside", asked.model, str(asked.seconds)]
    subprocess.run([*run, *inside], check=True)


if __name__ == "__main__":
    main()
