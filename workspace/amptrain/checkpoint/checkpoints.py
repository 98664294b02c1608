"""The checkpoints of a run as all its processes see them: rank 0 reads and writes, for all."""

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
        """The step of the newest one."""

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
        if progress.step == progress.best_step:
            self.mark_best()  # killed between the two
        return [f"Continuing at step {progress.step} of {total_steps}, from {path}.", *messages]

    def save(self) -> str | None:
        """Write one. Returns the sentence why that failed, and None if it did not."""
        problem: str | None = None
        state, step = self.state.state_dict(), self.state.progress.step
        if self.processes.is_main:
            try:
                self.store.save(state, step)
            except CheckpointError as error:
                problem = str(error)
        told: str | None = self.processes.broadcast_object(problem)
        if told is None:
            self.saved_step = step
        return told

    def mark_best(self) -> None:
        """Keep the newest one as the best."""
        if self.processes.is_main:
            self.store.mark_best(self.saved_step)
