"""Load every library of torch and NVIDIA into one process and print their names as JSON."""

import ctypes
import json
from pathlib import Path

import torch

site_packages = Path(torch.__file__).parent.parent
patterns = (
    "nvidia/*/lib/*.so*",
    "cusparselt/lib/*.so*",
    "torch/lib/*.so*",
    "triton/backends/nvidia/lib/cupti/*.so",
)
loaded = []
for pattern in patterns:
    found = sorted(site_packages.glob(pattern))
    assert found, pattern
    for path in found:
        if (
            path.name == "libcaffe2_nvrtc.so"
        ):  # links the driver's libcuda.so.1, which only a GPU host has
            continue
        ctypes.CDLL(str(path))
        loaded.append(path.name)
print(json.dumps(loaded))
