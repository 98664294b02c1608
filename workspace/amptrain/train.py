"""The training loop: reads top to bottom as what happens in a run."""

import math
import os
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from amptrain.checkpoint.checkpoints import Checkpoints
from amptrain.checkpoint.lock import alone_in
from amptrain.checkpoint.resume import rng_state, set_rng_state
from amptrain.checkpoint.state import TrainState
from amptrain.config import Plain, TrainConfig, flatten, save_yaml
from amptrain.data import contents
from amptrain.data.feed import Feed
from amptrain.data.mixing import is_mixed
from amptrain.data.order import Order
from amptrain.data.shared import open_for_all
from amptrain.distributed import Processes
from amptrain.errors import CheckpointError, ConfigError, TrainingError
from amptrain.inference.model_file import BEST, LAST, write_model
from amptrain.inference.saved import saved_info
from amptrain.loss import make_loss
from amptrain.memory import is_out_of_memory, out_of_memory
from amptrain.metrics import OwnMetrics, is_better
from amptrain.optim import with_learning_rates
from amptrain.pretrained import (
    as_trained,
    begun_size,
    find_start,
    size_text,
    with_image_size,
)
from amptrain.report.diagnose import diagnose
from amptrain.report.introduction import introduction
from amptrain.report.log import EpochRecord, RunLog
from amptrain.report.monitor import watch
from amptrain.report.report import Report
from amptrain.report.result import RESULT, early_stop_text, finish, finished
from amptrain.report.terminal import logger, terminal
from amptrain.report.window import Clock, WindowMeter
from amptrain.schedule import ema_decay, make_schedule, total_steps
from amptrain.signals import StopSignal, WaitEnded
from amptrain.step import MicroBatch, PendingOutcome, StepOutcome, backward, update
from amptrain.validate import validate
from amptrain.words import counted

RATE_JUMP = 1.5
"""How many times its rate the last step has by today's schedule, where that is announced."""


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
        require_same_settings(config, processes)
        with alone_in(config.run_dir, processes.is_main):
            if is_finished(config, processes):
                processes.close()
                return 0
            try:
                trainer = Trainer(config, processes, stop)
                with closing(trainer.report.log), closing(trainer.feed), trainer.report.monitor:
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


def require_same_settings(config: TrainConfig, processes: Processes) -> None:
    """Raise ConfigError, in all processes, if one was given other settings than rank 0: they would
    wait for each other, or train different models as one."""
    own = flatten(config)
    first: dict[str, Plain] = processes.broadcast_object(own)
    names = [name for name in own if own[name] != first[name]]
    if processes.any(bool(names)):
        found = ", ".join(f"{name} {own[name]} (rank 0 has {first[name]})" for name in names)
        raise ConfigError(
            f"Rank {processes.rank} was given other settings than rank 0: {found}. Give all the "
            "same."
            if found
            else "Another rank was given other settings than this one. Give all the same."
        )


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


@dataclass
class InFlight:
    """What the last step leaves for the next one: its outcome is read within that."""

    outcome: PendingOutcome | None = None
    images: Any = None
    """The last micro-batch that the model got."""
    judged_images: Any = None
    """That of the step whose outcome is read, for a diagnosis."""
    lr: float = 0.0
    """The learning rate of the last step."""
    generators: dict[str, Any] | None = None
    """Those that a step of several micro-batches began with, until it is made."""


