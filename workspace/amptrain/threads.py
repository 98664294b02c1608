"""Work beside the main thread."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def in_background(function: Callable[[], T]) -> Future[T]:
    """Call `function` in a thread of its own.

    It does not keep the process from ending, as a thread of concurrent.futures does: a read from a
    network disk may hang for ever. Nor does it need a /dev/shm, as multiprocessing's ThreadPool
    does (python/cpython#134634).
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future
