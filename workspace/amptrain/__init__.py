"""Mixed-precision training done right.

Reads in this order: cli, config, train, step, precision, optim; then data/, checkpoint/, report/.

What `__all__` names is the public API, for a loop of one's own (docs/library.md). It follows
semantic versioning: before 1.0 a minor version may change it, and CHANGELOG.md says how.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from amptrain.checkpoint.resume import rng_state, seed_all, set_rng_state
    from amptrain.checkpoint.store import CheckpointStore, Loaded
    from amptrain.config import PrecisionConfig
    from amptrain.data.order import MicroBatchKeys, Order
    from amptrain.ema import Ema
    from amptrain.errors import CheckpointError, ConfigError, TrainingError
    from amptrain.precision import Precision, resolve_precision
    from amptrain.report.log import EpochRecord, RunLog, Window, read_metrics
    from amptrain.schedule import ema_decay, learning_rate
    from amptrain.signals import StopSignal
    from amptrain.step import (
        BufferGuard,
        Gradients,
        MicroBatch,
        PendingOutcome,
        StepOutcome,
        backward,
        update,
    )

__all__ = [
    "BufferGuard",
    "CheckpointError",
    "CheckpointStore",
    "ConfigError",
    "Ema",
    "EpochRecord",
    "Gradients",
    "Loaded",
    "MicroBatch",
    "MicroBatchKeys",
    "Order",
    "PendingOutcome",
    "Precision",
    "PrecisionConfig",
    "RunLog",
    "StepOutcome",
    "StopSignal",
    "TrainingError",
    "Window",
    "backward",
    "ema_decay",
    "learning_rate",
    "read_metrics",
    "resolve_precision",
    "rng_state",
    "seed_all",
    "set_rng_state",
    "update",
]
__version__ = "0.2.0"

_MODULES = {
    "amptrain.checkpoint.resume": ("rng_state", "seed_all", "set_rng_state"),
    "amptrain.checkpoint.store": ("CheckpointStore", "Loaded"),
    "amptrain.config": ("PrecisionConfig",),
    "amptrain.data.order": ("MicroBatchKeys", "Order"),
    "amptrain.ema": ("Ema",),
    "amptrain.errors": ("CheckpointError", "ConfigError", "TrainingError"),
    "amptrain.precision": ("Precision", "resolve_precision"),
    "amptrain.report.log": ("EpochRecord", "RunLog", "Window", "read_metrics"),
    "amptrain.schedule": ("ema_decay", "learning_rate"),
    "amptrain.signals": ("StopSignal",),
    "amptrain.step": (
        *("BufferGuard", "Gradients", "MicroBatch", "PendingOutcome", "StepOutcome"),
        *("backward", "update"),
    ),
}


def __getattr__(name: str) -> Any:
    """Load what is asked for: `amptrain --help` needs no second of torch's import."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'amptrain' has no attribute {name!r}")
