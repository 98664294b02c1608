"""From data sets to batches on the device: workers, shared memory, copies that overlap with
computing."""

import atexit
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import batched, compress
from multiprocessing import Process
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C import _remove_worker_pids
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as MapDataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from amptrain.data.datasets import Dataset, FakeImages, Images, Sample
from amptrain.data.mixing import Mixer, Mixes
from amptrain.data.order import MicroBatchKeys
from amptrain.errors import ConfigError
from amptrain.limits import shared_memory_free
from amptrain.signals import ignore_stop_signals
from amptrain.step import MicroBatch
from amptrain.words import counted

WORKER_TIMEOUT = 600.0
"""Seconds without a batch after which a loader is given up: its workers ignore SIGTERM, so a stuck
one must be seen."""
FAREWELL_S = 1.0
"""Seconds in which workers may end by themselves."""


MOST_WORKERS = 16
"""For each CPU: far more than a slow network disk needs, and few enough to start."""

BatchSampler = Iterable[MicroBatchKeys]


class Batch(NamedTuple):
    """Samples that were read together."""

    images: Tensor
    labels: Tensor
    broken: tuple[str, ...]
    loss_weight: float = 1.0
    last: bool = True
    mixes: Mixes | None = None


class BatchReader(MapDataset[Batch]):
    """Data set whose item is a whole micro-batch: so what the order says of one travels with it,
    through the workers, to the step."""

    def __init__(self, images: Images, mixer: Mixer | None = None) -> None:
        self.images, self.mixer = images, mixer

    def __getitem__(self, asked: MicroBatchKeys) -> Batch:
        samples = [self.images[key] for key in asked.keys]
        mixes = None
        if self.mixer is not None:
            samples = without_odd_ones(samples)
            good = [sample.label >= 0 for sample in samples]
            mixes = self.mixer.draw(list(compress(asked.keys, good)))
        batch = collate(samples)
        return batch._replace(loss_weight=asked.loss_weight, last=asked.last, mixes=mixes)


def without_odd_ones(samples: list[Sample]) -> list[Sample]:
    """`samples`, a pair marked as unreadable where one of it is."""
    return [
        sample if other.label >= 0 else sample._replace(label=-1)
        for pair in batched(samples, 2, strict=True)
        for sample, other in zip(pair, reversed(pair), strict=True)
    ]


def as_it_is(batch: Batch) -> Batch:
    """In place of torch's collation, for a batch that is one already."""
    return batch


def collate(samples: list[Sample]) -> Batch:
    """One tensor of the images that could be read."""
    good = [sample for sample in samples if sample.label >= 0]
    images = (
        torch.stack([sample.image for sample in good])
        if good
        else samples[0].image.unsqueeze(0)[:0]  # of the right shape, as a batch may have no other
    )
    labels = torch.tensor([sample.label for sample in good], dtype=torch.int64)
    return Batch(images, labels, tuple(line for sample in samples for line in sample.broken))


def choose_workers(
    asked: int | None, task: Dataset, cpus: int, prefetch: int, images: int, local_ranks: int = 1
) -> int:
    """Loader workers of this process: as asked for, else one a CPU, as far as shared memory holds
    their batches.

    `images` is the most images in a batch; `cpus` are those of this process; `local_ranks` share
    /dev/shm. Raises ConfigError if
    what was asked for does not fit: a worker that finds /dev/shm full dies of a bus error
    (pytorch#5040).
    """
    if isinstance(task.train, FakeImages):
        return 0
    if asked is not None and asked > MOST_WORKERS * cpus:
        raise ConfigError(
            f"--num-workers {asked} is more than {MOST_WORKERS} a CPU, and this process may use "
            f"{counted(cpus, 'CPU')}; they would take its memory and not be faster. Leave the flag "
            "out: the number then fits the CPUs."
        )
    channels, height, width = task.shape
    # Besides the batches that wait, one is being filled by each worker and one is being read.
    # Training and validation have the same number of workers, and keep their batches at once.
    need_each = 2 * images * channels * height * width * (prefetch + 1) * local_ranks
    free = shared_memory_free()
    workers = asked if asked is not None else 0 if task.in_memory else min(cpus, 16)
    fitting = free // need_each
    if workers <= fitting:
        return workers
    if asked is None:
        return fitting
    mib = 1024**2
    raise ConfigError(
        f"/dev/shm has {free // mib} MiB free, and --num-workers {workers} with --prefetch-factor "
        f"{prefetch} "
        "need "
        f"{workers * need_each // mib + 1} MiB. Start the container with "
        f"--shm-size={2 * workers * need_each // mib + 64}m (compose: shm_size), or use "
        "--num-workers "
        f"{fitting}."
    )


