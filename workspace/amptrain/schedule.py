"""Learning rate and EMA decay as pure functions of the step: a resumed run has no schedule to
restore."""

import math


def learning_rate(step: int, *, peak: float, warmup: int, total: int) -> float:
    """Learning rate of optimizer step `step` (0 is the first): linear warm-up over `warmup` steps,
    then a cosine to 0.

    The cosine is that of SGDR without restarts (Loshchilov and Hutter, arXiv:1608.03983, eq. 5).
    """
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return peak * 0.5 * (1.0 + math.cos(math.pi * progress))


def ema_decay(step: int, *, decay: float) -> float:
    """Decay of the moving average at optimizer step `step`: small at first, so that the initial
    weights are forgotten.

    The ramp (1 + t) / (10 + t) is that of TensorFlow's ExponentialMovingAverage with num_updates.
    """
    return min(decay, (1 + step) / (10 + step))
