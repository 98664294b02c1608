"""What a run's data consisted of, so that a run which continues notices that it changed.

Kept as `data.json` in the run directory. Names are relative, so the same data at another path is
the same data.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amptrain.data.files import FileList
from amptrain.errors import ConfigError
from amptrain.files import atomic_write
from amptrain.words import counted

NAME = "data.json"
SEVERAL = "all, of several labels,"
"""In place of a class, for images of several labels."""


def contents_of(
    classes: Sequence[str],
    train: FileList,
    validation: FileList,
    label_sets: NDArray[np.bool_] | None = None,
) -> dict[str, Any]:
    """For each part and class: how many files, a hash over their names in order, and one over names
    and sizes. Files of several labels are one entry a part, with their labels in both hashes."""
    parts = {"train": train, "validation": validation}
    if label_sets is not None:
        return {
            "classes": [_text(name) for name in classes],
            **{
                part: {SEVERAL: list(files.digests_of_all(label_sets))}
                for part, files in parts.items()
            },
        }
    return {
        "classes": [_text(name) for name in classes],
        **{
            part: {_text(name): list(files.digests(label)) for label, name in enumerate(classes)}
            for part, files in parts.items()
        },
    }


def _text(name: str) -> str:
    """`name` as JSON can hold it in any encoding."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def read(run_dir: Path) -> dict[str, Any] | None:
    """The contents that the run began with; None if they were never written."""
    try:
        found = json.loads((run_dir / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def write(run_dir: Path, contents: dict[str, Any] | None) -> None:
    """Keep `contents` beside the run."""
    if contents is not None:
        atomic_write(run_dir / NAME, json.dumps(contents, indent=1) + "\n")


def check(saved: dict[str, Any] | None, now: dict[str, Any] | None) -> list[str]:
    """Sentences on data that changed since `saved`. Raises ConfigError where it cannot go on.

    Other classes, or other files to train on, give labels or the order another meaning; other files
    to validate with give a number that cannot be compared, which is said.
    """
    if saved is None or now is None or saved == now:
        return []
    if saved["classes"] != now["classes"]:
        gone = [name for name in saved["classes"] if name not in now["classes"]]
        new = [name for name in now["classes"] if name not in saved["classes"]]
        raise ConfigError(
            f"The classes are not those this run began with: {len(saved['classes'])} then, "
            f"{len(now['classes'])} now; gone: {', '.join(gone) or 'none'}; new: "
            f"{', '.join(new) or 'none'}. Its outputs mean the old ones. Put them back, or start a "
            "new run with another --name."
        )
    if saved["train"].keys() != now["train"].keys():
        raise ConfigError(
            "The labels are not those this run began with: one of each image at one time, several "
            "or none at the other. Put them back, or start a new run with another --name."
        )
    messages = []
    for part, what in (("train", "to train on"), ("validation", "to validate with")):
        before, after = saved[part], now[part]
        if part == "train" and (named := _differences(before, after, names_only=True)):
            raise ConfigError(
                f"The training images are not those this run began with: {named}. The place in "
                "their order means something else now. Put them back, or start a new run with "
                "another --name."
            )
        if changed := _differences(before, after, names_only=False):
            messages.append(
                f"The images {what} changed since the run began: {changed}. From here on this "
                "is another run than before."
            )
    return messages


def _differences(
    saved: dict[str, list[Any]], now: dict[str, list[Any]], *, names_only: bool
) -> str:
    kept = slice(0, 2 if names_only else 3)
    changed = [name for name in now if saved[name][kept] != now[name][kept]]
    if not changed:
        return ""
    total = [sum(entry[0] for entry in part.values()) for part in (saved, now)]
    each = ", ".join(
        f"{name} {saved[name][0]} → {now[name][0]}"
        if saved[name][0] != now[name][0]
        else f"{name} {now[name][0]} with other {_kinds(name, names_only)}"
        for name in changed[:5]
    )
    more = f" and {counted(len(changed) - 5, 'more class')}" if len(changed) > 5 else ""
    return f"{counted(total[0], 'file')} then, {total[1]} now ({each}{more})"


def _kinds(name: str, names_only: bool) -> str:
    """What may differ where the number of files does not."""
    kinds = ["names"] + ["labels"] * (name == SEVERAL) + ["sizes"] * (not names_only)
    return " or ".join(kinds)