class Trainer:
    """One process of a run: built from its settings, continued from its newest checkpoint, trained
    by `fit()`."""

    def __init__(self, config: TrainConfig, processes: Processes, stop: StopSignal) -> None:
        """Raises ConfigError for settings that cannot be, CheckpointError where no checkpoint can
        be read."""
        start, asked_size = find_start(config), config.data.image_size
        # The run directory may be on the node of rank 0 alone.
        begun = processes.broadcast_object(begun_size(config.run_dir))
        config = with_image_size(with_learning_rates(config), start, begun)
        self.config, self.processes, self.stop = config, processes, stop
        torch.backends.cudnn.benchmark = not config.run.deterministic
        torch.use_deterministic_algorithms(config.run.deterministic)
        optim = config.optim
        self.task = open_for_all(config, processes)
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
        per_epoch = self.order.steps_per_epoch
        total = total_steps(optim, per_epoch)
        self.schedule = make_schedule(optim, steps_per_epoch=per_epoch, total=total)
        self.metrics = None if optim.metrics is None else OwnMetrics(optim.metrics)
        self.loss = make_loss(optim, self.task, processes.device)
        self.state = TrainState(config, self.task, self.order.steps_per_epoch, processes)
        self.checkpoints = Checkpoints(config, self.state)
        messages = self.checkpoints.load(self.schedule.total, self.task.contents)
        messages += self._rate_jump()
        if start is not None and not messages:
            messages = [self.state.start_from(start, self.task.classes)]
            messages += size_text(self.task, start, asked_size)
        self.feed = Feed(config, self.task, self.order, processes, self.state.memory_format, stop)
        if config.model.compile:
            self.state.model.compile()  # in place, so that names in checkpoints stay the same
        self.parallel = self.state.model
        if not self.state.is_sharded:
            self.parallel = processes.wrap(self.state.model, config.model.find_unused_parameters)
        processes.set_threads(self.order.micro_batch, self.task.shape)
        self.is_described = False
        if not any(config.run_dir.glob("*.safetensors")) and not self.checkpoints.saved_step:
            self._describe()
        self.report = self._open_report(messages)
        self.clock = Clock(self.state.progress.seconds)
        self.in_flight = InFlight()

    def _rate_jump(self) -> list[str]:
        """A sentence where other settings make the learning rate rise at once, as more epochs do:
        the schedule had fallen for the epochs there were."""
        before, steps = self.state.rate_before, self.state.progress.optimizer_steps
        if before is None or self.schedule.rate(max(0, steps - 1)) < RATE_JUMP * before:
            return []
        now = self.schedule.rate(steps)
        return [
            f"The learning rate jumps from {before:.3g} to {now:.3g}, as the schedule of these "
            "settings has it here. The accuracy may fall at first. Give another --name to train by "
            "one schedule from the start."
        ]

    def _describe(self) -> None:
        """Write what the weights in the run directory were trained with. Where there are some, the
        first ones of this process have to be there before: until then these settings and data are
        not theirs, and a kill would leave that."""
        if self.is_described or not self.processes.is_main:
            return
        self.is_described = True
        (self.config.run_dir / RESULT).unlink(missing_ok=True)  # of fewer epochs than these
        save_yaml(self.config, self.config.run_dir / "config.yaml")
        contents.write(self.config.run_dir, self.task.contents)

    def _open_report(self, messages: list[str]) -> Report:
        """The log, begun with what the run is."""
        config, processes, state = self.config, self.processes, self.state
        log = RunLog(
            config.run_dir,
            self.schedule.total,
            processes.is_main,
            start_step=state.progress.step,
            window_goes_on=state.window.steps > 0,
        )
        opening = introduction(config, self.task, self.order, state, self.feed.workers)
        for text in [*opening, *self.task.messages, *messages]:
            log.message(text)
        monitor = watch(config, state.precision, self.feed.workers, processes, log.message)
        return Report(log, monitor, WindowMeter(state))

    def fit(self) -> bool:
        """Train to the last step. False if a signal asked to stop before; a checkpoint is then
        written."""
        try:
            if not self.checkpoints.is_known_data:
                self.feed.look(self.report.log)
        except WaitEnded:
            self.report.log.message(
                "Stopped as asked, while the images were looked at. The same command does so again."
            )
            return False
        try:
            return self._fit()
        except WaitEnded:
            return self._stopped_waiting()
        finally:
            self._tell(self.checkpoints.close())

    def _fit(self) -> bool:
        progress, run = self.state.progress, self.config.run
        self.feed.open(progress.step, self.schedule.total, self.report.log)
        self.clock.start()
        self.report.meter.restart(self.state.window)
        if self._validation_due() and not self._end_epoch():
            return self._stopped()
        for step in range(progress.step, self.schedule.total):
            if self.state.is_stopped_early:
                text = early_stop_text(self.config, progress, self.order, self.task)
                self.report.log.message(text)
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
                    self.save_later()
        self._finish_save(wait=True)
        broken = self.feed.count_broken()
        self._write_model(LAST)
        self._describe()
        finish(self.config, self.task, self.order, self.state, broken, self.report.log)
        if self.checkpoints.saved_step < progress.step:
            raise CheckpointError(
                "Trained to the end, but the last checkpoint of this run is of step "
                f"{self.checkpoints.saved_step}: the ones after could not be written, see above. "
                "Mend that, and run the same command again."
            )
        return True

    def _train_step(self, step: int) -> None:
        """One step in two halves. Between them the outcome of the step before is read: whether that
        one was skipped decides this one's place in the learning rate's schedule, and the device has
        the first half to do while the host waits."""
        state, optim, in_flight = self.state, self.config.optim, self.in_flight
        self.parallel.train()
        for norm in state.frozen:
            norm.eval()
        if optim.grad_accum_steps > 1:
            in_flight.generators = rng_state(self.processes.device)
        gradients = backward(
            self.parallel,
            state.optimizer,
            state.precision,
            self._micro_batches(step),
            loss_fn=self.loss,
            guard=state.guard,
        )
        self._settle()
        in_flight.lr = self.schedule.rate(state.progress.optimizer_steps)
        in_flight.outcome = update(
            state.optimizer,
            state.precision,
            gradients,
            guard=state.guard,
            learning_rate=in_flight.lr,
            max_grad_norm=optim.max_grad_norm,
        )
        if state.ema is not None and optim.ema_decay is not None:
            decay = ema_decay(state.progress.optimizer_steps, decay=optim.ema_decay)
            state.ema.update(state.model, decay, in_flight.outcome.found_inf)
        in_flight.judged_images = in_flight.images
        in_flight.generators = None
        state.progress.step = step + 1

    def _micro_batches(self, step: int) -> Iterator[MicroBatch]:
        """Those of the next step, which is `step`, as they come."""
        before = self.feed.training.waited
        for batch in self.feed.step():
            self.in_flight.images = batch.inputs
            yield batch
        self.state.window.waited += self.feed.training.waited - before

    def _settle(self) -> None:
        """Read the outcome of the last step, if that is not done yet, and count it.

        The one place in the loop where the host waits for the device. Before a log line or a save
        it is a real wait. Raises TrainingError if too much was skipped.
        """
        if self.in_flight.outcome is None:
            return
        outcome, self.in_flight.outcome = self.in_flight.outcome.read(), None
        progress = self.state.progress
        images = self.order.size(progress.step - 1)
        self.report.meter.add(progress.step, images, self.in_flight.lr, outcome)
        if not outcome.skipped:
            progress.optimizer_steps += 1
            progress.consecutive_skips = 0
            return
        progress.consecutive_skips += 1
        progress.epoch_skips += 1
        self.report.skipped(progress.step, outcome)
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
            why = f"{counted(skips, 'step')} skipped in a row (--max-consecutive-skips)"
        else:
            return
        # The next step, within which this may be, has already run its forward pass.
        self.state.guard.undo()
        cause = diagnose(
            self.state.model, precision, self.in_flight.judged_images, outcome.nonfinite_parameter
        )
        raise TrainingError(f"Stopped at step {progress.step}: {why}. {cause}")

    def _close_window(self) -> None:
        self._settle()
        state, has_scaler = self.state, self.state.precision.has_scaler
        self.report.close_window(state.progress, self._epoch, has_scaler)
        self._finish_save(wait=False)

    @property
    def _epoch(self) -> int:
        """The epoch of the last step, from 1."""
        return self.schedule.epoch(self.state.progress.step)

    def _validation_due(self) -> bool:
        progress = self.state.progress
        return self.schedule.ends_epoch(progress.step) and progress.step > progress.validated_step

    def _end_epoch(self) -> bool:
        """Validate and save. False if asked to stop meanwhile; the run that continues this one then
        validates."""
        self._settle()
        state, progress = self.state, self.state.progress
        state.broadcast_buffers()
        with self.report.monitor.paused(), self._saved_if_broken():
            result = validate(
                state.judged,
                state.precision,
                self.feed.validation,
                max_batches=self.feed.validation_batches.max_batches,
                processes=self.processes,
                stop_asked=lambda: self.stop.number is not None,
                loss=self.config.optim.loss,
                idle=self.state.idle_images(self.task.shape),
                metrics=self.metrics,
            )
        if result is None:
            return False
        if not math.isfinite(result.loss):  # and nothing is saved of it
            raise TrainingError(
                f"Stopped at step {progress.step}: the validation loss is {result.loss}, so a "
                "weight or an activation is not finite. The checkpoints are from before. Continue "
                f"from them with --name {self.config.run_dir.name} and a lower --lr, "
                "--max-grad-norm 1 or another --precision."
            )
        with self._saved_if_broken():
            value = result.value(self.config.optim.eval_metric)
        progress.validated_step = progress.step
        progress.loss, progress.accuracy = result.loss, result.accuracy
        progress.metrics = result.metrics
        progress.seconds = self.clock.seconds
        self.report.log.epoch(
            EpochRecord(
                epoch=self._epoch,
                step=progress.step,
                val_loss=result.loss,
                val_accuracy=progress.accuracy,
                skips=progress.epoch_skips,
                seconds=progress.seconds,
                measure=self.task.measure,
                metrics=progress.metrics,
            )
        )
        progress.epoch_skips = 0
        best = is_better(self.config.optim.eval_metric, value, progress.best_value)
        if best:
            progress.best_value, progress.best_step = value, progress.step
            self._write_model(BEST)  # first: killed in between, the epoch is made again, and this
        self.save_later(is_best=best)
        self.report.meter.restart()
        return True

    @contextmanager
    def _saved_if_broken(self) -> Iterator[None]:
        """An image that can't be read, or a metric of one's own that fails, ends a validation, in
        all processes; the epoch before it is not lost."""
        try:
            yield
        except TrainingError:
            self.save()
            raise

    def _write_model(self, name: str) -> None:
        """The judged weights as a file one can use. A failure is said, and ends no run. All
        processes call this."""
        judged = self.state.whole(self.state.judged)
        if not self.processes.is_main:
            return
        try:
            info = saved_info(self.config, self.task, self.state, self._epoch)
            write_model(self.config.run_dir / name, judged, info)
        except TrainingError as error:
            self.report.log.message(str(error))
        else:
            self._describe()

    def _stopped(self) -> bool:
        is_saved = self.save()  # with the window open, which the next run goes on with
        self._close_window()
        if not is_saved:
            raise TrainingError(
                "Stopped as asked, but this step's checkpoint could not be written. The one before "
                "is there."
            )
        self.report.log.message(
            f"Stopped as asked at step {self.state.progress.step}. The same command continues from "
            "there."
        )
        return False

    def _stopped_waiting(self) -> bool:
        """The step that waits for data is given up, as if it had not begun. Other processes are in
        the midst of it, and could not save: they would have to wait for each other."""
        if self.processes.world_size > 1:
            raise TrainingError(
                f"Stopped as asked, while rank {self.processes.rank} waited for data that did not "
                f"come. The same command continues at {self.checkpoints.continues_at}."
            )
        self.state.guard.undo()
        if self.in_flight.generators is not None:
            set_rng_state(self.in_flight.generators, self.processes.device)
        self.report.log.message("The data that this step or validation needs did not come.")
        return self._stopped()

    def save(self) -> bool:
        """Write a checkpoint. False if that failed, which is said; the run can go on. All processes
        call this."""
        with self._held_for_save():
            problem = self.checkpoints.save()
        self._tell(problem)
        return problem is None

    def save_later(self, is_best: bool = False) -> None:
        """As `save`; with --async-checkpoint it is written while the next steps are made."""
        with self._held_for_save():
            if self.config.run.async_checkpoint:
                self.checkpoints.save_later(is_best=is_best)
                return
            problem = self.checkpoints.save(is_best=is_best)
        self._tell(problem)

    @contextmanager
    def _held_for_save(self) -> Iterator[None]:
        """All of the step is counted, and no other checkpoint is being written."""
        self._settle()
        self.report.meter.pause()
        self._finish_save(wait=True)
        self.state.progress.seconds = self.clock.seconds
        with self.report.monitor.paused():
            yield
        self.report.meter.go_on()

    def _finish_save(self, wait: bool) -> None:
        """Hear of the checkpoint that is written meanwhile, if it is done or with `wait`."""
        self._tell(self.checkpoints.finish(wait=wait))

    def _tell(self, problem: str | None) -> None:
        """Say why a checkpoint could not be written."""
        if problem is not None:
            self.report.log.message(problem)
        if self.checkpoints.has_written:
            self._describe()
