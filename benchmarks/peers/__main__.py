"""Steps of a bare loop, amptrain, Lightning Fabric, Accelerate, and as timm's and torchvision's
scripts write them, as Markdown: the same model, batch, precision, one thread, in turn, step by
step, in one process of the image.

    python3 -m benchmarks.peers [--quick] [--models small_cnn resnet18] [--seconds 60]
    python3 -m benchmarks.peers --loading [--quick] [--seconds 60]: from JPEG files to a batch

The peers of requirements.txt are installed into a layer on top of the image, IMAGE-peers, for this
alone. Speeds are ratios to the bare loop, above 1 is faster, with a 95 % interval.
"""

import argparse
import subprocess
from pathlib import Path

from host.build import IMAGE, build_secrets
from host.engine import require_engine
from host.versions import ROOT

HERE = Path(__file__).parent
PEERS = f"{IMAGE}-peers"
SECRETS = "/run/secrets"
LAYER = f"""FROM {IMAGE}
USER root
COPY requirements.txt /opt/peers.txt
RUN --mount=type=secret,id=ca_certificates --mount=type=secret,id=index_url \\
    if [ -s {SECRETS}/ca_certificates ]; then export PIP_CERT={SECRETS}/ca_certificates; fi; \\
    if [ -s {SECRETS}/index_url ]; then export PIP_INDEX_URL=$(cat {SECRETS}/index_url); fi; \\
    pip install --no-cache-dir -r /opt/peers.txt
"""
MODELS = ("small_cnn", "resnet18", "resnet50", "vit_small")


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS[:2]))
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="for each table row or model and precision"
    )
    parser.add_argument("--quick", action="store_true", help="10 seconds for each")
    parser.add_argument("--loading", action="store_true", help="measure loaders, not steps")
    asked = parser.parse_args()
    client = require_engine()
    dockerfile = ["--file", "-", "--tag", PEERS, "--quiet", *build_secrets(), str(HERE)]
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
    run = [client, "run", "--rm", "--env=PYTHONPATH=/bench:/workspace", *mounts, PEERS]
    seconds = "10" if asked.quick else str(asked.seconds)
    if asked.loading:
        subprocess.run([*run, "python", "-m", "benchmarks.peers.loading", seconds], check=True)
        return
    for model in asked.models:
        for precision in ("fp32", "bf16"):
            inside = ["python", "-m", "benchmarks.peers.inside", model, precision, seconds]
            subprocess.run([*run, *inside], check=True)


if __name__ == "__main__":
    main()
