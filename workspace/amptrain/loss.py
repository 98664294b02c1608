"""What a step makes small."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from amptrain.config import OptimConfig
from amptrain.data.datasets import Dataset
from amptrain.errors import ConfigError

Loss = Callable[[Tensor, Tensor], Tensor]


def make_loss(config: OptimConfig, task: Dataset, device: torch.device) -> Loss:
    """The loss of (logits, targets): logits (n, classes), targets int64 (n,) or, where images are
    mixed, shares (n, classes). Raises ConfigError for class weights of unknown labels."""
    if config.class_weights == "none":
        return nn.CrossEntropyLoss(label_smoothing=config.label_smoothing)
    if task.train.labels is None:
        raise ConfigError(
            f"--class-weights balanced counts the labels, and {task.name} does not tell them. Give "
            "your training set an attribute `targets`, a list of all labels, as torchvision's have."
        )
    weights = balanced_weights(task.train.labels, len(task.classes)).to(device)
    return partial(weighted_cross_entropy, weights=weights, smoothing=config.label_smoothing)


def balanced_weights(labels: NDArray[np.integer], classes: int) -> Tensor:
    """float32, (classes,): n / (k × n_c) for the n_c of n images in class c, as scikit-learn's
    "balanced" (King and Zeng, 2001), with k classes that have any; 0 for one without an image.

    Their mean over the n images is 1, so that the learning rate keeps its meaning.
    """
    counts = np.bincount(labels, minlength=classes)
    there = counts > 0
    weights = np.where(there, len(labels) / (there.sum() * np.maximum(counts, 1)), 0.0)
    return torch.tensor(weights, dtype=torch.float32)


def weighted_cross_entropy(
    logits: Tensor, targets: Tensor, *, weights: Tensor, smoothing: float
) -> Tensor:
    """(1/n) Σ_i w[y_i] · CE(logits_i, y_i), 0-d, over the n images of a micro-batch.

    It is divided by n and not, as torch's weighted mean, by Σ_i w[y_i]. That sum differs from
    micro-batch to micro-batch and from rank to rank, so that the mean of such means is not the
    step's; while Σ_parts (n_part/n_step) · (1/n_part) Σ_i w_i·CE_i is (1/n_step) Σ_i w_i·CE_i,
    however the step is split (see MicroBatch.loss_weight). The weights' mean over the data is 1.
    """
    losses = cross_entropy(
        logits, targets, weight=weights, label_smoothing=smoothing, reduction="none"
    )
    return losses.mean()
