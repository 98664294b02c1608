"""What a run tells of its steps: one line for each window of them."""

from amptrain.checkpoint.state import Progress
from amptrain.report.log import RunLog
from amptrain.report.monitor import Monitor
from amptrain.report.window import WindowMeter
from amptrain.step import StepOutcome
from amptrain.words import counted

FREQUENT_SKIPS = 0.1
"""Part of the steps of a window from which on a loss scale is too high to go on with quietly."""


class Report:
    """Log, monitor and the window of steps that is open."""

    def __init__(self, log: RunLog, monitor: Monitor, meter: WindowMeter) -> None:
        self.log, self.monitor, self.meter = log, monitor, meter
        self.advised = False

    def skipped(self, step: int, outcome: StepOutcome) -> None:
        """Say why step `step` moved nothing."""
        self.log.message(
            f"Step {step} skipped: the gradient of {outcome.nonfinite_parameter} is not finite; "
            f"loss scale {outcome.scale_before:g} → {outcome.scale_after:g}."
        )

    def close_window(self, progress: Progress, epoch: int, has_scaler: bool) -> None:
        """The window ends with the last step. All processes call this."""
        steps = self.meter.state.window.steps
        if steps == 0:
            return
        record = self.monitor.window(self.meter.close(progress.step, epoch))
        self.log.window(record)
        frequent = record.skips >= 3 and record.skips >= FREQUENT_SKIPS * steps
        if frequent and has_scaler and not self.advised:
            self.advised = True
            self.log.message(
                f"Skipped: {record.skips} of {counted(steps, 'step')}. If the next run starts so "
                "too, give it a lower loss scale: --init-scale 16384 (2**14) or 4096 (2**12)."
            )
