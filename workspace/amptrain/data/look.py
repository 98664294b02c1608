"""Looks at image files before the first step, so that a broken one does not end an epoch."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.pool import ThreadPool

from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

from amptrain.data.decode import READ_ERRORS, Reading, broken_text, retried, to_rgb
from amptrain.data.files import FileList

DECODE_BYTES = 256 * 2**20
"""Up to so much, images are decoded whole, in seconds. Of more, only each head is read: it tells
what is no image, and an image that is cut off is met when it is read."""


def find_broken(parts: Sequence[FileList], cpus: int) -> list[str]:
    """A sentence for each file that cannot be read, in order; with a bar on a terminal. Pillow
    decodes without Python's lock, so threads use all `cpus`."""
    whole = sum(int(files.sizes.sum()) for files in parts) <= DECODE_BYTES
    paths = [(files, index) for files in parts for index in range(len(files))]

    def look(place: tuple[FileList, int]) -> str | None:
        path = place[0].path(place[1])

        def read() -> None:
            with Image.open(path) as file:
                if whole:
                    to_rgb(file, Reading())

        try:
            retried(read)
        except READ_ERRORS as error:
            return broken_text(path, error)
        return None

    # Of threads that hang in a read, these do not keep the process from ending.
    with counter("Looking at the images", len(paths)) as tell, ThreadPool(cpus) as pool:
        found = []
        for text in pool.imap(look, paths):
            tell(1)
            if text is not None:
                found.append(text)
    return found


@contextmanager
def counter(text: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """A bar on the terminal, if there is one, that counts images; gives what to tell it by."""
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        *([BarColumn()] if total else []),
        MofNCompleteColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with bar:
        task = bar.add_task(text, total=total)
        yield lambda count: bar.advance(task, count)
