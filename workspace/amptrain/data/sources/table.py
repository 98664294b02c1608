"""A CSV or JSONL file with a path and a label, or several, in each line."""

import csv
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from amptrain.config import DataConfig
from amptrain.data.datasets import VAL_FRACTION, Dataset, file_dataset, hold_out
from amptrain.data.files import FileList
from amptrain.errors import ConfigError

USAGE = "table:FILE (.csv or .jsonl with the columns path, label and perhaps split)"
PATH = ("path", "image", "file", "filename", "file_name")
LABEL = ("label", "class", "target")
SEPARATOR = "|"
"""Between the labels of one image; alone it means none."""
Labels = tuple[str, ...]
"""Of one image."""
SPLITS = {
    "train": "train", "training": "train",
    "val": "val", "valid": "val", "validation": "val", "test": "test",
}  # fmt: skip


def open(argument: str, config: DataConfig, seed: int) -> Dataset:
    """`argument` is the file; paths in it are absolute, or relative to its folder. Raises
    ConfigError with the line that is wrong.

    Where a line has several labels, or none, the labels of the data set are sets of classes.
    """
    file = Path(argument).expanduser()
    try:
        rows = list(_rows(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"The table {file} cannot be read: {error}.") from None
    if not rows:
        raise ConfigError(f"The table {file} has no line with a path and a label.")
    splits = Counter(split for _, _, split in rows)
    judge = "val" if splits["val"] else "test"
    classes = sorted(_named(rows, "train"), key=_natural)
    unknown = sorted(_named(rows, judge) - set(classes))
    if unknown:
        raise ConfigError(
            f"In {file} the labels {', '.join(unknown[:8])} are only in lines to validate with."
        )
    one_each = all(len(labels) == 1 for _, labels, _ in rows)
    sets = _sets(rows, judge, classes)
    train = _files(file, rows, "train", sets)
    if splits[judge]:
        validation, messages = _files(file, rows, judge, sets), []
    else:
        fraction = VAL_FRACTION if config.val_fraction is None else config.val_fraction
        # Of most sets of labels there are too few images to hold out some of each.
        alike = train.labels if one_each else np.zeros_like(train.labels)
        kept, held = hold_out(alike, fraction, seed)
        train, validation = train.select(kept), train.select(held)
        of = "of each class" if one_each else "of the images"
        messages = [f"{file} has no lines to validate with (column split): {fraction:.0%} {of} "
                    "are held out (--val-fraction)."]  # fmt: skip
    table = None if one_each else _members(sets, classes)
    return file_dataset(config, seed, classes, train, validation, messages, table)


def _named(rows: list[tuple[str, Labels, str]], split: str) -> set[str]:
    """All labels in the lines of `split`."""
    return {label for _, labels, own in rows if own == split for label in labels}


def _sets(rows: list[tuple[str, Labels, str]], judge: str, classes: list[str]) -> list[Labels]:
    """The sets of labels that images to train on or to judge with have, in the order of classes."""
    place = {label: number for number, label in enumerate(classes)}
    found = {labels for _, labels, split in rows if split in {"train", judge}}
    return sorted(found, key=lambda labels: [place[label] for label in labels])


def _members(sets: list[Labels], classes: list[str]) -> NDArray[np.bool_]:
    """(sets, classes): which classes are in each set."""
    place = {label: number for number, label in enumerate(classes)}
    members = np.zeros((len(sets), len(classes)), dtype=np.bool_)
    for row, labels in zip(members, sets, strict=True):
        row[[place[label] for label in labels]] = True
    return members


def _rows(file: Path) -> Iterator[tuple[str, Labels, str]]:
    """(path, labels, split) of each line."""
    with file.open(encoding="utf-8-sig", newline="") as lines:
        if file.suffix.lower() in {".jsonl", ".ndjson"}:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    try:
                        found = json.loads(line)
                    except ValueError as error:
                        raise ConfigError(f"{file}, line {number}: {error}.") from None
                    if not isinstance(found, dict):
                        raise ConfigError(f"{file}, line {number} is no JSON object.")
                    yield _row(file, number, found)
        else:
            reader = csv.DictReader(lines)
            for found in reader:
                yield _row(file, reader.line_num, found)


def _row(file: Path, number: int, found: dict[str, object]) -> tuple[str, Labels, str]:
    lower = {str(name).strip().lower(): value for name, value in found.items()}
    path = next((lower[name] for name in PATH if lower.get(name) not in (None, "")), None)
    label = next((lower[name] for name in LABEL if lower.get(name) not in (None, "")), None)
    if path is None or label is None:
        raise ConfigError(
            f"{file}, line {number} has {', '.join(lower)}; it needs a path ({', '.join(PATH)}) "
            f"and a label ({', '.join(LABEL)})."
        )
    split = str(lower.get("split") or "train").strip().lower()
    if split not in SPLITS:
        raise ConfigError(
            f"{file}, line {number}: the split is {split!r}; it needs to be train, val or test."
        )
    return str(path), _labels(file, number, label), SPLITS[split]


def _labels(file: Path, number: int, found: object) -> Labels:
    """One label, or several: a list, or text that | parts. Each once, in order of name."""
    if isinstance(found, list):
        if any(label is None or isinstance(label, list | dict) for label in found):
            raise ConfigError(
                f"{file}, line {number}: the labels are {json.dumps(found)}; they need to be a "
                "list of names or numbers."
            )
        return tuple(sorted({str(label) for label in found}, key=_natural))
    text = str(found)
    if SEPARATOR not in text:
        return (text,)
    parts = {part.strip() for part in text.split(SEPARATOR)} - {""}
    return tuple(sorted(parts, key=_natural))


def _natural(label: str) -> tuple[int, int, str]:
    """Numbers by their value, before words."""
    return (0, int(label), "") if label.isdecimal() else (1, 0, label)


def _files(
    file: Path, rows: list[tuple[str, Labels, str]], split: str, sets: list[Labels]
) -> FileList:
    """The files of `split`; the label of each is the place of its labels in `sets`."""
    of_set: dict[Labels, list[str]] = {labels: [] for labels in sets}
    for path, labels, own in rows:
        if own == split:
            of_set[labels].append(path)
    root = file.parent
    return FileList(
        os.fspath(root),
        (
            (paths, [_size(root / path) for path in paths], number)
            for number, paths in enumerate(of_set.values())
        ),
    )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise ConfigError(f"The image {path} of the table: {error.strerror}.") from None
