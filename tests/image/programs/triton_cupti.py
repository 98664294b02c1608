"""Triton's profiler finds CUPTI where it looks for it, and it is the one torch brings."""

import ctypes
from pathlib import Path

import triton
import triton.profiler as proton

folder = Path(triton.__file__).parent / "backends" / "nvidia" / "lib" / "cupti"
for name in ("libcupti.so", "libcupti.so.12"):
    library = folder / name
    assert library.resolve().parts[-4:-1] == ("nvidia", "cuda_cupti", "lib"), library.resolve()
    version = ctypes.c_uint32()
    assert ctypes.CDLL(str(library)).cuptiGetVersion(ctypes.byref(version)) == 0
    assert version.value > 0

assert callable(proton.start)
