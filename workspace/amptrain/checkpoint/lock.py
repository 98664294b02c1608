"""One run at a time in a run directory."""

import errno
import fcntl
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from amptrain.errors import ConfigError

logger = logging.getLogger("amptrain")


@contextmanager
def alone_in(run_dir: Path, is_main: bool) -> Iterator[None]:
    """Hold the run directory; two runs in one would write over each other's checkpoints.
    ConfigError if it is held."""
    if not is_main:
        yield
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / ".lock"
    with path.open("w") as file:
        try:
            # Unlike flock, loader workers do not inherit it.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"Another process is training in {run_dir}. "
                "Wait for it, stop it, or use another --name."
            ) from None
        except OSError as error:
            # Some network disks have no locks (SModelS/smodels#37, spack/spack#12501).
            if error.errno not in {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}:
                error.filename = str(path)
                raise
            logger.warning(
                "%s is on a file system without locks (%s): see to it yourself that no second run "
                "writes there.",
                run_dir,
                error.strerror,
            )
        try:
            yield
        except ConfigError:
            # Refused before it began: nothing is left of it.
            if [path.name for path in run_dir.iterdir()] == [".lock"]:
                (run_dir / ".lock").unlink()
                run_dir.rmdir()
            raise