def make_loader(
    images: Images,
    batches: BatchSampler,
    workers: int,
    prefetch: int,
    pin_memory: bool,
    mixer: Mixer | None = None,
) -> DataLoader[Batch]:
    """A loader of `batches`, a batch sampler; `mixer` draws how the images of each are mixed."""
    return DataLoader(
        BatchReader(images, mixer),
        sampler=batches,
        batch_size=None,
        num_workers=workers,
        collate_fn=as_it_is,  # type: ignore[arg-type]  # torch's stub knows lists of samples only
        pin_memory=pin_memory,
        timeout=WORKER_TIMEOUT if workers else 0,
        worker_init_fn=begin_worker if workers else None,
        prefetch_factor=prefetch if workers else None,
        persistent_workers=workers > 0,
        # Making an iterator draws a number; from the global generator it would change what a
        # resumed run draws next.
        generator=torch.Generator().manual_seed(0),
    )


def begin_worker(worker: int) -> None:
    """In a new loader worker. It ends with its parent, also while it hangs in a read: torch's
    workers look for their parent between two batches only."""
    ignore_stop_signals()
    _prctl_pr_set_pdeathsig(signal.SIGKILL)


class DeviceBatches:
    """Iterates over a loader's batches as MicroBatches on the device.

    Images come as normalised float32, (n, channels, height, width), in `memory_format`, and mixed
    if there is a `mixer`; several labels an image come as float32, (n, classes), 1 for each. On
    CUDA the copy, the normalisation and the mixing run on a stream of their own, beside the step
    before. `waited` counts the seconds that the host spent waiting for the loader, which it does in
    the context of `waiting()`. `report` is told of the images that could not be read.
    """

    def __init__(
        self,
        loader: Iterable[Batch],
        task: Dataset,
        device: torch.device,
        memory_format: torch.memory_format,
        report: Callable[[tuple[str, ...]], None],
        mixer: Mixer | None = None,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.waiting = waiting
        self.loader, self.device, self.memory_format, self.report = (
            loader,
            device,
            memory_format,
            report,
        )
        self.mixer = mixer
        self.waited = 0.0
        self.batches: Iterator[Batch] | None = None
        self.mean = torch.tensor(task.mean, device=device).view(1, -1, 1, 1)
        self.std = torch.tensor(task.std, device=device).view(1, -1, 1, 1)
        sets = task.label_sets
        self.label_sets = None if sets is None else torch.from_numpy(sets).to(device)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __iter__(self) -> Iterator[MicroBatch]:
        started, batches = self.batches is not None, iter(self.loader)
        self.batches = batches
        if not started and isinstance(batches, _MultiProcessingDataLoaderIter):
            # For a program that does not close this. Later than torch's own hook for these workers,
            # so it runs before that one, which would wait 5 seconds for each.
            atexit.register(_kill, batches._workers)
        while (ready := self._next(batches)) is not None:
            if self.stream is not None:
                current = torch.cuda.current_stream(self.device)
                current.wait_stream(self.stream)
                for tensor in (ready.inputs, ready.targets):
                    tensor.record_stream(current)
            yield ready

    def close(self) -> None:
        """End the workers now. Python's exit alone would not end them: it sends SIGTERM, which
        they ignore, and waits."""
        batches = self.batches
        if not isinstance(batches, _MultiProcessingDataLoaderIter):
            return
        if batches._worker_pids_set:  # a worker that is killed from here on is no failure
            _remove_worker_pids(id(batches))
            batches._worker_pids_set = False
        # torch waits 5 seconds for each worker that hangs.
        late = threading.Timer(FAREWELL_S, _kill, (batches._workers,))
        late.start()
        try:
            batches._shutdown_workers()
        finally:
            late.cancel()
            _kill(batches._workers)

    def _next(self, batches: Iterator[Batch]) -> MicroBatch | None:
        started = time.perf_counter()
        with self.waiting():
            batch = next(batches, None)
        self.waited += time.perf_counter() - started
        if batch is None:
            return None
        self.report(batch.broken)
        with torch.cuda.stream(self.stream):  # does nothing without a stream
            images = batch.images.to(
                self.device, non_blocking=True, memory_format=self.memory_format
            )
            labels = batch.labels.to(self.device, non_blocking=True)
            if self.label_sets is not None:
                labels = self.label_sets[labels].float()
            images = self._normalised(images)
            if self.mixer is not None and batch.mixes is not None:
                mixes = to_device(batch.mixes, self.device)
                images, labels = self.mixer.mix(images, labels, mixes)
                images = images.contiguous(memory_format=self.memory_format)
        return MicroBatch(
            inputs=images, targets=labels, loss_weight=batch.loss_weight, last=batch.last
        )

    def _normalised(self, images: Tensor) -> Tensor:
        """Minus mean, by standard deviation; a float batch is changed in place, as nobody else has
        it. Both are held for each pixel: over channels_last a value for each channel is read in
        runs of three, which takes a CPU four times as long."""
        shape = (1, *images.shape[1:])
        if self.mean.shape != shape:
            self.mean, self.std = (
                values[:, :, :1, :1].expand(shape).contiguous(memory_format=self.memory_format)
                for values in (self.mean, self.std)
            )
        return images.float().sub_(self.mean).div_(self.std)


def to_device(mixes: Mixes, device: torch.device) -> Mixes:
    """`mixes` on `device`."""
    return Mixes(*(tensor.to(device, non_blocking=True) for tensor in mixes))


def _kill(workers: list[Process]) -> None:
    for worker in workers:
        worker.kill()  # SIGKILL, as one may hang in a read


class FakeBatches:
    """One batch of noise, made on the device once, in the sizes that `batches` asks for.

    It is made of `max_images`, whichever size is asked for first: a run that continues with a short
    step has the same images as the run that was never stopped.
    """

    waited = 0.0

    def __init__(
        self,
        batches: BatchSampler,
        task: Dataset,
        device: torch.device,
        memory_format: torch.memory_format,
        max_images: int,
        mixer: Mixer | None = None,
    ) -> None:
        self.max_images, self.mixer = max_images, mixer
        self.batches, self.task, self.device, self.memory_format = (
            batches,
            task,
            device,
            memory_format,
        )

    def __iter__(self) -> Iterator[MicroBatch]:
        generator = torch.Generator(self.device).manual_seed(0)
        shape = (self.max_images, *self.task.shape)
        images = torch.randn(shape, generator=generator, device=self.device)
        images = images.to(memory_format=self.memory_format)
        labels = torch.randint(
            len(self.task.classes), shape[:1], generator=generator, device=self.device
        )
        for keys, loss_weight, last in self.batches:
            inputs, targets = images[: len(keys)], labels[: len(keys)]
            if self.mixer is not None:
                mixes = to_device(self.mixer.draw(keys), self.device)
                inputs, targets = self.mixer.mix(inputs, targets, mixes)
                inputs = inputs.contiguous(memory_format=self.memory_format)
            yield MicroBatch(inputs=inputs, targets=targets, loss_weight=loss_weight, last=last)

    def close(self) -> None:
        """There are no workers to end."""
