"""The kinds of data sets: one file each, named for the word before the colon in --data.

Each file has `USAGE`, one line for people, and `open(argument, config, seed)`, which returns the
Dataset; `argument` is what follows the colon. It may have `check(argument)`, which raises
ConfigError for an argument that cannot be, without a look at the disk. A new kind is a new file
here, and nothing else.
"""

import difflib
import importlib
import pkgutil
import re
from pathlib import Path
from typing import Any

from amptrain.errors import ConfigError


def kinds() -> list[str]:
    """The words that --data may begin with, found by their files alone: nothing is imported."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def split(data: str) -> tuple[str, str]:
    """(kind, argument) of --data; `module:function` and `file.py:function` are of the kind
    function. Raises ConfigError for a kind that is not known."""
    kind, _, argument = data.partition(":")
    if kind in kinds():
        return kind, argument
    near = difflib.get_close_matches(kind, kinds(), 1)
    if re.fullmatch(r"(.*\.py|[\w.]+):[A-Za-z_]\w*", data) and not near:
        return "function", data
    path = Path(data).expanduser()
    if path.exists():
        near = [f"{'imagefolder' if path.is_dir() else 'table'}:{data}"]
    hint = f" Do you mean {near[0]}?" if near else ""
    raise ConfigError(f"--data is {data!r}; it needs to be one of {usages()}.{hint}")


def check(data: str) -> None:
    """Raise ConfigError for a --data that cannot be."""
    kind, argument = split(data)
    if data == "digits":  # the default; any other imports what it needs, torch too
        return
    module = module_of(kind)
    if (":" in module.USAGE) != bool(argument):
        raise ConfigError(f"--data is {data!r}; it needs to be {module.USAGE}.")
    if hasattr(module, "check"):
        module.check(argument)


def usages() -> str:
    """All kinds with what follows the colon."""
    return ", ".join(module_of(kind).USAGE for kind in kinds())


def module_of(kind: str) -> Any:
    """The file of `kind`, imported."""
    return importlib.import_module(f"{__name__}.{kind}")
