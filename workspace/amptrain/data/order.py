"""Which images make up which step: a pure function of (seed, step), the same for any number of
processes."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from amptrain.data.datasets import VALIDATION, Key
from amptrain.errors import ConfigError
from amptrain.words import counted


class MicroBatchKeys(NamedTuple):
    """What a loader is to read at once, and what the step needs to know of it."""

    keys: list[Key]
    loss_weight: float = 1.0
    """See MicroBatch.loss_weight."""
    last: bool = True
    """Whether this is the last one of its step."""


class Order:
    """The steps of all epochs. A step takes the next `batch_size` images of its epoch's order, the
    last what is left.

    Each step is split into micro-batches, and these over the processes, as evenly as can be; so the
    images of a whole step do not depend on `accumulate` and `world_size`. BatchNorm has no variance
    of one image: each process gets at least two in each micro-batch. What is left at an epoch's end
    and cannot be split so (fewer than two for each process) is left out of that epoch; another
    epoch's order has it elsewhere.

    With `pairs` images 2i and 2i + 1 of a step are never parted by a split, and no step has an odd
    number of them.
    """

    def __init__(
        self,
        images: int,
        batch_size: int,
        *,
        seed: int,
        accumulate: int = 1,
        world_size: int = 1,
        pairs: bool = False,
    ) -> None:
        """Raises ConfigError where a step cannot be split."""
        if batch_size % (accumulate * world_size):
            raise ConfigError(
                f"--global-batch-size {batch_size} counts the images of one step over all "
                f"processes; it needs to be a multiple of {counted(world_size, 'process')} × "
                f"{counted(accumulate, 'micro-batch')}."
            )
        if batch_size < 2 * accumulate * world_size:
            raise ConfigError(
                f"--global-batch-size {batch_size} is one image for each of "
                f"{counted(world_size, 'process')} × {counted(accumulate, 'micro-batch')}; "
                "BatchNorm has no variance of one. It needs to be at least "
                f"{2 * accumulate * world_size}."
            )
        each = batch_size // (accumulate * world_size)
        if pairs and each % 2:
            raise ConfigError(
                f"--mixup and --cutmix mix pairs of images. --global-batch-size {batch_size} gives "
                f"{each} for each of {counted(world_size, 'process')} × "
                f"{counted(accumulate, 'micro-batch')}; it needs to be an even number there, such "
                f"as {batch_size + accumulate * world_size} in all."
            )
        self.batch_size, self.seed, self.world_size = batch_size, seed, world_size
        self.together = 2 if pairs else 1
        """Images that a split does not part."""
        self.micro_batch = batch_size // accumulate
        """Most images of one micro-batch, over all processes."""
        tail = images % batch_size
        while tail and not self._can_be_split(tail):
            tail -= 1
        self.images_in_all = images
        self.images = images - images % batch_size + tail
        if self.images == 0:
            raise ConfigError(
                f"{counted(images, 'image')} to train on: a step needs at least 2 for each process."
            )
        self.steps_per_epoch = math.ceil(self.images / batch_size)
        self._epoch: tuple[int, NDArray[np.int64]] = (-1, np.zeros(0, dtype=np.int64))

    def _can_be_split(self, images: int) -> bool:
        """Whether each process gets two images in each micro-batch of so small a step, and none is
        left without its pair."""
        each = images // math.ceil(images / self.micro_batch)
        return each >= 2 * self.world_size and images % self.together == 0

    def epoch(self, epoch: int) -> NDArray[np.int64]:
        """The order of all images in an epoch."""
        if self._epoch[0] != epoch:
            rng = np.random.Generator(
                np.random.Philox(key=[self.seed, epoch], counter=[0, 0, 1, 0])
            )
            self._epoch = (epoch, rng.permutation(self.images_in_all))
        return self._epoch[1]

    def size(self, step: int) -> int:
        """Images of step `step`, over all processes."""
        start = step % self.steps_per_epoch * self.batch_size
        return min(self.batch_size, self.images - start)

    def images_until(self, step: int) -> int:
        """Images of all steps before `step`."""
        epochs, within = divmod(step, self.steps_per_epoch)
        return epochs * self.images + within * self.batch_size

    def step(self, step: int) -> tuple[int, NDArray[np.int64]]:
        """(epoch, indices) of the images of step `step`, over all processes."""
        epoch, within = divmod(step, self.steps_per_epoch)
        start = within * self.batch_size
        return epoch, self.epoch(epoch)[start : start + self.size(step)]

    def micro_batches(self, step: int, rank: int = 0) -> list[MicroBatchKeys]:
        """This process's part of each micro-batch of a step.

        Its loss weight is its part of the step's images, times the number of processes.
        """
        epoch, indices = self.step(step)
        count = math.ceil(len(indices) / self.micro_batch)
        parts = [self._split(micro, self.world_size)[rank] for micro in self._split(indices, count)]
        return [
            MicroBatchKeys(
                keys=[(epoch, int(index)) for index in part],
                loss_weight=len(part) * self.world_size / len(indices),
                last=number == count,
            )
            for number, part in enumerate(parts, start=1)
        ]

    def _split(self, indices: NDArray[np.int64], parts: int) -> list[NDArray[np.int64]]:
        """As evenly as can be."""
        rows = indices.reshape(-1, self.together)
        return [part.reshape(-1) for part in np.array_split(rows, parts)]


class TrainBatches:
    """Batch sampler: the micro-batches of steps `start` to `stop`, over the ends of epochs, so that
    workers go on."""

    def __init__(self, order: Order, start: int, stop: int, rank: int) -> None:
        self.order, self.start, self.stop, self.rank = order, start, stop, rank

    def __iter__(self) -> Iterator[MicroBatchKeys]:
        for step in range(self.start, self.stop):
            yield from self.order.micro_batches(step, self.rank)


class ValidationBatches:
    """Batch sampler: every `world_size`-th image. No image is taken twice to make processes
    even."""

    def __init__(self, images: int, batch_size: int, rank: int, world_size: int) -> None:
        self.indices = range(rank, images, world_size)
        self.batch_size = batch_size
        self.max_batches = math.ceil(math.ceil(images / world_size) / batch_size)
        """Batches of the process that has the most."""

    def __iter__(self) -> Iterator[MicroBatchKeys]:
        for start in range(0, len(self.indices), self.batch_size):
            indices = self.indices[start : start + self.batch_size]
            yield MicroBatchKeys([(VALIDATION, index) for index in indices])
