"""The registry of modes. A file in this folder is one mode, and holds it as MODE.

Everything else asks here: the start, the health check, the doctor, error texts and the host's
`make`. The host runs Python 3.10 and has no package installed.
"""

import importlib
from collections.abc import Sequence
from pathlib import Path

from entrypoints.mode import Mode
from entrypoints.modes.program import MODE as PROGRAM

ORDER = ("jupyter", "ssh", "train", "doctor")  # in messages; a new one comes after them


def _found() -> list[Mode]:
    names = [file.stem for file in sorted(Path(__file__).parent.glob("*.py"))]
    modules = [
        importlib.import_module(f"{__name__}.{name}") for name in names if name != "__init__"
    ]
    modes: list[Mode] = [module.MODE for module in modules]
    named = [mode for mode in modes if mode is not PROGRAM]
    rank = {name: position for position, name in enumerate(ORDER)}
    return sorted(named, key=lambda mode: rank.get(mode.name, len(rank)))


NAMED: Sequence[Mode] = _found()  # those that a word picks
MODES: Sequence[Mode] = (*NAMED, PROGRAM)  # the last claims what no other does


def claimed_by(words: Sequence[str]) -> Mode:
    """The mode that the container's command means."""
    return next(mode for mode in MODES if mode.claims(words))


def named(name: str) -> Mode:
    """The mode of this name."""
    return next(mode for mode in MODES if mode.name == name)
