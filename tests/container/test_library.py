"""docs/library.md: its loop runs as it stands, around a model, a loss and batches of one's own."""

import re

from tests.support import IMAGE, ROOT, docker

GIVEN = """
import torch
from torch import nn

torch.manual_seed(0)

class MyModel(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))

my_loss = nn.CrossEntropyLoss()
points = torch.randn(64, 4)
batches = [(points, (points.sum(1) > 0).long())] * 500
"""
TOLD = """
assert not outcome.skipped and outcome.loss < 0.1, outcome
import amptrain
missing = [name for name in amptrain.__all__ if not hasattr(amptrain, name)]
print("loss", outcome.loss, "missing", missing)
"""


def test_the_loop_of_the_page_learns() -> None:
    page = (ROOT / "docs/library.md").read_text("utf-8")
    loop = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    mount = f"--volume={ROOT}/workspace:/workspace:ro"
    command = ["run", "--rm", "--interactive", mount, "--workdir=/workspace", IMAGE, "python", "-"]
    said = docker(*command, text_input=GIVEN + loop + TOLD)
    assert "missing []" in said
