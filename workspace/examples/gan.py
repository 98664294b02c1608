"""Two models, two optimizers, two loss scales: a GAN that learns a ring of points.

    python gan.py [--steps 200] [--run-dir runs/gan]

Ctrl-C stops it with a checkpoint; the same command continues, bit for bit.
"""

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from amptrain import (
    BufferGuard,
    CheckpointStore,
    MicroBatch,
    Precision,
    PrecisionConfig,
    StopSignal,
    backward,
    resolve_precision,
    update,
)
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

BATCH, NOISE = 64, 8


class Player:
    """A model with all that its steps need. Each has a precision of its own: fp16 gives each its
    own loss scale."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.precision: Precision = resolve_precision(PrecisionConfig(), device)
        self.precision.configure()
        self.model = self.precision.convert(model.to(device))
        self.optimizer = torch.optim.Adam(model.parameters(), betas=(0.5, 0.99), fused=True)
        self.guard = BufferGuard(model)

    def step(self, whole: nn.Module, inputs: Tensor, targets: Tensor) -> float:
        """One step of this player's weights through `whole`, of which its model is a part."""
        batch = MicroBatch(inputs=inputs, targets=targets, loss_weight=1.0, last=True)
        gradients = backward(
            whole,
            self.optimizer,
            self.precision,
            [batch],
            loss_fn=binary_cross_entropy_with_logits,
            guard=self.guard,
        )
        return (
            update(self.optimizer, self.precision, gradients, guard=self.guard, learning_rate=1e-3)
            .read()
            .loss
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.precision.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.precision.load_state_dict(state["scaler"])


def mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, outputs))


def drawn(step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Points of the ring, and noise: a pure function of the step."""
    generator = torch.Generator().manual_seed(step)
    angle = 2 * math.pi * torch.rand(BATCH, generator=generator)
    noise = torch.randn(BATCH, NOISE, generator=generator)
    return torch.stack([angle.cos(), angle.sin()], 1).to(device), noise.to(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/gan"))
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    generator, critic = Player(mlp(NOISE, 2), device), Player(mlp(2, 1), device)
    both = nn.Sequential(generator.model, critic.model)
    store = CheckpointStore(options.run_dir, needed=["generator", "critic"])
    loaded = store.load_latest()
    if loaded is not None:
        generator.load_state_dict(loaded.state["generator"])
        critic.load_state_dict(loaded.state["critic"])
    start = 0 if loaded is None else loaded.step
    real, fake = torch.ones(BATCH, 1, device=device), torch.zeros(BATCH, 1, device=device)
    with StopSignal() as stop:
        for step in range(start, options.steps):
            points, noise = drawn(step, device)
            with torch.no_grad():
                made = generator.model(noise)
            seen = critic.step(critic.model, torch.cat([points, made]), torch.cat([real, fake]))
            critic.model.requires_grad_(False)  # it judges, and does not learn, in this half
            fooled = generator.step(both, noise, real)
            critic.model.requires_grad_(True)
            if (step + 1) % 50 == 0:
                print(f"step {step + 1}: critic {seen:.3f}, generator {fooled:.3f}", flush=True)
            if stop.number is not None or step + 1 == options.steps:
                players = {"generator": generator.state_dict(), "critic": critic.state_dict()}
                store.save(players, step + 1)
                return


if __name__ == "__main__":
    main()
