"""Images/s of one core from JPEG files to a normalised batch, in the container: `loading SECONDS`.

Each way is its own loader without workers: what a worker does is all there is to measure.
"""

import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from pathlib import Path

import numpy as np
import torch
from amptrain.config import DataConfig
from amptrain.data.datasets import VALIDATION, Dataset, open_dataset
from amptrain.data.loader import DeviceBatches, make_loader
from amptrain.data.order import MicroBatchKeys
from PIL import Image
from timm.data import create_transform  # type: ignore[import-not-found]
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from benchmarks.paired import interleave, ratio, timed

SIZES = {"500×375": (500, 375), "1600×1200": (1600, 1200), "4000×3000": (4000, 3000)}
"""As ImageNet's, from the web, from a telephone."""
PHOTOS, BATCH, SIZE = 32, 8, 224
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
Make = Callable[[Path, bool], Iterator[object]]


def make_photos(folder: Path, size: tuple[int, int]) -> None:
    """JPEGs of quality 90 whose details are some four pixels wide, as in a sharp photo."""
    rng = np.random.default_rng(0)
    for index in range(PHOTOS):
        coarse = rng.integers(0, 256, (size[1] // 4, size[0] // 4, 3), dtype=np.uint8)
        image = Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)
        for split in ("train", "val"):
            path = folder / split / "ab"[index % 2] / f"{index}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path, quality=90)


def ours(folder: Path, training: bool) -> Iterator[object]:
    """amptrain's loader."""
    task: Dataset = open_dataset(DataConfig(data=f"imagefolder:{folder}", image_size=SIZE), 0)
    images = task.train if training else task.validation
    keys = [
        MicroBatchKeys([(epoch if training else VALIDATION, start + i) for i in range(BATCH)])
        for epoch in range(200)
        for start in range(0, PHOTOS, BATCH)
    ]
    loader = make_loader(images, keys, 0, 2, pin_memory=False)  # type: ignore[arg-type]
    device = torch.device("cpu")
    return iter(DeviceBatches(loader, task, device, torch.channels_last, lambda _: None))


def torchvision_way(folder: Path, training: bool) -> Iterator[object]:
    """As torchvision's reference script: its transforms of PIL images."""
    ends = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    moves = [transforms.RandomResizedCrop(SIZE), transforms.RandomHorizontalFlip()]
    still = [transforms.Resize(256), transforms.CenterCrop(SIZE)]
    return plain(folder, training, transforms.Compose([*(moves if training else still), *ends]))


def timm_way(folder: Path, training: bool) -> Iterator[object]:
    """timm's transforms, without augmentation beyond crop and flip."""
    transform = create_transform(
        SIZE, is_training=training, color_jitter=None, auto_augment=None, interpolation="bilinear"
    )
    return plain(folder, training, transform)


def plain(folder: Path, training: bool, transform: object) -> Iterator[object]:
    """torch's DataLoader, again and again."""
    data = ImageFolder(folder / ("train" if training else "val"), transform)  # type: ignore[arg-type]
    loader = DataLoader(data, BATCH, shuffle=training)
    return chain.from_iterable(repeat(loader))


WAYS: dict[str, Make] = {"torchvision": torchvision_way, "timm": timm_way, "amptrain": ours}


def main(seconds: float) -> None:
    """Measure, and print one table."""
    torch.set_num_threads(1)
    print("| JPEGs | | " + " | ".join(f"{way}, images/s" for way in WAYS), end=" | ")
    print("amptrain to torchvision (95 %) | amptrain to timm (95 %) |")
    print("| --- | --- |" + " ---: |" * len(WAYS) + " --- | --- |")
    for name, size in SIZES.items():
        with tempfile.TemporaryDirectory() as folder:
            make_photos(Path(folder), size)
            for training in (True, False):
                loaders = {way: make(Path(folder), training) for way, make in WAYS.items()}
                steps = {way: timed(loader.__next__) for way, loader in loaders.items()}
                times = interleave(steps, seconds, 1000)
                rates = [BATCH * len(taken) / sum(taken) for taken in times.values()]
                gains = [ratio(times[way], times["amptrain"]) for way in ("torchvision", "timm")]
                cells = [
                    *(name, "training" if training else "validation"),
                    *(f"{rate:.0f}" for rate in rates),
                    *map(str, gains),
                ]
                print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]))
