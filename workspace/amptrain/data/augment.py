"""Augmentations of torchvision.transforms.v2, held to what exact resume needs: what changes an
image is a pure function of the image and of its own generator."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import InterpolationMode, v2

from amptrain.config import DataConfig
from amptrain.data.transforms import Pixels


class Augment:
    """What changes a training image, beside the crop, shift and flip that each kind of data has.

    RandAugment is 2 operations of magnitude 9 and TrivialAugment the "wide" one, torchvision's
    defaults (Cubuk et al., arXiv:1909.13719; Müller and Hutter, arXiv:2103.10158). Colour jitter S
    changes brightness, contrast and saturation by up to S, as timm's does; erasing covers 2 % to
    33 % of the area (Zhong et al., arXiv:1708.04896) with the data's mean, which is 0 after
    normalisation.
    """

    def __init__(
        self, config: DataConfig, *, mean: Sequence[float], pixel_max: float = 255.0
    ) -> None:
        """`mean` of each channel and `pixel_max`, the value of white, are in pixel values."""
        bilinear = InterpolationMode.BILINEAR
        photo: list[v2.Transform] = []
        if config.augment == "randaugment":
            photo.append(v2.RandAugment(interpolation=bilinear))
        if config.augment == "trivialaugment":
            photo.append(v2.TrivialAugmentWide(interpolation=bilinear))
        if (strength := config.color_jitter) > 0:
            photo.append(v2.ColorJitter(strength, strength, strength))
        self.moves = config.augment != "none"
        """Whether images are cropped or shifted, and flipped."""
        self.photo = photo
        self.erasing: v2.RandomErasing | None = None
        if config.random_erasing > 0:
            fill = [float(round(value)) for value in mean]
            self.erasing = v2.RandomErasing(config.random_erasing, value=fill)
        self.scale = 255 / pixel_max

    def __call__(self, pixels: Pixels, rng: np.random.Generator) -> Pixels:
        """`pixels` changed; without an augmentation they are given back and nothing is drawn."""
        if not self.photo and self.erasing is None:
            return pixels
        with torch_seeded(rng):
            if self.photo:
                pixels = self._photo(pixels)
            if self.erasing is not None:
                pixels = self.erasing(torch.tensor(pixels)).numpy()
        return pixels

    def _photo(self, pixels: Pixels) -> Pixels:
        """The augmentations that look at colours, which take 255 for white. On PIL images they are
        several times as fast as on tensors."""
        if self.scale != 1:
            pixels = np.rint(pixels * self.scale).astype(np.uint8)
        image = Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0)).squeeze())
        for transform in self.photo:
            image = transform(image)
        changed = np.atleast_3d(np.asarray(image)).transpose(2, 0, 1)
        return changed if self.scale == 1 else np.rint(changed / self.scale).astype(np.uint8)


def is_wanted(config: DataConfig) -> bool:
    """Whether `config` asks for more than crop, shift and flip."""
    return (
        config.augment in {"randaugment", "trivialaugment"}
        or config.random_erasing > 0
        or config.color_jitter > 0
    )


@contextmanager
def torch_seeded(rng: np.random.Generator) -> Iterator[None]:
    """torch's global generator for the CPU, from which torchvision draws, as a function of `rng`;
    afterwards as before."""
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(int(rng.integers(0, 2**63)))
    try:
        yield
    finally:
        torch.set_rng_state(before)
