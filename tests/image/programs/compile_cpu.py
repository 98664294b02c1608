"""Compile a model with inductor, compare it to eager in both directions, and print the libraries it
built."""

import getpass
import os
import tempfile
from pathlib import Path

cache = os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()

import torch  # behind the folder, which inductor reads at import
from torch import nn

assert (
    getpass.getuser() == "dev"
)  # inductor names its cache folder so, and fails for a uid without a name
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.GELU())
inputs = torch.randn(8, 16, requires_grad=True)
compiled = torch.compile(model, fullgraph=True)

output = compiled(inputs)
(gradient,) = torch.autograd.grad(output.sum(), inputs)
expected = model(inputs)
torch.testing.assert_close(output, expected)
torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), inputs)[0])
print(*(path.name for path in Path(cache).rglob("*.so")), sep="\n")
