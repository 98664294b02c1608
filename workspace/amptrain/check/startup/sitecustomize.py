"""Python runs this at its start, in a program under `amptrain check --run`: this folder is then the
first of PYTHONPATH. It watches torch as soon as the program has imported it, and no sooner: the
program may set variables that torch reads at import."""

import atexit
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent


class AfterTorch:
    """Stands before Python's own finders until torch is imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Torch's spec, with the watch begun after its module has run."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.loader is None:
            return spec
        loader, execute = spec.loader, spec.loader.exec_module

        def execute_and_watch(module: ModuleType) -> None:
            execute(module)
            begin()

        loader.exec_module = execute_and_watch  # type: ignore[method-assign]
        return spec


def begin() -> None:
    """Watch this process, until it ends."""
    # By its file: amptrain's folder on sys.path could hide a package of the program's.
    watch = run(importlib.util.spec_from_file_location("amptrain_watch", HERE.parent / "watch.py"))
    watching = watch.Watch(Path(os.environ["AMPTRAIN_WATCH"]))
    watching.start()
    atexit.register(watching.end)


def run(spec: ModuleSpec | None) -> ModuleType:
    """The module of a spec, run."""
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)
    spec.loader.exec_module(module)
    return module


sys.path[:] = [folder for folder in sys.path if Path(folder).resolve() != HERE]
if "AMPTRAIN_WATCH" in os.environ:
    sys.meta_path.insert(0, AfterTorch())
if (hidden := PathFinder.find_spec("sitecustomize", sys.path)) is not None:
    run(hidden)  # this machine's own
