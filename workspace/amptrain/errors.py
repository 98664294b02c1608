"""The ways a run ends badly. All carry one or more sentences for the person reading."""


class ConfigError(ValueError):
    """What was asked for cannot be done: the command line exits with 2."""


class TrainingError(RuntimeError):
    """Training itself failed: the command line exits with 1."""


class CheckpointError(TrainingError):
    """No checkpoint could be read or written; the sentence says which file and why."""
