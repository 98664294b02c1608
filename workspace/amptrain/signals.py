"""SIGTERM and Ctrl-C ask for a stop; the loop sees it at its next batch and writes a checkpoint."""

import os
import signal
from types import FrameType


class StopSignal:
    """While entered, SIGTERM and SIGINT only set `number`. A second one ends the process at once,
    without a save."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopSignal":
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Nothing else is done here: a collective or a write in a handler can meet itself half-way.
        if self.number is not None:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.number = number


def ignore_stop_signals(worker: int = 0) -> None:
    """For loader workers: torchrun and a terminal signal the whole process group, and a worker that
    dies of it would take the training process with it before its checkpoint is written. They end
    with their parent."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
