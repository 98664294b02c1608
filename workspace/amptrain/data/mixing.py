"""Mixup and CutMix: two images of a batch become two others, and their labels shares.

torchvision's own draw one number for a batch and mix each image with the one before it in that
batch; so a step would depend on how it is split. Here the images that lie beside each other in the
order of a step are a pair. A split never parts them (see Order), and what happens to a pair is a
pure function of (seed, epoch, index of its first image): the same after a kill, and for any number
of processes and micro-batches.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from amptrain.config import DataConfig
from amptrain.data.datasets import Dataset, Key
from amptrain.errors import ConfigError

STREAM = 3
"""Of the generators keyed by (seed, epoch): 0 augments, 1 orders, 2 holds out."""


class Mixes(NamedTuple):
    """What happens to each of n images."""

    blend: Tensor
    """float32, (n,): the image's own part in each pixel (mixup); 1 for CutMix."""
    box: Tensor
    """int64, (n, 4): (left, top, right, bottom) of what is taken from the other; empty for
    mixup."""
    share: Tensor
    """float32, (n,): the part of the image's own label."""


class Mixer:
    """Mixes pairs of images: by mixup (Zhang et al., arXiv:1710.09412), by CutMix (Yun et al.,
    arXiv:1905.04899), or, where both are set, by one of them for each pair, half and half."""

    def __init__(self, config: DataConfig, task: Dataset, seed: int) -> None:
        """Raises ConfigError for data that cannot be mixed."""
        self.mixup, self.cutmix, self.seed = config.mixup, config.cutmix, seed
        self.classes = len(task.classes)
        self.height, self.width = task.shape[1:]
        flag = "--mixup" if self.mixup else "--cutmix"
        if self.classes < 2:
            raise ConfigError(
                f"{flag} mixes labels, and {task.name} has one class. Leave the flag out."
            )
        if self.cutmix and self.height * self.width < 4:
            raise ConfigError(
                f"--cutmix puts a part of an image into another; those of {task.name} are of "
                f"{self.height}×{self.width}. Use --mixup."
            )

    def draw(self, keys: Sequence[Key]) -> Mixes:
        """For the images `keys`, whose pairs are (0, 1), (2, 3) and so on."""
        pairs = [self._pair(*key) for key in keys[::2]]
        blends, boxes, shares = zip(*pairs, strict=True) if pairs else ((), (), ())
        return Mixes(
            torch.tensor(blends, dtype=torch.float32).repeat_interleave(2),
            torch.tensor(boxes, dtype=torch.int64).view(-1, 4).repeat_interleave(2, 0),
            torch.tensor(shares, dtype=torch.float32).repeat_interleave(2),
        )

    def _pair(self, epoch: int, index: int) -> tuple[float, tuple[int, int, int, int], float]:
        """(blend, box, share) of the pair whose first image is `index`."""
        rng = np.random.Generator(
            np.random.Philox(key=[self.seed, epoch], counter=[0, 0, STREAM, index])
        )
        cut = self.cutmix > 0 and (self.mixup == 0 or rng.random() < 0.5)
        share = float(
            rng.beta(self.cutmix, self.cutmix) if cut else rng.beta(self.mixup, self.mixup)
        )
        if not cut:
            return share, (0, 0, 0, 0), share
        x, y = int(rng.integers(self.width)), int(rng.integers(self.height))
        half = 0.5 * math.sqrt(1 - share)
        w, h = int(half * self.width), int(half * self.height)
        left, top = max(x - w, 0), max(y - h, 0)
        right, bottom = min(x + w, self.width), min(y + h, self.height)
        area = (right - left) * (bottom - top)
        return 1.0, (left, top, right, bottom), 1 - area / (self.width * self.height)

    def mix(self, images: Tensor, targets: Tensor, mixes: Mixes) -> tuple[Tensor, Tensor]:
        """`images` (n, channels, height, width) and their labels, mixed.

        Labels, int64 (n,), become float32 (n, classes) that sum to 1; the targets of several labels
        an image, (n, classes), stay of that shape.
        """
        if targets.ndim == 1:
            targets = one_hot(targets, self.classes).float()
        other = _swapped(images)
        left, top, right, bottom = mixes.box.view(-1, 4, 1, 1).unbind(1)
        x = torch.arange(self.width, device=images.device)
        y = torch.arange(self.height, device=images.device).view(-1, 1)
        inside = (left <= x) & (x < right) & (top <= y) & (y < bottom)
        blend = mixes.blend.view(-1, 1, 1, 1)
        mixed = torch.where(inside.unsqueeze(1), other, torch.lerp(other, images, blend))
        share = mixes.share.view(-1, 1)
        return mixed, torch.lerp(_swapped(targets), targets, share)


def make_mixer(config: DataConfig, task: Dataset, seed: int) -> Mixer | None:
    """The mixer that `config` asks for; None if it asks for none."""
    return Mixer(config, task, seed) if is_mixed(config) else None


def is_mixed(config: DataConfig) -> bool:
    """Whether images are mixed in pairs."""
    return config.mixup > 0 or config.cutmix > 0


def _swapped(tensor: Tensor) -> Tensor:
    """The other one of each pair, (1, 0), (3, 2) and so on, in its place."""
    pairs: Tensor = tensor.unflatten(0, (-1, 2))
    return pairs.flip(1).flatten(0, 1)
