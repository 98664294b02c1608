"""In the container: `inside MODEL SECONDS`."""

import sys
import tempfile
import time
from statistics import median

from amptrain.config import from_flat
from amptrain.distributed import Processes
from amptrain.signals import StopSignal
from amptrain.train import Trainer

from benchmarks.paired import interleave, ratio, timed


def main(model: str, seconds: float) -> None:
    """Measure, and print the table."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {"data": "fake:64", "image_size": 32, "global_batch_size": 4, "model": model}
        config = from_flat(
            {**settings, "runs": folder, "name": "run", "device": "cpu", "async_checkpoint": True}
        )
        config.run_dir.mkdir(parents=True)
        trainer = Trainer(config, Processes("cpu"), StopSignal())
        trainer.feed.open(0, trainer.schedule.total, trainer.report.log)
        trainer.clock.start()
        trainer.report.meter.restart(trainer.state.window)
        step = iter(range(10**6))

        def train_step() -> None:
            trainer._train_step(next(step))
            trainer._settle()

        train_step()  # Adam's values are there from now on
        written: list[float] = []
        beside: list[float] = []

        def later() -> float:
            began = time.perf_counter()
            trainer.save_later()
            held = time.perf_counter() - began
            beside.append(timed(train_step)())
            trainer.checkpoints.finish(wait=True)
            written.append(time.perf_counter() - began)
            return held

        ways = {"between": timed(trainer.save), "later": later, "step": timed(train_step)}
        times = interleave(ways, seconds, 100)
        (size, *_) = (path.stat().st_size for path in config.run_dir.glob("checkpoints/*.pt"))
        trainer.feed.close()
        held = ratio(times["between"], times["later"])
        slower = ratio(times["step"], beside[-len(times["step"]) :])
        sys.stdout.write(
            f"{model}, a checkpoint of {size / 1e6:.0f} MB, {len(times['step'])} rounds\n\n"
            "| | s, median |\n| --- | ---: |\n"
            f"| written between steps: held for | {median(times['between']):.2f} |\n"
            f"| written meanwhile: held for | {median(times['later']):.2f} |\n"
            f"| until it is on the disk, a step beside it | {median(written):.2f} |\n"
            f"| a step | {median(times['step']):.2f} |\n"
            f"| a step while one is written | {median(beside):.2f} |\n\n"
            f"Held for a part: 1 to {held}; speed of a step meanwhile {slower}.\n"
        )


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
