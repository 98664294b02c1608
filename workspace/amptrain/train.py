"""The training loop: reads top to bottom as what happens in a run."""

import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import torch

from amptrain.checkpoint.lock import alone_in
from amptrain.checkpoint.state import TrainState
from amptrain.checkpoint.store import CheckpointError, CheckpointStore
from amptrain.config import TrainConfig, save_yaml
from amptrain.data import contents
from amptrain.data.datasets import open_dataset
from amptrain.data.feed import Feed
from amptrain.data.mixing import is_mixed
from amptrain.data.order import Order
from amptrain.distributed import Processes
from amptrain.errors import ConfigError, TrainingError
from amptrain.inference.model_file import BEST, LAST, write_model
from amptrain.inference.saved import saved_info
from amptrain.loss import make_loss
from amptrain.memory import is_out_of_memory, out_of_memory
from amptrain.optim import with_learning_rates
from amptrain.pretrained import as_trained, find_weights, size_advice
from amptrain.report.diagnose import diagnose
from amptrain.report.introduction import introduction
from amptrain.report.log import EpochRecord, RunLog
from amptrain.report.monitor import watch
from amptrain.report.result import RESULT, early_stop_text, finish, finished
from amptrain.report.terminal import logger, terminal
from amptrain.report.window import WindowMeter
from amptrain.schedule import ema_decay, make_schedule
from amptrain.signals import StopSignal
from amptrain.step import MicroBatch, PendingOutcome, StepOutcome, backward, update
from amptrain.validate import validate


def train(config: TrainConfig) -> int:
    """Run to the end, or continue a run. Returns the exit code: 0, or 128 and the signal that asked
    to stop.

    Raises ConfigError, CheckpointError and TrainingError, whose texts are for the user.
    """
    if config.run.deterministic:
        os.environ.setdefault(
            "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
        )  # cuBLAS reads it when CUDA starts
    with StopSignal() as stop:
        processes = Processes(config.run.device)
        with alone_in(config.run_dir, processes.is_main):
            if is_finished(config, processes):
                processes.close()
                return 0
            try:
                trainer = Trainer(config, processes, stop)
                with closing(trainer.log), closing(trainer.feed), trainer.monitor:
                    done = trainer.fit()
            except (TrainingError, ConfigError):
                raise
            except (RuntimeError, MemoryError) as error:
                if is_out_of_memory(error):
                    raise out_of_memory(error, config, processes.world_size) from error
                if processes.peer_lost(error):
                    raise processes.lost(error) from error
                if "DataLoader" in str(
                    error
                ):  # raised wherever the loop is, by torch's handler of SIGCHLD
                    raise TrainingError(
                        f"A loader worker died or hangs ({error}). If memory ran out, lower "
                        "--num-workers or --prefetch-factor."
                    ) from error
                raise
        processes.close()
        return 0 if done else 128 + (stop.number or signal.SIGTERM)


def is_finished(config: TrainConfig, processes: Processes) -> bool:
    """Whether the run has nothing left to train, which is then said. Rank 0 looks for all.

    Raises ConfigError if it was trained with other settings.
    """
    answer: list[str] | ConfigError = []
    if processes.is_main:
        try:
            answer = finished(config, processes.device)
        except ConfigError as error:
            answer = error
    answer = processes.broadcast_object(answer)
    if isinstance(answer, ConfigError):
        raise answer
    if processes.is_main:
        terminal()
        for text in answer:
            logger.info("%s", text)
    return bool(answer)


