"""The arithmetic: seconds, bytes and bits per second go in, seconds come out.

Sources of the formulas:
ring all-reduce, 2 (n - 1) / n of the data through each link: Patarasu and Yuan, Bandwidth optimal
  all-reduce algorithms for clusters of workstations, J. Parallel Distrib. Comput. 69 (2009).
latency and bandwidth of a message (alpha-beta): Thakur, Rabenseifner, Gropp, Optimization of
  collective communication operations in MPICH, Int. J. High Perform. Comput. Appl. 19 (2005).
buckets that are reduced while the backward pass goes on: Li et al., PyTorch Distributed, VLDB 2020.
checkpoint interval: Young, Commun. ACM 17 (1974); Daly, Future Gener. Comput. Syst. 22 (2006).
"""

import math
from dataclasses import dataclass

BUCKET_MIB = 25  # DDP's bucket_cap_mb
FIRST_BUCKET_MIB = 1  # torch.distributed._DEFAULT_FIRST_BUCKET_BYTES


@dataclass(frozen=True)
class Model:
    """What is trained: number of parameters, and bytes of one gradient value (4: FP32, 2: bf16)."""

    parameters: float
    gradient_bytes: int = 4

    @property
    def gradients(self) -> float:
        """Bytes that each rank gives to the all-reduce of a step."""
        return self.parameters * self.gradient_bytes


@dataclass(frozen=True)
class Network:
    """The slowest link of the ring: bits per second in one direction, and seconds per message."""

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Step:
    """Where the seconds of one step go. `exposed` is communication that nothing hides."""

    compute: float
    communication: float
    exposed: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.compute + self.exposed

    @property
    def efficiency(self) -> float:
        """Images per second of a rank, to those of a rank alone."""
        return self.compute / self.total


def ring_all_reduce(size: float, ranks: int, network: Network) -> float:
    """Seconds to sum `size` bytes over `ranks` in a ring: 2 (n - 1) messages of size / n."""
    if ranks == 1:
        return 0.0
    messages = 2 * (ranks - 1)
    return messages * (network.latency + 8 * size / ranks / network.bandwidth)


def bucket_sizes(gradients: float, bucket_mib: float = BUCKET_MIB) -> list[float]:
    """Bytes of DDP's buckets in the order in which the backward pass fills them."""
    first = min(gradients, FIRST_BUCKET_MIB * 2**20)
    whole, rest = divmod(gradients - first, bucket_mib * 2**20)
    return [first, *[bucket_mib * 2**20] * int(whole), *([rest] if rest else [])]


def step(
    model: Model,
    compute: float,
    ranks: int,
    network: Network,
    bucket_mib: float = BUCKET_MIB,
    overlap: bool = True,
) -> Step:
    """One DDP step whose forward, backward and update take `compute` seconds on a rank alone.

    Assumes: forward is a third of the compute and backward two thirds, gradients appear evenly
    over the backward pass, buckets are reduced one after the other, compute is not slowed by
    communication, and all ranks are equally fast. Without `overlap`, all waits for the backward.
    """
    begin_backward = compute / 3
    free = begin_backward  # when the network has sent what it was given
    filled = 0.0
    communication = 0.0
    for size in bucket_sizes(model.gradients, bucket_mib):
        filled += size
        ready = begin_backward + compute * 2 / 3 * filled / model.gradients
        reduce = ring_all_reduce(size, ranks, network)
        free = max(free, ready if overlap else compute) + reduce
        communication += reduce
    return Step(compute, communication, max(0.0, free - compute) if ranks > 1 else 0.0)


def checkpoint_bytes(parameters: float, copies: int) -> float:
    """FP32 weights and `copies` - 1 more values for each: Adam has 2, SGD's momentum 1, EMA 1."""
    return 4 * parameters * copies


def mean_time_between_failures(node_hours: float, nodes: int) -> float:
    """Hours between failures of any of `nodes` that fail independently, each in `node_hours`."""
    return node_hours / nodes


def checkpoint_interval(write: float, between_failures: float) -> float:
    """Young's first-order optimum in seconds: sqrt(2 write MTBF); good while write << MTBF."""
    return math.sqrt(2 * write * between_failures)


def lost_fraction(interval: float, write: float, restart: float, between_failures: float) -> float:
    """Part of the time that checkpoints and failures take, to first order (Daly's equation 7).

    A checkpoint each interval; for each failure half an interval, and the restart.
    """
    return write / interval + (interval / 2 + restart) / between_failures
