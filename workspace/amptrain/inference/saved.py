"""What a run writes beside the weights that it gives away."""

from amptrain.checkpoint.state import TrainState
from amptrain.config import TrainConfig
from amptrain.data.datasets import Dataset, reading_of
from amptrain.inference.model_file import ModelInfo, versions


def saved_info(config: TrainConfig, task: Dataset, state: TrainState, epoch: int) -> ModelInfo:
    """What a user of the judged weights has to know."""
    progress = state.progress
    return ModelInfo(
        model=config.model_name,
        classes=task.classes,
        shape=task.shape,
        mean=task.mean,
        std=task.std,
        pixel_max=task.pixel_max,
        crop=task.crop,
        reading=reading_of(config.data),
        averaged=state.ema is not None,
        step=progress.step,
        epoch=epoch,
        precision=state.precision.name,
        metrics={"loss": progress.loss, task.measure: progress.accuracy, **progress.metrics},
        loss=config.optim.loss,
        versions=versions(),
        seed=config.run.seed,
        val_fraction=config.data.val_fraction,
    )
