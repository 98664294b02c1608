"""What a training program does, seen through torch's hooks while it runs.

Nothing here makes the host wait for the device in a step: what is on the device is counted there,
and read when the program ends, and every 10 seconds for one that will be killed. Loaded by its
file, so it imports nothing of amptrain."""

import functools
import json
import os
import site
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.amp.autocast_mode import autocast
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter

READS = (
    *("item", "tolist", "cpu", "numpy"),
    *("__bool__", "__int__", "__float__", "__format__", "__repr__"),
)
"""Methods of a tensor that need its values on the host."""
SAMPLE = 64
"""Every how many steps types and gradients are looked at, besides steps 1, 2, 4, 8 …"""
WRITE_EVERY = 10.0
"""Seconds between two records."""

LIBRARIES = tuple(
    {
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *(*site.getsitepackages(), site.getusersitepackages()),
        str(Path(torch.__file__).parent),
        str(Path(__file__).resolve().parents[1]),
        "<frozen",
    }
)

Where = tuple[str, int]
"""File and line."""


@functools.cache
def is_users(file: str) -> bool:
    """Whether code in `file` is the user's: not Python's, not an installed package's, not ours."""
    return not file.startswith(LIBRARIES)


def users_place(frame: FrameType | None) -> Where:
    """The innermost of the user's lines that are being executed."""
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return "", 1


