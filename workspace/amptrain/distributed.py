"""The processes of one run: alone, or as torchrun starts them."""

import datetime
import fcntl
import itertools
import math
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from amptrain.errors import ConfigError, TrainingError
from amptrain.limits import usable_cpus

TIMEOUT = datetime.timedelta(minutes=10)
SIOCGIFADDR = 0x8915
"""ioctl that tells an interface's IPv4 address (netdevice(7))."""


class Processes:
    """This process among those of the run. With one process, all methods give back what they are
    given."""

    def __init__(self, device: str) -> None:
        """Reads what torchrun sets. Raises ConfigError if `device` (auto, cuda, cpu) is not
        there, or where srun started several processes without torchrun."""
        _require_torchrun()
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.device = _device(device, self.local_rank)
        self.local_world_size = local_world_size
        self.cpus = max(1, usable_cpus() // local_world_size)
        # torch starts a thread for each CPU of the host, whatever the quota, in each process.
        torch.set_num_threads(min(self.cpus, _asked_threads() or self.cpus))
        self._control: dist.ProcessGroup | None = None
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.world_size > 1:
            self._join()

    def set_threads(self, images: int, shape: Sequence[int]) -> None:
        """One thread for micro-batches of few pixels, where waking threads takes longer than the
        work: digits are 4 times slower with 2."""
        if self.device.type == "cpu" and images * math.prod(shape) < 2**14:
            torch.set_num_threads(1)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and saves."""
        return self.rank == 0

    def any(self, flag: bool) -> bool:
        """Whether `flag` is set in any process; all get the same answer, at the same batch.

        Over gloo and between the hosts (some 0.2 ms on one machine), so that no device waits for
        it; and because gloo notices a dead process at once, where NCCL would wait for its timeout.
        """
        return self.sum([float(flag)])[0] > 0

    def sum(self, values: list[float]) -> list[float]:
        """Sums over all processes, in FP64."""
        if self._control is None:
            return values
        total = torch.tensor(values, dtype=torch.float64)
        with self._peers():
            dist.all_reduce(total, group=self._control)
        return [float(value) for value in total]

    def gather(self, value: Any) -> list[Any]:
        """`value` of every process, in the order of ranks."""
        if self._control is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        with self._peers():
            dist.all_gather_object(values, value, group=self._control)
        return values

    def gather_to_main(self, value: Any) -> list[Any] | None:
        """`value` of every process, in the order of ranks, for rank 0; None for the others."""
        if self._control is None:
            return [value]
        values: list[Any] | None = [None] * self.world_size if self.is_main else None
        with self._peers():
            dist.gather_object(value, values, dst=0, group=self._control)
        return values

    def broadcast_object(self, value: Any) -> Any:
        """`value` of rank 0."""
        if self._control is None:
            return value
        values = [value]
        with self._peers():
            dist.broadcast_object_list(values, src=0, group=self._control)
        return values[0]

    def wrap(self, model: nn.Module, find_unused_parameters: bool = False) -> nn.Module:
        """`model` as DDP, if there are several processes."""
        if self._control is None:
            return model
        return nn.parallel.DistributedDataParallel(
            model,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            find_unused_parameters=find_unused_parameters,
        )

    def broadcast_tensors(self, tensors: list[Tensor]) -> None:
        """Rank 0's values for all, in place."""
        if self._control is not None:
            with self._peers():
                for tensor in tensors:
                    dist.broadcast(tensor, src=0)

    def close(self) -> None:
        """Leave the group; only after a run that went well, since a broken group can hang here."""
        if self._control is not None:
            dist.destroy_process_group()

    @contextmanager
    def _peers(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise self.lost(error) from error

    def peer_lost(self, error: Exception) -> bool:
        """Whether `error`, raised in a training step, says that another process is gone."""
        text = str(error)
        return self.world_size > 1 and any(
            sign in text for sign in ("gloo", "NCCL", "Connection closed by peer")
        )

    def lost(self, error: Exception) -> TrainingError:
        """What to raise when another process is gone."""
        return TrainingError(
            f"Rank {self.rank} lost another process of this run, so it ends too; the last lines of "
            "that process tell "
            f"the cause. ({str(error).strip().splitlines()[0]})"
        )

    def _join(self) -> None:
        if "GLOO_SOCKET_IFNAME" not in os.environ:
            # Gloo asks for the address of the host's name, which in a container may be 127.0.0.1 or
            # unknown.
            name = _interface(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
            if name is not None:
                os.environ["GLOO_SOCKET_IFNAME"] = name
        meeting: dict[str, Any] = {
            "store": _meeting_store(),
            "rank": self.rank,
            "world_size": self.world_size,
            "timeout": TIMEOUT,
        }
        if self.device.type == "cuda":
            dist.init_process_group("nccl", device_id=self.device, **meeting)
            self._control = dist.new_group(backend="gloo", timeout=TIMEOUT)
        else:
            dist.init_process_group("gloo", **meeting)
            self._control = dist.group.WORLD


_JOINS = itertools.count()


def _meeting_store() -> Store:
    """The store that the ranks tell each other their addresses by, with keys of its own for each
    run of this process.

    A group that is destroyed takes its store with it: rank 1, first at the next run, would meet the
    one that rank 0 is about to close, or read the addresses of the run before.
    """
    return PrefixStore(f"amptrain/{next(_JOINS)}", _store())


@cache
def _store() -> Store:
    store: Store = next(rendezvous("env://", timeout=TIMEOUT))[0]
    store.set_timeout(TIMEOUT)
    return store


def _asked_threads(processes: Path = Path("/proc")) -> int | None:
    """$OMP_NUM_THREADS, None where nobody set it but torchrun.

    torchrun gives several ranks one thread each, whatever CPUs there are, unless it is set already.
    What torchrun itself was started with, /proc tells. OpenMP takes a list (4,2) for nested teams;
    to what is no number its library says so itself, and counts the CPUs.
    """
    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if not (threads.isdecimal() and 0 < len(threads) < 10):
        return None
    if threads == "1" and "TORCHELASTIC_RUN_ID" in os.environ:
        try:
            started_with = (processes / f"{os.getppid()}/environ").read_bytes().split(b"\0")
        except OSError:
            return 1
        if b"OMP_NUM_THREADS=1" not in started_with:
            return None
    return int(threads)


def _require_torchrun() -> None:
    """srun alone tells its tasks no address to meet at; each would train by itself, unnoticed."""
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS") or "1")
    if tasks > 1 and "RANK" not in os.environ:
        raise ConfigError(
            f"srun started this {tasks} times, and no torchrun is between: RANK is not set. Use "
            "`srun --ntasks-per-node=1 torchrun …`, as deploy/slurm/train.sbatch does."
        )


def _device(asked: str, local_rank: int) -> torch.device:
    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 0:
        raise ConfigError(
            "--device cuda was given and torch finds no CUDA device. Start the container with "
            "--gpus all, or use "
            "--device cpu."
        )
    if local_rank >= count:
        raise ConfigError(
            f"Process {local_rank} of this host has no GPU of its own: there are {count}. Use "
            f"--nproc-per-node={count}."
        )
    return torch.device("cuda", local_rank)


def _interface(host: str, port: int) -> str | None:
    """Name of the interface that packets to `host` leave by, None if that cannot be found out.
    Sends nothing."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect((host, port))
            address = sock.getsockname()[0]
            for _, name in socket.if_nameindex():
                request = struct.pack("256s", name.encode())
                try:
                    answer = fcntl.ioctl(sock.fileno(), SIOCGIFADDR, request)
                except OSError:  # an interface without an IPv4 address
                    continue
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    except OSError:
        return None
    return None
