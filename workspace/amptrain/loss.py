"""What a step makes small."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, one_hot

from amptrain.config import LossName, OptimConfig
from amptrain.data.datasets import Dataset
from amptrain.errors import ConfigError

Loss = Callable[[Tensor, Tensor], Tensor]


def make_loss(config: OptimConfig, task: Dataset, device: torch.device) -> Loss:
    """The loss of (logits, targets): logits (n, classes), targets int64 (n,) or, where images are
    mixed or have several labels, float32 (n, classes). Raises ConfigError for class weights of
    unknown labels, and for several labels without --loss bce."""
    require_fitting(config.loss, task)
    if config.loss == "bce":
        return partial(bce, smoothing=config.label_smoothing)
    if config.class_weights == "none":
        return nn.CrossEntropyLoss(label_smoothing=config.label_smoothing)
    if task.train.labels is None:
        raise ConfigError(
            f"--class-weights balanced counts the labels, and {task.name} does not tell them. Give "
            "your training set an attribute `targets`, a list of all labels, as torchvision's have."
        )
    weights = balanced_weights(task.train.labels, len(task.classes)).to(device)
    return partial(weighted_cross_entropy, weights=weights, smoothing=config.label_smoothing)


def require_fitting(loss: str, task: Dataset) -> None:
    """Raise ConfigError for several labels an image where `loss` takes one."""
    if task.label_sets is not None and loss != "bce":
        raise ConfigError(
            f"{task.name} has images of several labels or none, and --loss cross-entropy takes one "
            "of each. Add --loss bce. (In a table | parts labels; names of classes need to do "
            "without it.)"
        )


def as_hot(targets: Tensor, classes: int) -> Tensor:
    """Targets as float32, (n, classes): labels, int64 (n,), become 1 for their class and 0 for
    others."""
    return one_hot(targets, classes).float() if targets.ndim == 1 else targets


def bce(logits: Tensor, targets: Tensor, *, smoothing: float) -> Tensor:
    """Binary cross-entropy, 0-d: the mean over images and classes, each class by itself.

    `targets` are int64 (n,), or float (n, classes) from 0 to 1. Smoothing spreads its share over
    yes and no, the two classes that each class is: t becomes t·(1 - s) + s/2. In FP32 also under
    autocast. Every image has as many classes, so the mean over the parts of a step, weighted by
    their images, is that of the step.
    """
    hot = as_hot(targets, logits.shape[1]) * (1 - smoothing) + smoothing / 2
    return binary_cross_entropy_with_logits(logits.float(), hot)


def image_losses(loss: LossName, logits: Tensor, targets: Tensor) -> Tensor:
    """The loss of each image, (n,), without weights and smoothing: what validation takes the mean
    of."""
    if loss == "cross-entropy":
        return cross_entropy(logits, targets, reduction="none")
    hot = as_hot(targets, logits.shape[1]).to(logits.dtype)
    return binary_cross_entropy_with_logits(logits, hot, reduction="none").mean(1)


def is_told(logits: Tensor) -> Tensor:
    """Which labels the outputs of a model trained with bce tell: those of probability 0.5 on."""
    return logits.float().sigmoid() >= 0.5


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
