"""A data set of Hugging Face's `datasets` as a data set of one's own.

    pip install datasets
    HF_DATASET=beans amptrain train --data hugging_face.py:hub --model resnet18 --weights DEFAULT

Any data set with splits, a column of images and a column of classes will do; `load_from_disk` in
place of `load_dataset` takes one that lies on a disk. Rows are read by their number, so a run
continues bit for bit. A streamed data set (`streaming=True`) has no numbers, and cannot.
"""

import os
from typing import Any

import numpy as np

IMAGE, LABEL = os.environ.get("HF_IMAGE", "image"), os.environ.get("HF_LABEL", "label")
"""Names of the two columns."""


class Rows:
    """The rows of one split, as (image, class).

    `rows` needs what `datasets.Dataset` has: its length, a row by number as a dict with a PIL image
    in it, a column by name, and `features[LABEL].names`.
    """

    def __init__(self, rows: Any) -> None:
        self.rows = rows
        self.classes: list[str] = rows.features[LABEL].names
        self.targets = np.asarray(rows[LABEL])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        row = self.rows[index]
        return row[IMAGE], row[LABEL]


def split(found: Any) -> tuple[Rows, Rows]:
    """Training and validation of a `datasets.DatasetDict`, by the names that are usual."""
    judge = next(name for name in ("validation", "valid", "test") if name in found)
    return Rows(found["train"]), Rows(found[judge])


def hub() -> tuple[Rows, Rows]:
    """What `--data hugging_face.py:hub` takes."""
    from datasets import load_dataset  # type: ignore[import-not-found,unused-ignore]

    return split(load_dataset(os.environ["HF_DATASET"]))
