"""Steps, learning rate and EMA decay as pure functions of the step: a resumed run has no schedule
to restore."""

import math
from dataclasses import dataclass

from amptrain.config import OptimConfig, ScheduleName
from amptrain.errors import ConfigError


def learning_rate(step: int, *, peak: float, warmup: int, total: int) -> float:
    """Learning rate of optimizer step `step` (0 is the first): linear warm-up over `warmup` steps,
    then a cosine to 0.

    The cosine is that of SGDR without restarts (Loshchilov and Hutter, arXiv:1608.03983, eq. 5).
    """
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return peak * _falling(progress)


def step_rate(step: int, *, peak: float, warmup: int, every: int, gamma: float) -> float:
    """Linear warm-up, then `peak` times `gamma` for each `every` steps that are over, as torch's
    StepLR; `every` counts from the first step, so that rates fall at ends of epochs."""
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    return float(peak * gamma ** (step // every))


def one_cycle_rate(step: int, *, peak: float, total: int) -> float:
    """From peak/25 as a cosine to `peak` over 30 % of the steps, then as a cosine to peak/250000:
    torch's OneCycleLR with its defaults (Smith and Topin, arXiv:1708.07120). Its momentum is not
    cycled."""
    first, last = peak / 25, peak / 25e4
    top = max(0.3 * total - 1, 0.0)
    if step < top:
        return first + (peak - first) * _falling(1 - step / top)
    progress = min(1.0, (step - top) / max(1e-9, total - 1 - top))
    return last + (peak - last) * _falling(progress)


def _falling(progress: float) -> float:
    """Half a period of a cosine: 1 at 0, 0 at 1."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Which steps a run has, and the learning rate of each."""

    name: ScheduleName
    peak: float
    """The rate at the end of the warm-up."""
    warmup: int
    """Steps of the warm-up; at most half of all. one-cycle has a rise of its own."""
    total: int
    """Steps of the run."""
    steps_per_epoch: int
    every: int
    """step: steps after which the rate falls."""
    gamma: float
    """step: by which it is multiplied."""

    def epoch(self, steps: int) -> int:
        """The epoch, from 1, in which a run is that has done so many steps, skipped ones too."""
        return math.ceil(steps / self.steps_per_epoch)

    def ends_epoch(self, steps: int) -> bool:
        """Whether the last of so many steps is the last of an epoch, or of all."""
        return steps % self.steps_per_epoch == 0 or steps == self.total

    def rate(self, step: int) -> float:
        """The rate of optimizer step `step`; steps count from 0, and those that were skipped do not
        count."""
        peak, warmup, total = self.peak, self.warmup, self.total
        match self.name:
            case "cosine":
                return learning_rate(step, peak=peak, warmup=warmup, total=total)
            case "step":
                every, gamma = self.every, self.gamma
                return step_rate(step, peak=peak, warmup=warmup, every=every, gamma=gamma)
            case "constant":
                return step_rate(step, peak=peak, warmup=warmup, every=1, gamma=1.0)
            case "one-cycle":
                return one_cycle_rate(step, peak=peak, total=total)


def total_steps(config: OptimConfig, steps_per_epoch: int) -> int:
    """Steps of all epochs, or --max-steps where that is less."""
    total = config.epochs * steps_per_epoch
    return min(total, config.max_steps or total)


def make_schedule(config: OptimConfig, *, steps_per_epoch: int, total: int) -> Schedule:
    """The schedule of a run of `total` steps. Raises ConfigError if there is no rate yet."""
    if config.lr is None:
        raise ConfigError("The learning rate is not chosen yet; give --lr.")
    epochs = config.lr_step_epochs
    every = math.ceil(total / 3) if epochs is None else epochs * steps_per_epoch
    return Schedule(
        name=config.schedule,
        peak=config.lr,
        warmup=min(round(config.warmup_epochs * steps_per_epoch), total // 2),
        total=total,
        steps_per_epoch=steps_per_epoch,
        every=every,
        gamma=config.lr_gamma,
    )


def ema_decay(step: int, *, decay: float) -> float:
    """Decay of the moving average at optimizer step `step`: small at first, so that the initial
    weights are forgotten.

    The ramp (1 + t) / (10 + t) is that of TensorFlow's ExponentialMovingAverage with num_updates.
    """
    return min(decay, (1 + step) / (10 + step))
