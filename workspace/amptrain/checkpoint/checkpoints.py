"""The checkpoints of a run as all its processes see them: rank 0 reads and writes, for all."""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from amptrain.checkpoint.state import TrainState
from amptrain.checkpoint.store import CheckpointError, CheckpointStore
from amptrain.config import TrainConfig
from amptrain.data import contents
from amptrain.errors import ConfigError


class Checkpoints:
    """Those of one run. All processes call the same methods."""

    def __init__(self, config: TrainConfig, state: TrainState) -> None:
        self.run_dir, self.state, self.processes = config.run_dir, state, state.processes
        self.store = CheckpointStore(config.run_dir / "checkpoints", config.run.keep_checkpoints)
        self.is_known_data = False
        """Whether the run has begun with the data of now, whose files were then looked at."""
        self.saved_step = 0
        """The step of the newest one that is on the disk."""
        self.has_written = False
        """Whether one of this process is there."""
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._later: tuple[int, Future[str | None] | None] | None = None
        """What `save_later` began: the step, and on rank 0 what becomes of it."""

    def load(self, total_steps: int, data: dict[str, Any] | None) -> list[str]:
        """Continue from the newest. `data` is what changes when the data does. Returns sentences
        about it, none where there is no checkpoint.

        Raises CheckpointError where none can be used, ConfigError for settings that do not fit it.
        """
        loaded = self.store.load_latest() if self.processes.is_main else None
        found = None
        if loaded is not None:  # rank 0 alone reads, as it soon writes the same files
            began_with = contents.read(self.run_dir)
            told = self.state.told_to_others(loaded.state)
            found = (told, loaded.messages, str(loaded.path), began_with)
        found = self.processes.broadcast_object(found)
        if found is None:
            return []
        state, messages, path, began_with = found
        if loaded is not None:
            state = loaded.state
        self.is_known_data = began_with is not None and began_with == data
        messages = [*messages, *contents.check(began_with, data)]
        try:
            messages = [*messages, *self.state.load_state_dict(state)]
        except ConfigError:
            raise
        except (RuntimeError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"The checkpoint {path} does not fit this model and these settings: "
                f"{str(error).splitlines()[0].strip()}. Was the model's code changed? Undo that, "
                "or give another --name for a new run."
            ) from error
        progress = self.state.progress
        self.saved_step = progress.step
        if progress.step == progress.best_step and self.processes.is_main:
            self.store.mark_best(progress.step)  # killed between the two
        return [f"Continuing at step {progress.step} of {total_steps}, from {path}.", *messages]

    def save(self, *, is_best: bool = False) -> str | None:
        """Write one, and keep it as the best. Returns the sentence why that failed, and None if it
        did not."""
        state, step = self.state.state_dict(), self.state.progress.step
        problem = self._write(state, step, is_best) if self.processes.is_main else None
        return self._agreed(problem, step)

    def save_later(self, *, is_best: bool = False) -> None:
        """Copy the state, and begin to write it while the next steps are made. What became of it
        `finish` tells, which is called before another is written."""
        assert self._later is None
        state, step = self.state.state_dict(copy=True), self.state.progress.step
        writing = None
        if self.processes.is_main:
            writing = self._thread.submit(self._write, state, step, is_best)
        self._later = (step, writing)

    def finish(self, *, wait: bool) -> str | None:
        """Hear what became of the one that is written meanwhile, if it is done or with `wait`.
        Returns the sentence why it failed."""
        if self._later is None:
            return None
        step, writing = self._later
        if not (wait or self.processes.broadcast_object(writing is not None and writing.done())):
            return None
        self._later = None
        return self._agreed(None if writing is None else writing.result(), step)

    @property
    def continues_at(self) -> str:
        """Where the next run begins if this process ends now."""
        meanwhile = "" if self._later is None else f", or {self._later[0]}, which is being written"
        return f"step {self.saved_step}{meanwhile}"

    def close(self) -> str | None:
        """End the writing, in this process alone: the run may have ended by an error, and others
        not be there any more. Returns as `finish`."""
        self._thread.shutdown()
        if self._later is None or self._later[1] is None:
            return None
        return self._counted(self._later[1].result(), self._later[0])

    def _write(self, state: dict[str, object], step: int, is_best: bool) -> str | None:
        try:
            self.store.save(state, step)
        except CheckpointError as error:
            return str(error)
        if is_best:
            self.store.mark_best(step)
        return None

    def _agreed(self, problem: str | None, step: int) -> str | None:
        """Rank 0's `problem`, counted by all."""
        return self._counted(self.processes.broadcast_object(problem), step)

    def _counted(self, problem: str | None, step: int) -> str | None:
        """Without a `problem` the checkpoint of `step` is there."""
        if problem is None:
            self.saved_step, self.has_written = step, True
        return problem
