"""Which images make up which step: a pure function of (seed, step), the same for any number of
processes."""

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from amptrain.data.datasets import VALIDATION, Key
from amptrain.errors import ConfigError


class Order:
    """The steps of all epochs. A step takes the next `batch_size` images of its epoch's order, the
    last what is left.

    Each step is split into micro-batches, and these over the processes, as evenly as can be; so the
    images of a step do not depend on `accumulate` and `world_size`. Fewer than two images for each
    process (BatchNorm has no variance of one) are left out of their epoch; another epoch's order
    has them elsewhere.
    """

    def __init__(
        self, images: int, batch_size: int, *, seed: int, accumulate: int = 1, world_size: int = 1
    ) -> None:
        if batch_size % (accumulate * world_size):
            raise ConfigError(
                f"--batch-size {batch_size} counts the images of one step over all processes; it needs to be a "
                f"multiple of {world_size} processes × {accumulate} micro-batches."
            )
        tail = images % batch_size
        self.images_in_all = images
        self.images = images - (tail if tail < 2 * world_size else 0)
        if self.images == 0:
            raise ConfigError(
                f"There are {images} training images; a step needs at least 2 for each process."
            )
        self.batch_size, self.seed = batch_size, seed
        self.world_size = world_size
        self.micro_batch = batch_size // accumulate
        """Most images of one micro-batch, over all processes."""
        self.steps_per_epoch = math.ceil(self.images / batch_size)
        self._epoch: tuple[int, NDArray[np.int64]] = (-1, np.zeros(0, dtype=np.int64))

    def epoch(self, epoch: int) -> NDArray[np.int64]:
        """The order of all images in an epoch."""
        if self._epoch[0] != epoch:
            rng = np.random.Generator(
                np.random.Philox(key=[self.seed, epoch], counter=[0, 0, 1, 0])
            )
            self._epoch = (epoch, rng.permutation(self.images_in_all))
        return self._epoch[1]

    def step(self, step: int) -> tuple[int, NDArray[np.int64]]:
        """(epoch, indices) of the images of step `step`, over all processes."""
        epoch, within = divmod(step, self.steps_per_epoch)
        start = within * self.batch_size
        return epoch, self.epoch(epoch)[start : min(start + self.batch_size, self.images)]

    def micro_batches(self, step: int, rank: int = 0) -> list[tuple[list[Key], float]]:
        """For each micro-batch of a step: the keys of this process's images, and their share of the
        step's loss.

        The share is this process's part of the step's images, times the number of processes (see
        MicroBatch.share).
        """
        epoch, indices = self.step(step)
        count = math.ceil(len(indices) / self.micro_batch)
        parts = [
            np.array_split(micro, self.world_size)[rank] for micro in np.array_split(indices, count)
        ]
        return [
            ([(epoch, int(index)) for index in part], len(part) * self.world_size / len(indices))
            for part in parts
        ]


class TrainBatches:
    """Batch sampler: the micro-batches of steps `start` to `stop`, over the ends of epochs, so that
    workers go on."""

    def __init__(self, order: Order, start: int, stop: int, rank: int) -> None:
        self.order, self.start, self.stop, self.rank = order, start, stop, rank

    def __iter__(self) -> Iterator[list[Key]]:
        for step in range(self.start, self.stop):
            for keys, _ in self.order.micro_batches(step, self.rank):
                yield keys


class ValidationBatches:
    """Batch sampler: every `world_size`-th image. No image is taken twice to make processes
    even."""

    def __init__(self, images: int, batch_size: int, rank: int, world_size: int) -> None:
        self.indices = range(rank, images, world_size)
        self.batch_size = batch_size
        self.most = math.ceil(math.ceil(images / world_size) / batch_size)
        """Batches of the process that has the most."""

    def __iter__(self) -> Iterator[list[Key]]:
        for start in range(0, len(self.indices), self.batch_size):
            yield [(VALIDATION, index) for index in self.indices[start : start + self.batch_size]]
