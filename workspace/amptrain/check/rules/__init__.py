"""The rules, by what they are about. Importing this package registers them all."""

from amptrain.check.rules import accumulation, autocast, checkpoint, data, loop, scaler

__all__ = ["accumulation", "autocast", "checkpoint", "data", "loop", "scaler"]
