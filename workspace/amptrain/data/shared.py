"""One data set for all processes of a machine: it is looked at once, and its arrays are in memory
once."""

import mmap
import os
import pickle
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from amptrain.config import TrainConfig
from amptrain.data.datasets import Dataset, open_dataset
from amptrain.data.sources import split
from amptrain.distributed import Processes
from amptrain.errors import ConfigError
from amptrain.threads import in_background

ALIGNED = 64
"""Bytes; arrays begin at multiples of it."""
POLL_S = 0.1


@dataclass(frozen=True)
class Place:
    """Where a data set lies, for the processes of one machine."""

    machine: str
    path: str
    """A file in memory: the data set pickled, then its arrays."""
    lengths: tuple[int, ...]
    """Bytes of each part."""


def open_for_all(config: TrainConfig, processes: Processes) -> Dataset:
    """The data set, in memory once on each machine. All processes call this; those of local rank 0
    look at the data. A function of one's own is called in each process, since nobody knows whether
    what it returns can be shared. Raises ConfigError, in all processes."""

    def opened() -> Dataset:
        return open_dataset(config.data, config.run.seed)

    if processes.world_size == 1 or split(config.data.data)[0] == "function":
        return opened()
    told: Place | ConfigError | None = None
    with ExitStack() as until_all_have_it:
        work = in_background(opened) if processes.local_rank == 0 else None
        # A listing may take longer than one exchange between processes may.
        while processes.any(work is not None and not work.done()):
            time.sleep(POLL_S)
        if work is not None:
            try:
                told = until_all_have_it.enter_context(shared(work.result()))
            except ConfigError as error:
                told = error
        found = processes.gather(told)
        for answer in found:
            if isinstance(answer, ConfigError):
                raise answer
        here = machine()
        own = next((place for place in found if place is not None and place.machine == here), None)
        try:
            dataset = opened() if own is None else mapped(own)
        except OSError:  # a sandbox that shows no process the files of another
            dataset = opened()
        processes.any(False)
    return dataset


@contextmanager
def shared(dataset: Dataset) -> Iterator[Place]:
    """Put `dataset` into memory that other processes of this machine can map while this lasts.

    Without a name on a disk or in /dev/shm: nothing is left by a kill, and no size of /dev/shm
    limits it. Pickle hands NumPy's arrays over as they lie in memory (PEP 574).
    """
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(dataset, protocol=5, buffer_callback=buffers.append)
    parts = [memoryview(pickled), *(buffer.raw() for buffer in buffers)]
    with open(os.memfd_create("amptrain-data"), "wb") as file:
        for part in parts:
            file.write(part)
            file.write(bytes(-len(part) % ALIGNED))
        file.flush()
        path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        yield Place(machine(), path, tuple(len(part) for part in parts))


def mapped(place: Place) -> Dataset:
    """The data set at `place`. What a process changes in its arrays, it alone sees. Raises
    OSError."""
    with Path(place.path).open("rb") as file:
        memory = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    starts = accumulate((length + -length % ALIGNED for length in place.lengths), initial=0)
    parts = [
        memory[start : start + length] for start, length in zip(starts, place.lengths, strict=False)
    ]
    dataset: Dataset = pickle.loads(parts[0], buffers=parts[1:])
    return dataset


def machine() -> str:
    """What processes have in common that see each other in /proc."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
