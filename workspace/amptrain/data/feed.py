"""Where a run's batches come from: training from its next step to the last, and validation."""

from contextlib import ExitStack
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from amptrain.config import TrainConfig
from amptrain.data.datasets import FakeImages, Images, Task
from amptrain.data.loader import (
    BatchSampler,
    DeviceBatches,
    FakeBatches,
    choose_workers,
    make_loader,
)
from amptrain.data.order import Order, TrainBatches, ValidationBatches
from amptrain.distributed import Processes
from amptrain.errors import TrainingError
from amptrain.report.log import RunLog


class Feed:
    """The batches of this process."""

    def __init__(
        self,
        config: TrainConfig,
        task: Task,
        order: Order,
        processes: Processes,
        memory_format: torch.memory_format,
    ) -> None:
        """Raises ConfigError if the loader workers do not fit."""
        self.config, self.task, self.order = config.data, task, order
        self.processes, self.memory_format = processes, memory_format
        self.max_images = order.micro_batch // processes.world_size
        self.workers = choose_workers(
            config.data.workers, task, processes.cpus, config.data.prefetch, self.max_images
        )
        self.validation_batches = ValidationBatches(
            len(task.validation), self.max_images, processes.rank, processes.world_size
        )
        self.broken: set[str] = set()
        self.opened: list[DeviceBatches | FakeBatches] = []

    def open(self, start: int, stop: int, log: RunLog) -> None:
        """Make `training`, from step `start` to step `stop`, and `validation`."""
        self.log = log
        training = TrainBatches(self.order, start, stop, self.processes.rank)
        self.training = self._batches(self.task.train, training, self.workers)
        self.opened.append(self.training)
        self.validation = self._batches(
            self.task.validation, self.validation_batches, min(self.workers, 2)
        )
        self.opened.append(self.validation)

    def _batches(
        self, images: Images, batches: BatchSampler, workers: int
    ) -> DeviceBatches | FakeBatches:
        device = self.processes.device
        if isinstance(images, FakeImages):
            return FakeBatches(batches, self.task, device, self.memory_format, self.max_images)
        loader: DataLoader[object] = make_loader(
            images, batches, workers, self.config.prefetch, pin_memory=device.type == "cuda"
        )
        return DeviceBatches(loader, self.task, device, self.memory_format, self._report)

    def close(self) -> None:
        """End the loader workers."""
        with (
            ExitStack() as all_of_them
        ):  # also when the first fails, as it may where a worker was killed
            for batches in self.opened:
                all_of_them.callback(batches.close)

    def _report(self, broken: tuple[str, ...]) -> None:
        """Stop at an image that cannot be read, or with --skip-broken say and remember it."""
        for text in broken:
            if not self.config.skip_broken:
                raise TrainingError(
                    f"The image {text}. Repair or remove it, or leave out what cannot be read with --skip-broken."
                )
            if text not in self.broken:
                self.broken.add(text)
                self.log.message(f"Left out, the {len(self.broken)}. that cannot be read: {text}")

    def write_broken(self, path: Path) -> int:
        """List the images that were left out, of all processes, in `path`, if there are any.
        Returns their number."""
        broken = sorted(set().union(*self.processes.gather(self.broken)))
        if broken and self.processes.is_main:
            path.write_text("\n".join(broken) + "\n", encoding="utf-8")
        return len(broken)
