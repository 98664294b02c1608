"""Training in each precision, as Markdown: images/s as ratios to FP32, medians over interleaved
runs, in the image.

    python3 -m benchmarks.training [--repeats 3] [--gpus] [-- --data fake:2048 --model resnet50
    --global-batch-size 128]

What stands behind `--` goes to `amptrain train`; by default it is digits, 46 steps. `--gpus` takes
the host's GPUs, and then TF32 is among the precisions. Data loading is part of what is measured, as
it is of training.
"""

import argparse
import json
import statistics
import subprocess
from collections import defaultdict
from typing import Any

from host.build import IMAGE
from host.engine import require_engine

DIGITS = ["--max-steps", "46"]
READ = (
    'amptrain train --name bench --runs /tmp/runs "$@" >/tmp/log 2>&1 || cat /tmp/log; '
    "cat /tmp/runs/bench/result.json"
)


def train(client: str, precision: str, gpus: bool, arguments: list[str]) -> dict[str, Any]:
    """Train in a container of its own, and return its result.json."""
    options = ["--gpus=all"] if gpus else []
    command = [client, "run", "--rm", "--shm-size=8g", *options, IMAGE, "bash", "-c", READ, "bash"]
    done = subprocess.run(
        [*command, "--precision", precision, *arguments], check=True, capture_output=True, text=True
    )
    return dict(json.loads(done.stdout))


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--gpus", action="store_true")
    parser.add_argument("arguments", nargs="*", help="flags of amptrain train, behind --")
    asked = parser.parse_args()
    client = require_engine()
    precisions = ["fp32", *(["tf32"] if asked.gpus else []), "bf16", "fp16"]
    speeds: dict[str, list[float]] = defaultdict(list)
    for _ in range(asked.repeats):
        for precision in precisions:
            result = train(client, precision, asked.gpus, asked.arguments or DIGITS)
            speeds[precision].append(result["images_per_s"])
    print(f"{result['device']}, torch {result['torch']}, {result['model']} on {result['data']}\n")
    print("| precision | images/s | to FP32 |\n| --- | --- | --- |")
    fp32 = statistics.median(speeds["fp32"])
    for precision in precisions:
        speed = statistics.median(speeds[precision])
        print(f"| {precision} | {speed:.0f} | {speed / fp32:.2f} |")


if __name__ == "__main__":
    main()
