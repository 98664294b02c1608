"""`amptrain bench`: what each precision gives on this machine, as the article's table."""

import json
import platform
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from amptrain import __version__
from amptrain.config import IMAGE_SIZE, DataConfig, TrainConfig, flatten, require
from amptrain.errors import TrainingError
from amptrain.files import atomic_write
from amptrain.precisions import precision_names
from amptrain.trials.process import (
    QUICK,
    Effort,
    Facts,
    Fit,
    Speed,
    facts,
    fit,
    require_alone,
    speed,
)
from amptrain.trials.search import SMALLEST, largest_fitting
from amptrain.trials.table import Row, chart, markdown
from amptrain.words import counted

IMAGENET = 1281167
"""Training images of ImageNet-1k (Russakovsky et al., 2015)."""
MOST = 4096
"""Micro-batches above this are not tried."""
QUICK_BATCH = 8
"""Images of a step on a CPU with --quick: one of ResNet-50 in FP32 takes 1 to 2 s on 2 cores."""
PHOTO_SIZE = (500, 375)
"""Width and height near those of most of ImageNet's."""
PHOTOS = 32
"""Different ones; further names are links to them."""


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """Time and memory of each precision on this machine, as a table, JSON and a chart."""

    train: TrainConfig = field(default_factory=TrainConfig)
    repeats: int = 3
    """Processes for each precision, in turn; the table gives their median, least and most."""
    quick: bool = False
    """One short process for each precision, and no search for the largest batch; on a CPU with
    steps of 8 images: within a minute."""
    output: Path = Path("bench")
    """Folder for bench.md, bench.json and bench.png."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "output", self.output.expanduser())
        require(self.repeats >= 1, f"--repeats is {self.repeats}; it needs at least 1.")


def default_bench() -> TrainConfig:
    """What is measured where nothing else is said: ResNet-50 on noise of ImageNet's size."""
    return TrainConfig(data=DataConfig(data=f"fake:{IMAGENET}", image_size=IMAGE_SIZE))


def bench(config: BenchConfig) -> int:
    """`amptrain bench`. Raises ConfigError, and TrainingError where nothing could be measured."""
    require_alone("bench", config.train)
    config.output.mkdir(parents=True, exist_ok=True)  # a folder it may not write is told now
    known = facts(config.train)
    train = with_quick_batch(config.train, known) if config.quick else config.train
    names = [name for name in precision_names() if name not in known.emulated]
    speeds = measure(train, known, names, config)
    largest = {} if config.quick else {name: find_largest(train, known, name) for name in names}
    rows = [
        Row(name, known.images, tuple(speeds[name]), *largest.get(name, (None, None)))
        for name in names
        if speeds[name]
    ]
    if not rows:
        raise TrainingError("No precision could be measured; the lines above say why.")
    title = (
        f"{train.model_name}, images of {'×'.join(map(str, known.shape))}, "
        f"{train.optim.global_batch_size} a step, on {known.device}"
    )
    text = markdown(title, rows, known)
    print(f"\n{text}", flush=True)
    atomic_write(config.output / "bench.md", text)
    atomic_write(config.output / "bench.json", json.dumps(record(train, known, rows), indent=1))
    chart(title, rows, config.output / "bench.png")
    print(f"Written: {config.output}/bench.md, bench.json, bench.png")
    return 0


def measure(
    train: TrainConfig, known: Facts, names: list[str], config: BenchConfig
) -> dict[str, list[Speed]]:
    """The measurements of each precision: in turn, so that a slow minute of the machine meets all
    alike, and each time in another order."""
    effort = QUICK if config.quick else Effort()
    speeds: dict[str, list[Speed]] = {name: [] for name in names}
    order = random.Random(0)
    with photos(known, train.optim.global_batch_size) as folder:
        for _ in range(1 if config.quick else config.repeats):
            for name in order.sample(names, len(names)):
                try:
                    found = speed(in_precision(train, name), effort, photos=folder, with_data=True)
                except TrainingError as error:
                    print(f"{name}: {error}", flush=True)
                    continue
                print(f"{name}: {found.images_per_s:.4g} images/s", flush=True)
                speeds[name].append(found)
    return speeds


def find_largest(train: TrainConfig, known: Facts, name: str) -> tuple[int, Fit | None]:
    """The largest micro-batch that fits, and its peak; (0, None) where none does."""
    fitting: dict[int, Fit] = {}

    def fits(size: int) -> bool:
        found = fit(in_precision(train, name), size)
        verdict = "fits" if found.fits else "does not fit"
        print(f"{name}: a micro-batch of {counted(size, 'image')} {verdict}", flush=True)
        if found.fits:
            fitting[size] = found
        return found.fits

    cap = max(SMALLEST, min(MOST, known.images))
    start = train.optim.global_batch_size // train.optim.grad_accum_steps
    largest = largest_fitting(fits, start=max(SMALLEST, start), cap=cap)
    return largest, fitting.get(largest)


def in_precision(train: TrainConfig, name: str) -> TrainConfig:
    """The same settings in another precision."""
    return replace(train, precision=replace(train.precision, precision=name))


def with_quick_batch(train: TrainConfig, known: Facts) -> TrainConfig:
    """On a CPU: steps of few images."""
    optim = train.optim
    if known.is_cuda or optim.global_batch_size <= QUICK_BATCH:
        return train
    few = replace(optim, global_batch_size=QUICK_BATCH, grad_accum_steps=1)
    return replace(train, optim=few)


@contextmanager
def photos(known: Facts, batch: int) -> Iterator[Path | None]:
    """A folder of made JPEGs in two classes, to load in place of noise; None for a data set that
    has images of its own."""
    if not known.is_made:
        yield None
        return
    import numpy as np
    from PIL import Image

    random_bytes = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        for index in range(max(PHOTOS, 2 * batch)):
            split = "val" if index < 2 else "train"
            path = Path(folder, split, "ab"[index % 2], f"{index}.jpg")
            path.parent.mkdir(parents=True, exist_ok=True)
            if index < PHOTOS:
                # Noise as coarse as things in a photo are: of some 50 kB, as ImageNet's.
                coarse = random_bytes.integers(0, 256, (94, 125, 3), dtype=np.uint8)
                image = Image.fromarray(coarse).resize(PHOTO_SIZE, Image.Resampling.BICUBIC)
                image.save(path, quality=90)
            else:
                split = "val" if index % PHOTOS < 2 else "train"
                source = Path(folder, split, "ab"[index % 2], f"{index % PHOTOS}.jpg")
                path.hardlink_to(source)
        yield Path(folder)


def record(train: TrainConfig, known: Facts, rows: list[Row]) -> dict[str, Any]:
    """All that was measured, as plain types."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "amptrain": __version__,
        "python": platform.python_version(),
        "machine": asdict(known),
        "settings": flatten(train),
        "rows": [asdict(row) for row in rows],
    }
