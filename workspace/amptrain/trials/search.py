"""The largest batch that fits, by doubling and bisection."""

from collections.abc import Callable

SMALLEST = 2
"""BatchNorm has no variance of one image."""
RESOLUTION = 32
"""The answer is at most one part in this below the true one; fewer trials, each a process."""


def largest_fitting(fits: Callable[[int], bool], *, start: int, cap: int) -> int:
    """The largest size up to `cap` that fits, as `fits` says; 0 where not even two do.

    Doubles from `start`, or halves where `start` does not fit, and bisects between the last that
    fits and the first that does not.
    """
    size = min(start, cap)
    if not fits(size):
        while size > SMALLEST:
            high, size = size, max(SMALLEST, size // 2)
            if fits(size):
                return _bisect(fits, size, high)
        return 0
    while size < cap:
        low, size = size, min(2 * size, cap)
        if not fits(size):
            return _bisect(fits, low, size)
    return size


def _bisect(fits: Callable[[int], bool], low: int, high: int) -> int:
    while high - low > max(1, low // RESOLUTION):
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def fewest_micro_batches(batch_size: int, largest: int) -> int | None:
    """Into how many equal micro-batches a step has to be split, so that none is larger than
    `largest` or smaller than two; None where it cannot be."""
    for count in range(1, batch_size // SMALLEST + 1):
        if batch_size % count == 0 and batch_size // count <= largest:
            return count
    return None
