"""The same training run twice: once left alone, once killed again and again."""

import hashlib
import json
import random
import subprocess
import time
from dataclasses import dataclass, field

from host.build import IMAGE

LIMITS = ("--cpus=2", "--memory=6g", "--shm-size=1g")
RUN = ("train", "--name=soak", "--log-every=1", "--save-every=10", "--epochs=1000")
COMPARED = ("step", "epoch", "loss", "lr", "scale", "grad_norm")


@dataclass
class Run:
    """One run of training in a volume of its own, however many containers it takes."""

    client: str
    name: str
    steps: int
    kills: int = 0
    seconds: float = 0
    errors: list[str] = field(default_factory=list)

    def train(self, deadline: float, kill: bool = False) -> None:
        """Train to the end; with `kill`, SIGKILL after 6 to 15 s of each start, until `deadline`
        (time.monotonic)."""
        begin, moments = time.monotonic(), random.Random(0)
        while True:
            wait_s = moments.uniform(6, 15)
            if not kill or time.monotonic() + wait_s > deadline:
                wait_s = 1800
            command = [*self.docker_run(), *RUN, f"--max-steps={self.steps}"]
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as one:
                try:
                    said, _ = one.communicate(timeout=wait_s)
                    break
                except subprocess.TimeoutExpired:
                    subprocess.run([self.client, "kill", self.name], check=False, timeout=60)
                    one.communicate()
                    self.kills += 1
        self.seconds = time.monotonic() - begin
        if one.returncode:
            self.errors.append(said.decode(errors="replace")[-2000:])

    def docker_run(self) -> list[str]:
        """The command up to the words of the container."""
        volume = f"--volume={self.name}:/workspace"
        return [self.client, "run", "--rm", "--name", self.name, *LIMITS, volume, IMAGE]

    def curve(self) -> list[tuple[object, ...]]:
        """Step, loss, rate and gradient norm of each step, as they stand in metrics.jsonl."""
        lines = self.read("metrics.jsonl").decode().splitlines()
        windows = [line for line in map(json.loads, lines) if line["kind"] == "window"]
        return [tuple(window[name] for name in COMPARED) for window in windows]

    def weights(self) -> str:
        """SHA-256 of the finished model."""
        return hashlib.sha256(self.read("model.safetensors")).hexdigest()

    def read(self, file: str) -> bytes:
        """A file of the run directory."""
        command = [*self.docker_run(), "cat", f"/workspace/runs/soak/{file}"]
        return subprocess.run(command, check=True, capture_output=True).stdout

    def remove(self) -> None:
        """Remove container and volume."""
        for what in (["rm", "--force", self.name], ["volume", "rm", "--force", self.name]):
            subprocess.run([self.client, *what], check=False, capture_output=True)