class Trainer:
    """One process of a run: built from its settings, continued from its newest checkpoint, trained
    by `fit()`."""

    def __init__(self, config: TrainConfig, processes: Processes, stop: StopSignal) -> None:
        """Raises ConfigError for settings that cannot be, CheckpointError where no checkpoint can
        be read."""
        self.config = config = with_learning_rates(config)
        self.processes, self.stop = processes, stop
        torch.backends.cudnn.benchmark = not config.run.deterministic
        torch.use_deterministic_algorithms(config.run.deterministic)
        optim = config.optim
        self.task = open_dataset(config.data, config.run.seed)
        weights = config.model.weights
        start = None if weights is None else find_weights(weights, config.model_name)
        if start is not None:
            self.task = as_trained(self.task, start)
        self.order = Order(
            len(self.task.train),
            optim.global_batch_size,
            seed=config.run.seed,
            accumulate=optim.grad_accum_steps,
            world_size=processes.world_size,
            pairs=is_mixed(config.data),
        )
        self.total_steps = optim.epochs * self.order.steps_per_epoch
        if optim.max_steps is not None:
            self.total_steps = min(self.total_steps, optim.max_steps)
        self.schedule = make_schedule(
            optim, steps_per_epoch=self.order.steps_per_epoch, total=self.total_steps
        )
        self.loss = make_loss(optim, self.task, processes.device)
        self.state = TrainState(config, self.task, self.order.steps_per_epoch, processes)
        self.store = CheckpointStore(config.run_dir / "checkpoints", config.run.keep_checkpoints)
        self.is_known_data = False
        messages = self._continue()
        if start is not None and not messages:
            messages = [self.state.start_from(start, self.task.classes)]
            messages += size_advice(self.task, start)
        self.feed = Feed(config, self.task, self.order, processes, self.state.memory_format)
        if config.model.compile:
            self.state.model.compile()  # in place, so that names in checkpoints stay the same
        self.parallel = processes.wrap(self.state.model, config.model.find_unused_parameters)
        if (
            processes.device.type == "cpu"
            and self.order.micro_batch * math.prod(self.task.shape) < 2**14
        ):
            torch.set_num_threads(
                1
            )  # for so little work waking threads takes longer: digits are 4 times slower with 2
        if processes.is_main:
            (config.run_dir / RESULT).unlink(missing_ok=True)  # of fewer epochs than these
            save_yaml(config, config.run_dir / "config.yaml")
            contents.write(config.run_dir, self.task.contents)
        self.log = RunLog(
            config.run_dir, self.total_steps, processes.is_main, start_step=self.state.progress.step
        )
        for text in [
            *introduction(config, self.task, self.order, self.state, self.feed.workers),
            *self.task.messages,
            *messages,
        ]:
            self.log.message(text)
        self.monitor = watch(
            config, self.state.precision, self.feed.workers, processes, self.log.message
        )
        self.window = WindowMeter(processes)
        self.saved_step = self.state.progress.step
        self.pending: PendingOutcome | None = None
        self.lr = 0.0
        self.advised = False

    def fit(self) -> bool:
        """Train to the last step. False if a signal asked to stop before; a checkpoint is then
        written."""
        progress, run = self.state.progress, self.config.run
        if not self.is_known_data:
            self.feed.look(self.log)
        self.feed.open(progress.step, self.total_steps, self.log)
        self.batches = iter(self.feed.training)
        self.started = time.perf_counter()
        self.window.restart()
        if self._validation_due() and not self._end_epoch():
            return self._stopped()
        for step in range(progress.step, self.total_steps):
            if self.state.is_stopped_early:
                self.log.message(early_stop_text(self.config, progress, self.order))
                break
            if self.processes.any(self.stop.number is not None):
                return self._stopped()
            self._train_step(step)
            if progress.step % run.log_every == 0 or self._validation_due():
                self._close_window()
            if self._validation_due():
                if not self._end_epoch():
                    return self._stopped()
            elif run.save_every is not None and progress.step % run.save_every == 0:
                self._settle()
                if progress.consecutive_skips == 0:  # else it may push out the last good one
                    self.save()
        broken = self.feed.count_broken()
        self._write_model(LAST)
        if self.processes.is_main:
            finish(self.config, self.order, self.state, broken, self.log)
        if self.saved_step < progress.step:
            raise CheckpointError(
                "Trained to the end, but the last checkpoint of this run is of step "
                f"{self.saved_step}: the ones after "
                "could not be written, see above. Mend that, and run the same command again."
            )
        return True

    def _train_step(self, step: int) -> None:
        """One step in two halves. Between them the outcome of the step before is read: whether that
        one was skipped decides this one's place in the learning rate's schedule, and the device has
        the first half to do while the host waits."""
        state, optim = self.state, self.config.optim
        self.parallel.train()
        for norm in state.frozen:
            norm.eval()
        gradients = backward(
            self.parallel,
            state.optimizer,
            state.precision,
            self._micro_batches(step),
            loss_fn=self.loss,
            guard=state.guard,
        )
        self._settle()
        self.lr = self.schedule.rate(state.progress.optimizer_steps)
        self.pending = update(
            state.optimizer,
            state.precision,
            gradients,
            guard=state.guard,
            learning_rate=self.lr,
            max_grad_norm=optim.max_grad_norm,
        )
        if state.ema is not None and optim.ema_decay is not None:
            decay = ema_decay(state.progress.optimizer_steps, decay=optim.ema_decay)
            state.ema.update(state.model, decay, self.pending.found_inf)
        self.judged_images = self.last_images  # kept a step longer, for a diagnosis
        state.progress.step = step + 1

    def _micro_batches(self, step: int) -> Iterator[MicroBatch]:
        """Those of the next step, which is `step`, as they come."""
        last = False
        while not last:
            before = self.feed.training.waited
            batch = next(self.batches)
            self.window.waited += self.feed.training.waited - before
            self.last_images, last = batch.inputs, batch.last
            yield batch

    def _settle(self) -> None:
        """Read the outcome of the last step, if that is not done yet, and count it.

        The one place in the loop where the host waits for the device. Before a log line or a save
        it is a real wait. Raises TrainingError if too much was skipped.
        """
        if self.pending is None:
            return
        outcome, self.pending = self.pending.read(), None
        progress = self.state.progress
        self.window.add(progress.step, self.order.size(progress.step - 1), outcome)
        if not outcome.skipped:
            progress.optimizer_steps += 1
            progress.consecutive_skips = 0
            return
        progress.consecutive_skips += 1
        progress.epoch_skips += 1
        self.log.message(
            f"Step {progress.step} skipped: the gradient of {outcome.nonfinite_parameter} is not "
            "finite; "
            f"loss scale {outcome.scale_before:g} → {outcome.scale_after:g}."
        )
        self._stop_on_collapse(outcome)

    def _stop_on_collapse(self, outcome: StepOutcome) -> None:
        """Torch's scaler never stops: after some 160 skips its scale is 0, and the next step makes
        weights NaN."""
        limits, progress, precision = (
            self.config.precision,
            self.state.progress,
            self.state.precision,
        )
        if precision.has_scaler and outcome.scale_after < limits.min_scale:
            why = (
                f"the loss scale fell to {outcome.scale_after:g}, "
                f"below --min-scale {limits.min_scale:g}"
            )
        elif progress.consecutive_skips >= limits.max_consecutive_skips:
            skips = progress.consecutive_skips
            why = f"{skips} steps in a row were skipped (--max-consecutive-skips)"
        else:
            return
        # The next step, within which this may be, has already run its forward pass.
        self.state.guard.undo()
        cause = diagnose(
            self.state.model, precision, self.judged_images, outcome.nonfinite_parameter
        )
        raise TrainingError(f"Stopped at step {progress.step}: {why}. {cause}")

    def _close_window(self) -> None:
        self._settle()
        steps = self.window.steps
        if steps == 0:
            return
        record = self.monitor.window(
            self.window.close(self.state.progress.step, self._epoch, self.lr)
        )
        self.log.window(record)
        frequent = record.skips >= 3 and record.skips * 10 >= steps
        if frequent and self.state.precision.has_scaler and not self.advised:
            self.advised = True
            self.log.message(
                f"{record.skips} of {steps} steps were skipped. If the next run starts so too, "
                "give it a lower loss "
                "scale: --init-scale 16384 (2**14) or 4096 (2**12)."
            )

    @property
    def _epoch(self) -> int:
        """The epoch of the last step, from 1."""
        return math.ceil(self.state.progress.step / self.order.steps_per_epoch)

    def _validation_due(self) -> bool:
        step = self.state.progress.step
        at_end = step % self.order.steps_per_epoch == 0 or step == self.total_steps
        return at_end and step > self.state.progress.validated_step

    def _end_epoch(self) -> bool:
        """Validate and save. False if asked to stop meanwhile; the run that continues this one then
        validates."""
        self._settle()
        state, progress = self.state, self.state.progress
        state.share_buffers()
        with self.monitor.paused(), self._saved_if_broken():
            result = validate(
                state.judged,
                state.precision,
                self.feed.validation,
                max_batches=self.feed.validation_batches.max_batches,
                processes=self.processes,
                stop_asked=lambda: self.stop.number is not None,
            )
        if result is None:
            return False
        progress.validated_step = progress.step
        loss, progress.accuracy = result
        progress.loss = loss
        if not math.isfinite(loss):  # and nothing is saved of it
            raise TrainingError(
                f"Stopped at step {progress.step}: the validation loss is {loss}, so a weight or "
                "an activation is not "
                "finite. The checkpoints are from before. Continue from them with "
                f"--name {self.config.run_dir.name} and a lower --lr, --max-grad-norm 1 or another "
                "--precision."
            )
        self.log.epoch(
            EpochRecord(
                epoch=self._epoch,
                step=progress.step,
                val_loss=loss,
                val_accuracy=progress.accuracy,
                skips=progress.epoch_skips,
                seconds=self._seconds(),
            )
        )
        progress.epoch_skips = 0
        best = progress.accuracy > progress.best_accuracy
        if best:
            progress.best_accuracy, progress.best_step = progress.accuracy, progress.step
            self._write_model(BEST)  # first: killed in between, the epoch is made again, and this
        if self.save() and best and self.processes.is_main:
            self.store.mark_best(progress.step)
        self.window.restart()
        return True

    @contextmanager
    def _saved_if_broken(self) -> Iterator[None]:
        """An image that can't be read ends a validation; the epoch before it is not lost. Alone,
        since other ranks are in the middle of theirs."""
        try:
            yield
        except TrainingError:
            if self.processes.world_size == 1:
                self.save()
            raise

    def _write_model(self, name: str) -> None:
        """The judged weights as a file one can use. A failure is said, and ends no run."""
        if not self.processes.is_main:
            return
        try:
            info = saved_info(self.config, self.task, self.state, self._epoch)
            write_model(self.config.run_dir / name, self.state.judged, info)
        except TrainingError as error:
            self.log.message(str(error))

    def _stopped(self) -> bool:
        self._close_window()
        if not self.save():
            raise TrainingError(
                "Stopped as asked, but this step's checkpoint could not be written. The one before "
                "is there."
            )
        self.log.message(
            f"Stopped as asked at step {self.state.progress.step}. The same command continues from "
            "there."
        )
        return False

    def save(self) -> bool:
        """Write a checkpoint. False if that failed, which is said; the run can go on. All processes
        call this."""
        began = time.perf_counter()
        self._settle()
        self._seconds()
        saved, state = True, self.state.state_dict()
        if self.processes.is_main:
            try:
                with self.monitor.paused():
                    self.store.save(state, self.state.progress.step)
            except CheckpointError as error:
                saved = False
                self.log.message(str(error))
        self.window.started += time.perf_counter() - began
        saved = not self.processes.any(not saved)
        if saved:
            self.saved_step = self.state.progress.step
        return saved

    def _seconds(self) -> float:
        """Seconds of training since the run began, in all its parts."""
        now = time.perf_counter()
        self.state.progress.seconds += now - self.started
        self.started = now
        return self.state.progress.seconds

    def _continue(self) -> list[str]:
        """Load the newest checkpoint, which rank 0 reads for all. Returns sentences about it."""
        loaded = self.store.load_latest() if self.processes.is_main else None
        found = None
        if loaded is not None:  # rank 0 alone reads, as it soon writes the same files
            began_with = contents.read(self.config.run_dir)
            found = (loaded.state, loaded.messages, str(loaded.path), began_with)
        found = self.processes.broadcast_object(found)
        if found is None:
            return []
        state, messages, path, began_with = found
        self.is_known_data = began_with is not None and began_with == self.task.contents
        messages = [*messages, *contents.check(began_with, self.task.contents)]
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
        step = self.state.progress.step
        if self.processes.is_main and step == self.state.progress.best_step:
            self.store.mark_best(step)  # killed between the two
        return [f"Continuing at step {step} of {self.total_steps}, from {path}.", *messages]
