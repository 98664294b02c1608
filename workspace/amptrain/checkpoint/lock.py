"""One run at a time in a run directory."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from amptrain.errors import ConfigError


@contextmanager
def alone_in(run_dir: Path, is_main: bool) -> Iterator[None]:
    """Hold the run directory; two runs in one would write over each other's checkpoints.
    ConfigError if it is held."""
    if not is_main:
        yield
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / ".lock").open("w") as file:
        try:
            fcntl.lockf(
                file, fcntl.LOCK_EX | fcntl.LOCK_NB
            )  # unlike flock, loader workers do not inherit it
        except BlockingIOError:
            raise ConfigError(
                f"Another process is training in {run_dir}. Wait for it, stop it, or use another --name."
            ) from None
        try:
            yield
        except ConfigError:
            if [path.name for path in run_dir.iterdir()] == [
                ".lock"
            ]:  # refused before it began: nothing is left of it
                (run_dir / ".lock").unlink()
                run_dir.rmdir()
            raise
