"""Images/s from a folder of JPEGs, from tar shards, and from tar shards in an object store (S3, a
moto server on the same machine), as Markdown: in turn, epoch by epoch, in one container.

    python3 -m benchmarks.shards [--seconds 120]
    python3 -m benchmarks.shards --resume: a run from S3 that is killed ends with the same weights

The packages of requirements.txt are installed into a layer on top of the image, IMAGE-shards, for
this alone.
"""

import argparse
import subprocess
from pathlib import Path

from benchmarks.peers.__main__ import LAYER
from host.build import IMAGE, build_secrets
from host.engine import require_engine
from host.versions import ROOT

HERE = Path(__file__).parent
SHARDS = f"{IMAGE}-shards"


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--resume", action="store_true")
    asked = parser.parse_args()
    client = require_engine()
    dockerfile = ["--file", "-", "--tag", SHARDS, "--quiet", *build_secrets(), str(HERE)]
    subprocess.run(
        [client, "buildx", "build", *dockerfile],
        input=LAYER,
        text=True,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    mounts = [
        *("--volume", f"{ROOT}/benchmarks:/bench/benchmarks:ro"),
        *("--volume", f"{ROOT}/workspace:/workspace:ro"),
    ]
    run = [client, "run", "--rm", "--shm-size=1g", "--env=PYTHONPATH=/bench:/workspace", *mounts]
    inside = ["resume"] if asked.resume else ["speed", str(asked.seconds)]
    subprocess.run(
        [*run, "--workdir=/tmp", SHARDS, "python", "-m", "benchmarks.shards.inside", *inside],
        check=True,
    )


if __name__ == "__main__":
    main()
