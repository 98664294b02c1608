"""What `amptrain check --run` costs a program: its steps with the hooks and without them, in turn,
in one process of the image, as Markdown.

    python3 -m benchmarks.watch [--seconds 30]

A step takes a batch from a DataLoader, goes through a GradScaler in FP32, and reads the loss, so
that every hook has work. The shorter a step, the larger the hooks' part.
"""

import argparse
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

MODELS = ("small_cnn", "resnet18")


def inside(seconds: float) -> None:
    """In the container: measure, and print the table."""
    import torch
    from amptrain.check.watch import Watch
    from torch.utils.data import DataLoader, TensorDataset

    from benchmarks.paired import interleave, ratio, timed
    from benchmarks.peers.inside import model_and_batch, optimizer_of

    torch.set_num_threads(1)
    print("| model | step, ms | watched to not watched (95 %) | µs more | rounds |")
    print("| --- | ---: | --- | ---: | ---: |")
    for name in MODELS:
        model, images, labels = model_and_batch(name)
        loader = DataLoader(TensorDataset(images, labels), batch_size=len(images))
        plain = timed(partial(epoch, model, optimizer_of(model), loader))
        watched = partial(watch_it, Watch(Path(tempfile.mkdtemp())), plain)
        times = interleave({"plain": plain, "watched": watched}, seconds, 20000)
        base, with_hooks = times["plain"], times["watched"]
        more = median(w - b for w, b in zip(with_hooks, base, strict=True)) * 1e6
        row = f"{ratio(base, with_hooks)} | {more:.0f} | {len(base)}"
        print(f"| {name} | {median(base) * 1e3:.2f} | {row} |", flush=True)


def epoch(model: Any, optimizer: Any, loader: Any) -> None:
    """The loader's one batch: a step by a scaler, whose loss is read. With a scale of 1, so that
    no step is skipped."""
    import torch

    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    for images, labels in loader:
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        loss.item()


def watch_it(watch: Any, plain: Callable[[], float]) -> float:
    """Seconds of `plain` with the hooks set; setting them is no part of a step."""
    watch.start()
    taken = plain()
    watch.stop()
    return taken


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="for each model")
    seconds = str(parser.parse_args().seconds)

    from host.build import IMAGE
    from host.engine import require_engine
    from host.versions import ROOT

    mounts = [
        *("--volume", f"{ROOT}/benchmarks:/bench/benchmarks:ro"),
        *("--volume", f"{ROOT}/workspace:/workspace:ro"),
    ]
    run = [require_engine(), "run", "--rm", "--env=PYTHONPATH=/bench:/workspace", *mounts, IMAGE]
    code = "import sys; from benchmarks.watch import inside; inside(float(sys.argv[1]))"
    subprocess.run([*run, "python", "-c", code, seconds], check=True)


if __name__ == "__main__":
    main()
