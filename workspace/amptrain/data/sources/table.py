"""A CSV or JSONL file with a path and a label in each line."""

import csv
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from amptrain.config import DataConfig
from amptrain.data.datasets import VAL_FRACTION, Dataset, file_dataset, hold_out
from amptrain.data.files import FileList
from amptrain.errors import ConfigError

USAGE = "table:FILE (.csv or .jsonl with the columns path, label and perhaps split)"
PATH = ("path", "image", "file", "filename", "file_name")
LABEL = ("label", "class", "target")
SPLITS = {
    "train": "train", "training": "train",
    "val": "val", "valid": "val", "validation": "val", "test": "test",
}  # fmt: skip


def open(argument: str, config: DataConfig, seed: int) -> Dataset:
    """`argument` is the file; paths in it are absolute, or relative to its folder. Raises
    ConfigError with the line that is wrong."""
    file = Path(argument).expanduser()
    try:
        rows = list(_rows(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"The table {file} cannot be read: {error}.") from None
    if not rows:
        raise ConfigError(f"The table {file} has no line with a path and a label.")
    splits = Counter(split for _, _, split in rows)
    judge = "val" if splits["val"] else "test"
    classes = sorted({label for _, label, split in rows if split == "train"}, key=_natural)
    unknown = sorted({label for _, label, split in rows if split == judge} - set(classes))
    if unknown:
        raise ConfigError(
            f"In {file} the labels {', '.join(unknown[:8])} are only in lines to validate with."
        )
    train = _files(file, rows, "train", classes)
    if splits[judge]:
        validation, messages = _files(file, rows, judge, classes), []
    else:
        fraction = VAL_FRACTION if config.val_fraction is None else config.val_fraction
        kept, held = hold_out(train.labels, fraction, seed)
        train, validation = train.select(kept), train.select(held)
        messages = [f"{file} has no lines to validate with (column split): {fraction:.0%} of each "
                    "class are held out (--val-fraction)."]  # fmt: skip
    return file_dataset(config, seed, classes, train, validation, messages)


def _rows(file: Path) -> Iterator[tuple[str, str, str]]:
    """(path, label, split) of each line."""
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


def _row(file: Path, number: int, found: dict[str, object]) -> tuple[str, str, str]:
    lower = {str(name).strip().lower(): value for name, value in found.items()}
    path = next((lower[name] for name in PATH if lower.get(name) not in {None, ""}), None)
    label = next((lower[name] for name in LABEL if lower.get(name) not in {None, ""}), None)
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
    return str(path), str(label), SPLITS[split]


def _natural(label: str) -> tuple[int, int, str]:
    """Numbers by their value, before words."""
    return (0, int(label), "") if label.isdecimal() else (1, 0, label)


def _files(
    file: Path, rows: list[tuple[str, str, str]], split: str, classes: list[str]
) -> FileList:
    of_class: dict[str, list[str]] = {label: [] for label in classes}
    for path, label, own in rows:
        if own == split:
            of_class[label].append(path)
    root = file.parent
    return FileList(
        os.fspath(root),
        (
            (paths, [_size(root / path) for path in paths], number)
            for number, paths in enumerate(of_class.values())
        ),
    )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise ConfigError(f"The image {path} of the table: {error.strerror}.") from None
