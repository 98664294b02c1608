"""The precisions: one file each, named for the word that follows --precision.

Each file has one subclass of `Precision`, named for the file: fp16.py has Fp16. A new precision is
a new file here, and nothing else.
"""

import pkgutil


def precision_names() -> list[str]:
    """The words that --precision may have, found by their files alone: nothing is imported."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))
