"""What `amptrain check --run` costs the program that it watches, as a ratio of times per step.

    python3 -m benchmarks.check_run [--pairs N]

A pair is the same script alone and watched, in processes of their own, in turn. The model is a
small one on purpose: the fewer milliseconds a step takes, the more the hooks weigh.
"""

import argparse
import statistics
import subprocess

from host.build import IMAGE
from host.engine import require_engine
from host.versions import ROOT

SCRIPT = """
import statistics, sys, time, torch, torchvision
torch.manual_seed(0)
model = torchvision.models.resnet18(num_classes=10)
optimizer = torch.optim.AdamW(model.parameters())
loss_fn = torch.nn.CrossEntropyLoss()
images, labels = torch.randn(16, 3, 64, 64), torch.randint(10, (16,))
seconds = []
for step in range(60):
    began = time.perf_counter()
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_fn(model(images), labels)
    loss.backward()
    optimizer.step()
    seconds.append(time.perf_counter() - began)
    if step % 20 == 0:
        loss.item()
print("SECONDS", statistics.median(seconds[10:]))
"""
ALONE = "cat >/tmp/script.py; python /tmp/script.py"
WATCHED = "cat >/tmp/script.py; amptrain check --run -- python /tmp/script.py || true"


def step_seconds(client: str, command: str) -> float:
    """The median step of the script, run so in a container of its own."""
    options = ["--rm", "--interactive", f"--volume={ROOT}/workspace:/workspace:ro"]
    done = subprocess.run(
        [client, "run", *options, IMAGE, "bash", "-c", command],
        input=SCRIPT,
        check=True,
        capture_output=True,
        text=True,
    )
    line = next(line for line in done.stdout.splitlines() if line.startswith("SECONDS"))
    return float(line.split()[1])


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=7)
    asked = parser.parse_args()
    client = require_engine()
    ratios, alone = [], []
    for _ in range(asked.pairs):
        alone.append(step_seconds(client, ALONE))
        ratios.append(step_seconds(client, WATCHED) / alone[-1])
    print(
        "| step alone, ms | watched to alone, median | min–max | pairs |\n| --- | --- | --- | --- |"
    )
    print(
        f"| {statistics.median(alone) * 1e3:.1f} | {statistics.median(ratios):.3f} | "
        f"{min(ratios):.3f}–{max(ratios):.3f} | {asked.pairs} |"
    )


if __name__ == "__main__":
    main()
