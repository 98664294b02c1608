"""Profile a training step on the CPU and write a Chrome trace of it.

Not with_stack=True: there torch 2.6 crashes on Python 3.13, as shipped too (pytorch#148273).
"""

import json
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

model = torch.nn.Linear(64, 64)
options = {"activities": [ProfilerActivity.CPU], "record_shapes": True, "profile_memory": True}
with profile(**options) as profiler, record_function("step"):
    model(torch.randn(8, 64)).sum().backward()

names = {event.key for event in profiler.key_averages()}
assert {"step", "aten::addmm"} <= names, names
with tempfile.TemporaryDirectory() as folder:
    trace = Path(folder) / "trace.json"
    profiler.export_chrome_trace(str(trace))
    assert any(
        event.get("name") == "aten::addmm" for event in json.loads(trace.read_text())["traceEvents"]
    )
