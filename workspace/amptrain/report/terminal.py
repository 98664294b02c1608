"""The terminal: what the logger `amptrain` says to a person, and below it how far the run is."""

import logging
import os
import sys

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from amptrain.files import discard

logger = logging.getLogger("amptrain")


class Terminal(logging.Handler):
    """Writes each sentence as it is to standard output, above the bar if there is one.

    Once standard output can't be written to (`| head`, a terminal that closed, a full disk) it is
    silent: the run goes on without.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bar: Progress | None = None
        self.mute = False

    def emit(self, record: logging.LogRecord) -> None:
        if self.mute or sys.stdout is None:
            return
        try:
            if self.bar is not None:
                text = record.getMessage()
                self.bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
            else:
                print(record.getMessage(), flush=True)
        except OSError:
            self.mute = True
            discard(sys.stdout)
            self.stop_bar()

    def start_bar(self, name: str, *, completed: int, total: int) -> None:
        """Show a bar, where standard output is a terminal."""
        if sys.stdout is None or not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
            return
        console = Console(file=sys.stdout)
        # What the numbers and words leave; rich would cut the numbers, too, and not the name first.
        room = max(20, console.width - 2 * len(str(total)) - 41)
        if len(name) > room - 8:  # runs of a sweep differ at the end of their names
            name = f"…{name[9 - room :]}"
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(min(40, room - len(name))),
            MofNCompleteColumn(),
            TextColumn("steps, elapsed"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            refresh_per_second=4,
        )
        self.bar.add_task(name, total=total, completed=completed)
        self.bar.start()

    def advance(self, completed: int) -> None:
        """`completed` steps are done."""
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=completed)

    def stop_bar(self) -> None:
        """The bar stays as it is; what follows stands below it."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


def terminal() -> Terminal:
    """The terminal of the logger `amptrain`, which gets one at the first call.

    A program of one's own adds handlers to that logger, as to any other.
    """
    for handler in logger.handlers:
        if isinstance(handler, Terminal):
            return handler
    handler = Terminal()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return handler
