"""Code of one's own, by --model, --data and --metrics: `file.py:function` or `module:function`."""

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from amptrain.errors import ConfigError

_read: dict[str, tuple[Path, int, ModuleType]] = {}
"""Files that were read, by the name of their module: path, time of change in ns, module."""


def own_function(name: str, flag: str) -> Callable[..., Any]:
    """The function that `name` means. Raises ConfigError, which begins with `flag`."""
    place, _, function = name.rpartition(":")
    try:
        if place.endswith(".py"):
            module = _module_of_file(Path(place).expanduser().resolve())
        else:
            if "" not in sys.path:
                sys.path.insert(0, "")  # the current folder, as `python -m` does
            module = importlib.import_module(place)
    except (ImportError, FileNotFoundError) as error:
        raise ConfigError(
            f"{flag} {name}: {error}. It needs file.py:function or module:function."
        ) from None
    except Exception as error:
        raise ConfigError(f"{flag} {name} cannot be read: {failure(error, place)}.") from error
    found: Callable[..., Any] | None = getattr(module, function, None)
    if not callable(found):
        names = [key for key, value in vars(module).items() if inspect.isroutine(value)]
        there = f"; there are {', '.join(names[:8])}" if names else ""
        raise ConfigError(f"{flag} {name}: {place} has no function {function!r}{there}.")
    return found


def call_own(name: str, flag: str, **given: Any) -> Any:
    """What the function that `name` means returns. Raises ConfigError, which begins with `flag`,
    with what it raised."""
    function = own_function(name, flag)
    try:
        return function(**given)
    except ConfigError:
        raise
    except Exception as error:
        place = name.rpartition(":")[0]
        raise ConfigError(f"{flag} {name} failed: {failure(error, place)}.") from error


def failure(error: Exception, place: str) -> str:
    """What was raised and in which line: the last of the file `place`, if it is among those of the
    traceback, since an error deep in a library is of a call there."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).name == Path(place).name]
    frame = (own or frames)[-1]
    where = "" if isinstance(error, SyntaxError) else f" ({frame.filename}, line {frame.lineno})"
    return f"{type(error).__name__}: {error}{where}"


def _module_of_file(path: Path) -> ModuleType:
    """The module of the file, read once for all flags, and again when it changed."""
    changed = path.stat().st_mtime_ns
    known = _read.get(path.stem)
    if known is not None and known[:2] == (path, changed):
        return known[2]
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # By its name what pickles it, such as a loader worker that is started anew, finds it again. The
    # name of a module that others use, such as random, stays theirs.
    if known is not None or path.stem not in sys.modules:
        sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    _read[path.stem] = (path, changed, module)
    return module