class Watch:
    """Watches this process from `start()` to `end()`, which writes a record into `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.pid = folder, os.getpid()
        self.undo: list[Callable[[], None]] = []
        self.steps: dict[int, int] = {}  # of each optimizer, by its id
        self.most = 0  # steps of the one that has most
        self.place: Where = ("", 1)
        self.device = ""
        self.dtypes: dict[str, int] = {}
        self.autocast: str | None = None
        self.norms: list[tuple[int, Tensor]] = []  # sampled norms of gradients, on the device
        self.nonfinite: tuple[int, float] | None = None
        self.scaled = 0
        self.in_scaler = False
        self.skipped: Tensor | None = None
        self.scale: Tensor | None = None
        self.lowest: Tensor | None = None
        self.reads: dict[Where, list[Any]] = {}  # steps with a read there, last of them, its name
        self.began = self.ended = self.written = 0.0
        self.loading = False
        self.waited = self.waited_before = self.waited_by_end = 0.0
        self.waits: dict[Where, float] = {}

    def start(self) -> None:
        """Set the hooks."""
        hook = register_optimizer_step_pre_hook(self._before_step)
        self.undo.append(hook.remove)
        for name in READS:
            self._wrap(Tensor, name, self._reading)
        self._wrap(autocast, "__enter__", self._entering)
        self._wrap(GradScaler, "step", self._scaler_stepping)
        self._wrap(GradScaler, "update", self._scaler_updating)
        self._wrap(_BaseDataLoaderIter, "__next__", self._loading)

    def stop(self) -> None:
        """Take the hooks away."""
        while self.undo:
            self.undo.pop()()

    def end(self) -> None:
        """Stop, and write the record. A process forked from this one does nothing."""
        if os.getpid() != self.pid:
            return
        self.stop()
        if self.most:
            self._write()

    def _wrap(self, owner: type, name: str, make: Callable[[Any], Any]) -> None:
        original, own = getattr(owner, name), name in vars(owner)
        wrapper = functools.wraps(original)(make(original))
        setattr(owner, name, wrapper)

        def put_back() -> None:
            if own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)

        self.undo.append(put_back)

    # Steps

    def _before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if not self.in_scaler:  # where it is, a step that is skipped may not come here
            self._count(optimizer, scaled=False)

    def _count(self, optimizer: Optimizer, scaled: bool) -> None:
        number = self.steps.get(id(optimizer), 0) + 1
        self.steps[id(optimizer)] = number
        if number & (number - 1) == 0 or number % SAMPLE == 0:
            # With found_inf, which GradScaler sets, its kernel leaves out what is not finite.
            self._sample(optimizer, number, scaled or hasattr(optimizer, "found_inf"))
        now = time.perf_counter()
        if self.most == 0:
            self.place = users_place(sys._getframe(2))
            self.began, self.waited_before, self.written = now, self.waited, now
            self.waits.clear()
        if number > self.most:
            self.most, self.ended = number, now
            self.waited_by_end = self.waited
        if now - self.written > WRITE_EVERY:
            self._write()

    def _sample(self, optimizer: Optimizer, number: int, scaled: bool) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if number == 1:
            for parameter in parameters:
                name = str(parameter.dtype).removeprefix("torch.")
                self.dtypes[name] = self.dtypes.get(name, 0) + 1
                self.device = self.device or parameter.device.type
        gradients = [p.grad for p in parameters if p.grad is not None and not p.grad.is_sparse]
        if scaled or not gradients:  # the scaler looks itself
            return
        with torch.no_grad():
            one = gradients[0].device
            norms = [norm.float().to(one) for norm in torch._foreach_norm(gradients)]
            self.norms.append((number, torch.stack(norms).sum()))

    # The scaler

    def _scaler_stepping(self, original: Any) -> Any:
        def step(scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if not scaler.is_enabled():
                return original(scaler, optimizer, *args, **kwargs)
            self.scaled += 1
            self._count(optimizer, scaled=True)
            self.in_scaler = True
            try:
                result = original(scaler, optimizer, *args, **kwargs)
            finally:
                self.in_scaler = False
            with torch.no_grad():
                for found in scaler._found_inf_per_device(optimizer).values():
                    skip = (found != 0).reshape(())
                    self.skipped = skip + (0 if self.skipped is None else self.skipped)
                    break  # step() makes them agree
            return result

        return step

    def _scaler_updating(self, original: Any) -> Any:
        def update(scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
            result = original(scaler, *args, **kwargs)
            scale = scaler._get_scale_async()  # get_scale() would make the host wait
            if scaler.is_enabled() and scale is not None:
                self.scale = scale
                self.lowest = (
                    scale.clone() if self.lowest is None else torch.minimum(self.lowest, scale)
                )
            return result

        return update

    def _entering(self, original: Any) -> Any:
        def enter(context: Any) -> Any:
            result = original(context)
            if torch.is_grad_enabled() and torch.is_autocast_enabled(context.device):
                self.autocast = str(torch.get_autocast_dtype(context.device))[6:]
            return result

        return enter

    # What makes the host wait

    def _reading(self, original: Any) -> Any:
        name = original.__name__

        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.most and not self.loading and tensor.device.type == self.device:
                frame = sys._getframe(1)
                if is_users(frame.f_code.co_filename):
                    self._count_read((frame.f_code.co_filename, frame.f_lineno), name)
            return original(tensor, *args, **kwargs)

        return read

    def _count_read(self, where: Where, name: str) -> None:
        seen = self.reads.setdefault(where, [0, -1, name])
        if seen[1] != self.most:  # a line counts once a step, a validation once
            seen[0] += 1
            seen[1] = self.most

    def _loading(self, original: Any) -> Any:
        main = threading.main_thread()

        def following(iterator: Any) -> Any:
            if self.loading or threading.current_thread() is not main:
                return original(iterator)
            self.loading = True
            began = time.perf_counter()
            try:
                return original(iterator)
            finally:
                self.loading = False
                seconds = time.perf_counter() - began
                self.waited += seconds
                where = users_place(sys._getframe(1))
                self.waits[where] = self.waits.get(where, 0.0) + seconds

        return following

    # The record

    def _write(self) -> None:
        self.written = time.perf_counter()
        record = json.dumps(self._record())
        path = self.folder / f"{self.pid}.json"
        path.with_suffix(".new").write_text(record)
        path.with_suffix(".new").replace(path)

    def _record(self) -> dict[str, Any]:
        for number, norm in self.norms:
            value = float(norm.double())
            if self.nonfinite is None and value - value != 0:
                self.nonfinite = number, value
        self.norms.clear()
        scaler = None
        if self.scaled:
            scaler = {
                "steps": self.scaled,
                "skipped": 0 if self.skipped is None else int(self.skipped),
                "scale": None if self.scale is None else float(self.scale),
                "lowest": None if self.lowest is None else float(self.lowest),
            }
        return {
            "steps": self.most,
            "place": self.place,
            "device": self.device,
            "dtypes": self.dtypes,
            "autocast": self.autocast,
            "nonfinite": self.nonfinite,
            "scaler": scaler,
            "reads": [[*where, seen[2], seen[0]] for where, seen in self.reads.items()],
            "seconds": self.ended - self.began,
            "waited": self.waited_by_end - self.waited_before,
            "waits": [[*where, seconds] for where, seconds in self.waits.items()],
        }
