"""Where a run's batches come from: training from its next step to the last, and validation."""

from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import ExitStack, nullcontext
from functools import partial

import torch
from torch.utils.data import DataLoader

from amptrain.config import TrainConfig
from amptrain.data.datasets import Dataset, FakeImages, FileImages, Images
from amptrain.data.files import FileList
from amptrain.data.loader import (
    BatchSampler,
    DeviceBatches,
    FakeBatches,
    choose_workers,
    make_loader,
)
from amptrain.data.look import find_broken
from amptrain.data.mixing import Mixer, make_mixer
from amptrain.data.order import Order, TrainBatches, ValidationBatches
from amptrain.distributed import Processes
from amptrain.errors import TrainingError
from amptrain.files import atomic_write, named
from amptrain.report.log import RunLog
from amptrain.signals import StopSignal
from amptrain.step import MicroBatch
from amptrain.threads import in_background
from amptrain.words import counted

POLL_S = 0.1
SHOWN = 20
"""Broken images that are said; all are in broken.txt."""
FEW_BROKEN = 100
"""Images that may be broken in any data set, with --skip-broken."""
MAX_BROKEN = 0.1
"""Part of all images that may be broken."""


class Feed:
    """The batches of this process."""

    def __init__(
        self,
        config: TrainConfig,
        task: Dataset,
        order: Order,
        processes: Processes,
        memory_format: torch.memory_format,
        stop: StopSignal,
    ) -> None:
        """Raises ConfigError if the loader workers do not fit. A wait for data ends by WaitEnded
        where `stop` asks for it."""
        self.stop = stop
        self.config, self.task, self.order = config.data, task, order
        self.processes, self.memory_format = processes, memory_format
        self.max_images = order.micro_batch // processes.world_size
        self.workers = choose_workers(
            config.data.num_workers,
            task,
            processes.cpus,
            config.data.prefetch_factor,
            self.max_images,
            processes.local_world_size,
        )
        self.validation_batches = ValidationBatches(
            len(task.validation), self.max_images, processes.rank, processes.world_size
        )
        self.mixer = make_mixer(config.data, task, order.seed)
        self.broken: set[str] = set()
        self.broken_list = config.run_dir / "broken.txt"
        self.opened: list[DeviceBatches | FakeBatches] = []

    def open(self, start: int, stop: int, log: RunLog) -> None:
        """Make `training`, from step `start` to step `stop`, and `validation`."""
        self.log = log
        training = TrainBatches(self.order, start, stop, self.processes.rank)
        self.training = self._batches(self.task.train, training, self.mixer)
        self.opened.append(self.training)
        self._steps = iter(self.training)
        self.validation = self._batches(self.task.validation, self.validation_batches)
        self.opened.append(self.validation)

    def step(self) -> Iterator[MicroBatch]:
        """The micro-batches of the next step, as they come."""
        last = False
        while not last:
            batch = next(self._steps)
            last = batch.last
            yield batch

    def _batches(
        self, images: Images, batches: BatchSampler, mixer: Mixer | None = None
    ) -> DeviceBatches | FakeBatches:
        device = self.processes.device
        if isinstance(images, FakeImages):
            return FakeBatches(
                batches, self.task, device, self.memory_format, self.max_images, mixer
            )
        loader: DataLoader[object] = make_loader(
            images,
            batches,
            self.workers,
            self.config.prefetch_factor,
            pin_memory=device.type == "cuda",
            mixer=mixer,
        )
        return DeviceBatches(
            loader, self.task, device, self.memory_format, self._report, mixer, self.stop.waiting
        )

    def close(self) -> None:
        """End the loader workers."""
        with (
            ExitStack() as all_of_them
        ):  # also when the first fails, as it may where a worker was killed
            for batches in self.opened:
                all_of_them.callback(batches.close)

    def look(self, log: RunLog) -> None:
        """Look at all image files before the first step. Raises TrainingError, on all processes,
        for those that cannot be read without --skip-broken."""
        self.log = log
        parts = [
            images.files
            for images in (self.task.train, self.task.validation)
            if isinstance(images, FileImages)
        ]
        found = self.processes.broadcast_object(self._find_broken(parts))
        if found and not self.config.skip_broken and len(found) > 1:
            log.message(f"{counted(len(found), 'image')} cannot be read:")
            for text in found[:SHOWN]:
                log.message(f"  {text}")
        self._report(found)

    def _find_broken(self, parts: list[FileList]) -> tuple[str, ...]:
        """What rank 0 cannot read. The others ask every moment whether it is done: a million files
        on a network disk take longer than an exchange between processes may."""
        looking = None
        if parts and self.processes.is_main:
            looking = in_background(partial(find_broken, parts, self.processes.cpus))

        def is_looking() -> bool:
            if looking is not None:
                wait([looking], POLL_S)
            return looking is not None and not looking.done()

        with self.stop.waiting() if looking is not None else nullcontext():
            while self.processes.any(is_looking()):
                pass
        return () if looking is None else tuple(looking.result())

    def _report(self, broken: tuple[str, ...]) -> None:
        """Stop at an image that cannot be read, or with --skip-broken say and remember it."""
        for text in broken:
            if not self.config.skip_broken:
                raise TrainingError(
                    f"The image {text}. Repair it and run the same command again; or add "
                    "--skip-broken, which leaves out what cannot be read, and continues this run."
                )
            path = text.rpartition(": ")[0]
            if path in self.broken:
                continue
            self.broken.add(path)
            self._remember(text)
            if len(self.broken) <= SHOWN:
                self.log.message(f"Skipped unreadable image ({len(self.broken)} so far): {text}")
            elif len(self.broken) == SHOWN + 1:
                self.log.message("Further images that cannot be read are only listed: broken.txt")
        if broken:
            self._stop_on_many(len(broken))

    def _stop_on_many(self, in_batch: int) -> None:
        """So many are no broken files, but a disk or a path that fails."""
        images = len(self.task.train) + len(self.task.validation)
        if len(self.broken) > max(FEW_BROKEN, MAX_BROKEN * images) or in_batch >= len(
            self.task.train
        ):
            raise TrainingError(
                f"{len(self.broken)} of {counted(images, 'image')} could not be read, which is "
                f"more than {MAX_BROKEN:.0%}; broken.txt in the run directory names them. The disk "
                "or the path is at fault rather than single files. Mend that, and run the same "
                "command again."
            )

    def _remember(self, text: str) -> None:
        """At once, so that a kill loses none; each process adds to the same file. The names may be
        in any encoding."""
        with named(self.broken_list), self.broken_list.open("ab") as file:
            file.write(text.replace("\n", " ").encode("utf-8", "surrogateescape") + b"\n")

    def count_broken(self) -> int:
        """The images that this run left out, in all its parts and processes; listed once each, in
        order, in broken.txt."""
        everywhere = self.processes.gather(len(self.broken))  # all have written by now
        if not self.processes.is_main or not (any(everywhere) or self.broken_list.exists()):
            return 0
        by_path = {
            line.rpartition(b": ")[0]: line for line in self.broken_list.read_bytes().splitlines()
        }
        lines = sorted(by_path.values())
        atomic_write(self.broken_list, b"".join(line + b"\n" for line in lines))
        return len(lines)
