"""The place where the nodes of one elastic run meet, as a program of its own.

    python -m amptrain.rendezvous JOB

torchrun's c10d rendezvous lives in the torchrun of one node, unless something else listens at the
endpoint already: with this on a machine that stays, any node may die. It listens on port 29400,
torchrun's default, and ends when the run with `--rdzv-id=JOB` has ended.
"""

import pickle
import signal
import sys
import time
from collections.abc import Sequence

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in its __all__
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import (
    DEFAULT_PORT,
    C10dRendezvousBackend,
)

GRACE_S = 10.0
"""Between the end of the run and that of its store: the other nodes still have to read of it."""


def serve(job: str, port: int = DEFAULT_PORT, grace_s: float = GRACE_S) -> None:
    """Hold the store until torchrun closes the rendezvous of `job`, which it does when its ranks
    have ended well or have no restarts left. Raises OSError if `port` is taken."""
    try:
        store = TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
    except RuntimeError as error:  # torch.distributed.DistNetworkError
        raise OSError(f"port {port} can't be listened on: {str(error).splitlines()[0]}") from error
    print(f"Nodes of {job} meet at port {port}.", flush=True)
    backend = C10dRendezvousBackend(store, job)
    while not is_closed(backend):
        time.sleep(1)
    time.sleep(grace_s)
    print(f"The run {job} has ended.", flush=True)


def is_closed(backend: C10dRendezvousBackend) -> bool:
    """Whether torchrun says that no node may join any more."""
    found = backend.get_state()
    return found is not None and bool(pickle.loads(found[0]).closed)


def main(arguments: Sequence[str]) -> int:
    """Command line of this module."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print((__doc__ or "").strip())
        return 0 if arguments[:1] == ["--help"] else 2
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        serve(arguments[0])
    except OSError as error:
        print(f"amptrain.rendezvous: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
