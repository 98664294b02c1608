"""SIGTERM, SIGHUP and Ctrl-C ask for a stop; the loop sees it at its next batch and writes a
checkpoint. A batch that does not come, as from a network disk that is gone, is not waited for."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""A scheduler's or Docker's, Ctrl-C, and that of a terminal or ssh session which closes; torchrun
sends the last one on to its workers, also under nohup (pytorch/pytorch#67538)."""


REPEAT_S = 5.0
"""Seconds in which another SIGTERM or SIGHUP is the same request. Slurm signals every process of a
job and torchrun passes the signal on to its ranks; a terminal that closes sends SIGHUP, and so does
its shell. Ctrl-C is sent by a person: a second one counts at once."""
PATIENCE_S = 2.0
"""Seconds for which data are still waited for once a stop was asked for. Docker kills after 10."""


class WaitEnded(BaseException):
    """A stop was asked for, and what is waited for did not come. Not an Exception, as a data set in
    whose `__getitem__` it is raised may catch those."""


class StopSignal:
    """While entered, the signals only set `number`. A second request ends the process at once,
    without a save. SIGHUP stays ignored where it is, as nohup does it."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._asked = 0.0
        self._waits = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is not threading.main_thread():
            return self  # Python delivers signals to the main thread alone, whoever calls from here
        for number in STOP_SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        self._set_alarm(0)
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """While entered, a request is heeded within PATIENCE_S seconds, by WaitEnded. Where nothing
        but waiting is done: it may be raised at any place."""
        self._waits = True
        if self.number is not None:
            self._set_alarm(PATIENCE_S)
        try:
            yield
        finally:
            self._waits = False
            if self.number is not None:
                self._set_alarm(0)

    def _set_alarm(self, seconds: float) -> None:
        if signal.SIGALRM in self._before:
            signal.setitimer(signal.ITIMER_REAL, seconds)

    def _alarm(self, number: int, frame: FrameType | None) -> None:
        if self._waits:
            raise WaitEnded

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # No more is done here: a collective or a write in a handler can meet itself half-way.
        now = time.monotonic()
        if self.number is None:
            self.number, self._asked = number, now
            self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._alarm)
            if self._waits:
                self._set_alarm(PATIENCE_S)
        elif number == signal.SIGINT or now - self._asked > REPEAT_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def ignore_stop_signals(worker: int = 0) -> None:
    """For loader workers: torchrun and a terminal signal the whole process group, and a worker that
    dies of it would take the training process with it before its checkpoint is written."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
