"""Looks at image files before the first step, so that a broken one does not end an epoch."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain

from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

from amptrain.data.decode import READ_ERRORS, Reading, broken_text, retried, to_rgb
from amptrain.data.files import FileList
from amptrain.threads import in_background

DECODE_BYTES = 256 * 2**20
"""Up to so much, images are decoded whole, in seconds. Of more, only each head is read: it tells
what is no image, and an image that is cut off is met when it is read."""


def find_broken(parts: Sequence[FileList], cpus: int) -> list[str]:
    """A sentence for each file that cannot be read, in order; with a bar on a terminal. Pillow
    decodes without Python's lock, so threads use all `cpus`."""
    whole = sum(int(files.sizes.sum()) for files in parts) <= DECODE_BYTES

    def look(path: str) -> str | None:
        def read() -> None:
            with Image.open(path) as file:
                if whole:
                    to_rgb(file, Reading())

        try:
            retried(read)
        except READ_ERRORS as error:
            return broken_text(path, error)
        return None

    with counter("Looking at the images", sum(map(len, parts))) as tell:

        def look_at_every_nth(first: int) -> list[tuple[int, int, str]]:
            found = []
            for part, files in enumerate(parts):
                for index in range(first, len(files), cpus):
                    text = look(files.path(index))
                    tell(1)
                    if text is not None:
                        found.append((part, index, text))
            return found

        threads = [in_background(partial(look_at_every_nth, first)) for first in range(cpus)]
        found = sorted(chain.from_iterable(thread.result() for thread in threads))
    return [text for _, _, text in found]


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
