"""Measure 1, 2 and 4 gloo ranks of this machine in the image, and hold the model against them."""

import json
import os
import statistics
import subprocess

from benchmarks.scale import model
from host.build import IMAGE
from host.engine import require_engine

RANKS = (1, 2, 4)
SIZES = (1, 32)  # MiB, of the all-reduces from which bandwidth and latency are fitted
STEP_MIB = 128  # of gradients, in layers of 4 MiB
RANK = r"""
import json, statistics, sys, time, torch, torch.distributed as dist
from torch import nn
torch.set_num_threads(1)
dist.init_process_group("gloo")
def timed(action, repeats=9):
    seconds = []
    for _ in range(repeats):
        dist.barrier()
        begin = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds), min(seconds), max(seconds)
sizes, layers = json.loads(sys.argv[1]), int(sys.argv[2])
found = {"reduce": {}}
for size in sizes:
    data = torch.zeros(size * 2**18)
    found["reduce"][size] = timed(lambda: dist.all_reduce(data))
net = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(layers)])
images = torch.randn(64, 1024)
def step(network):
    network(images).square().mean().backward()
    for value in network.parameters():
        value.grad = None
found["alone"] = timed(lambda: step(net))
wrapped = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
step(wrapped)  # the first one builds the buckets
found["step"] = timed(lambda: step(wrapped))
if dist.get_rank() == 0:
    print("FOUND", json.dumps(found))
dist.destroy_process_group()
"""

Found = dict[str, list[float] | dict[str, list[float]]]


def run(client: str, ranks: int) -> dict[str, object]:
    """Medians, minima and maxima in seconds that rank 0 of `ranks` saw."""
    start = f"cat >/tmp/rank.py; torchrun --standalone --nproc-per-node={ranks} /tmp/rank.py "
    command = [client, "run", "--rm", "--interactive", "--shm-size=1g", IMAGE, "bash", "-c"]
    words = f"'{json.dumps(SIZES)}' {STEP_MIB // 4}"
    done = subprocess.run(
        [*command, start + words], input=RANK, check=True, capture_output=True, text=True
    )
    line = next(line for line in done.stdout.splitlines() if line.startswith("FOUND"))
    return dict(json.loads(line.removeprefix("FOUND")))


def fit(reduce: dict[str, list[float]], ranks: int) -> model.Network:
    """Bandwidth and latency that explain the all-reduces of both sizes."""
    small, large = (reduce[str(size)][0] for size in SIZES)
    sent = 2 * (ranks - 1) / ranks * 8 * (SIZES[1] - SIZES[0]) * 2**20
    bandwidth = sent / max(large - small, 1e-9)
    alone = small - 2 * (ranks - 1) / ranks * 8 * SIZES[0] * 2**20 / bandwidth
    return model.Network(bandwidth, max(0.0, alone / (2 * (ranks - 1))))


def main() -> None:
    """Print the table: the measured step, and the model's with and without overlap."""
    client = require_engine()
    print(
        f"{os.cpu_count()} CPUs, load average before {os.getloadavg()[0]:.1f}; one thread a rank\n"
    )
    print(
        "| ranks | fitted Gbit/s | step alone, ms | step, ms | min–max | model, ms | no overlap |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    trained = model.Model(STEP_MIB * 2**18)
    for ranks in RANKS:
        found = run(client, ranks)
        alone, measured = found["alone"], found["step"]
        assert isinstance(alone, list)
        assert isinstance(measured, list)
        reduce = found["reduce"]
        assert isinstance(reduce, dict)
        network = fit(reduce, ranks) if ranks > 1 else model.Network(1, 0)
        with_overlap = model.step(trained, alone[0], ranks, network).total
        without = model.step(trained, alone[0], ranks, network, overlap=False).total
        fitted = f"{network.bandwidth / 1e9:.1f}" if ranks > 1 else "–"
        print(
            f"| {ranks} | {fitted} | {alone[0] * 1e3:.0f} | {measured[0] * 1e3:.0f} | "
            f"{measured[1] * 1e3:.0f}–{measured[2] * 1e3:.0f} | {with_overlap * 1e3:.0f} | "
            f"{without * 1e3:.0f} |"
        )
    print(f"\nmedian of 9, {statistics.mean(os.getloadavg()):.1f} load average after")
