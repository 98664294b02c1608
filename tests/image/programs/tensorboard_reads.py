"""Write scalars as a training run does, start TensorBoard on them, and ask its server for the
values."""

import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from typing import Any

from torch.utils.tensorboard import SummaryWriter

with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]


def ask(path: str) -> Any:
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as reply:
                answer = json.load(reply)
            if answer:
                return answer
        except (urllib.error.URLError, ConnectionError):
            pass
        assert time.monotonic() < deadline, f"no answer at {path}"
        time.sleep(0.2)


with tempfile.TemporaryDirectory() as folder:
    with SummaryWriter(folder) as writer:
        for step in range(3):
            writer.add_scalar("loss", 1.0 / (step + 1), step)
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", folder, "--port", str(port)]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert list(ask("/data/plugin/scalars/tags")["."]) == ["loss"]
        values = [value for _, _, value in ask("/data/plugin/scalars/scalars?run=.&tag=loss")]
        assert [round(value, 3) for value in values] == [1.0, 0.5, 0.333]
    finally:
        server.terminate()
        server.wait(20)
