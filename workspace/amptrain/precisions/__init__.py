"""The precisions: one file each, named for the word that follows --precision.

Each file has one subclass of `Precision`, named for the file: fp16.py has Fp16. A new precision is
a new file here, and nothing else.
"""

import pkgutil
import re


def precision_names() -> list[str]:
    """The words that --precision may have, widest first, found by their files alone: nothing is
    imported."""
    return sorted((module.name for module in pkgutil.iter_modules(__path__)), key=_narrowness)


def _narrowness(name: str) -> tuple[int, str]:
    bits = re.search(r"\d+", name)
    return -int(bits[0] if bits else 0), name
