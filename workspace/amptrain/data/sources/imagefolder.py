"""A folder of images, one folder a class: looked at before the first step, and told."""

import os
from pathlib import Path

from amptrain.config import DataConfig
from amptrain.data.datasets import VAL_FRACTION, Dataset, file_dataset, hold_out
from amptrain.data.files import FileList
from amptrain.data.look import counter
from amptrain.data.scan import Seen, find_images, holds_image, image_endings, subfolders
from amptrain.errors import ConfigError
from amptrain.words import counted

USAGE = "imagefolder:PATH (with train/CLASS/ and val/CLASS/, or only CLASS/)"
TRAIN = ("train", "training")
VALIDATION = ("val", "valid", "validation", "test")
"""Names of the folder to validate with, the first that is there; Roboflow exports valid/
(ultralytics/ultralytics#21311)."""


def open(argument: str, config: DataConfig, seed: int) -> Dataset:
    """`argument` is the folder. Raises ConfigError with what is there in place of what is
    needed."""
    root = Path(argument).expanduser()
    seen = Seen()
    messages: list[str] = []
    train, validation = _parts(root, seen)
    train, classes = _class_folders(train, seen, messages)
    files = _read_part(train, classes, seen, must_have_images=True)
    if validation is None:
        fraction = VAL_FRACTION if config.val_fraction is None else config.val_fraction
        kept, held = hold_out(files.labels, fraction, seed)
        train_files, val_files = files.select(kept), files.select(held)
        messages.append(
            f"{root} has no folder for validation: {fraction:.0%} of each class are held out "
            "(--val-fraction)."
        )
    else:
        if config.val_fraction is not None:
            raise ConfigError(
                f"--val-fraction is for data without a folder for validation; there is {validation}"
                ". Leave the flag out, or move that folder away."
            )
        train_files, val_files = files, _validation_files(validation, classes, seen, messages)
        if validation.name.lower() == "test":
            messages.append(f"{root} has no val/: validation is on {validation}.")
    return file_dataset(
        config, seed, classes, train_files, val_files, [*messages, *seen.sentences()]
    )


def _parts(root: Path, seen: Seen) -> tuple[Path, Path | None]:
    """(folder with the classes to train on, the same to validate with). None where there is
    none."""
    if not root.is_dir():
        what = "is not a folder" if root.exists() else "is missing"
        raise ConfigError(
            f"The folder {root} {what}; imagefolder needs {root}/train/CLASS/ and "
            f"{root}/val/CLASS/, or "
            f"{root}/CLASS/."
        )
    below = subfolders(root, seen)
    by_name = {name.lower(): name for name in reversed(below)}
    train = next((by_name[name] for name in TRAIN if name in by_name), None)
    validation = next((by_name[name] for name in VALIDATION if name in by_name), None)
    if train is not None:
        return root / train, None if validation is None else root / validation
    if validation is not None:
        raise ConfigError(
            f"The folder {root}/train is missing; imagefolder needs train/CLASS/ beside "
            f"{validation}/. {root} has {_some(below)}."
        )
    if len(below) == 1 and not holds_image(root):
        inside = {name.lower() for name in subfolders(root / below[0])}
        if inside & {*TRAIN, *VALIDATION}:
            return _parts(root / below[0], seen)  # the folder a zip file made
    return root, None


def _class_folders(folder: Path, seen: Seen, messages: list[str]) -> tuple[Path, list[str]]:
    """(folder, names of its class folders). One folder that only holds folders is passed
    through: its folders are the classes (easezyc/deep-transfer-learning#4)."""
    classes = subfolders(folder, seen)
    if not classes:
        images, _ = find_images(os.fspath(folder), Seen())
        raise ConfigError(
            f"{folder} has no class folders"
            + (f", but {counted(len(images), 'image')}. " if images else ". ")
            + "Each class needs a folder of its own in it."
        )
    if len(classes) == 1:
        inner = folder / classes[0]
        if len(subfolders(inner)) >= 2 and not holds_image(inner):
            messages.append(f"The classes are the folders in {inner}.")
            return inner, subfolders(inner)
        raise ConfigError(
            f"{folder} has one class only, {classes[0]}/: there is nothing to tell apart. A class "
            "for what is none of it, such as other/, would do."
        )
    return folder, classes


def _read_part(folder: Path, classes: list[str], seen: Seen, *, must_have_images: bool) -> FileList:
    def part(label: int, name: str) -> tuple[list[str], list[int], int]:
        below = folder / name
        paths: list[str] = []
        sizes: list[int] = []
        if below.is_dir():
            paths, sizes = find_images(os.fspath(below), seen, tell)
        if must_have_images and not paths:
            raise ConfigError(
                f"The class {below} has no image; it needs at least one file that ends in "
                f"{', '.join(sorted(image_endings()))}. Add images or remove the folder."
                + "".join(f" {sentence}" for sentence in seen.sentences())
            )
        return [f"{name}/{path}" for path in paths], sizes, label

    with counter(f"Looking for images in {folder}") as tell:
        return FileList(
            os.fspath(folder), (part(label, name) for label, name in enumerate(classes))
        )


def _validation_files(
    folder: Path, classes: list[str], seen: Seen, messages: list[str]
) -> FileList:
    own = subfolders(folder, seen)
    if len(own) == 1 and own[0] not in classes:
        folder, own = _class_folders(folder, seen, messages)
    unknown = sorted(set(own) - set(classes))
    if unknown:
        raise ConfigError(
            f"{folder} and the folder for training have different classes: {_some(unknown)} "
            f"{'is' if len(unknown) == 1 else 'are'} only there. A model that was never shown a "
            "class cannot be validated with it."
        )
    return _read_part(folder, classes, seen, must_have_images=False)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more if names else "no folder"
