"""A transformer that learns to go on with a text, letter by letter: a loop of one's own.

    python text_transformer.py [--steps 60] [--run-dir runs/text]

Ctrl-C stops it with a checkpoint; the same command continues, bit for bit.
"""

import argparse
from pathlib import Path

import torch
from amptrain import (
    BufferGuard,
    CheckpointStore,
    MicroBatch,
    PrecisionConfig,
    StopSignal,
    backward,
    learning_rate,
    resolve_precision,
    update,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

TEXT = "the quick brown fox jumps over the lazy dog. " * 40
LETTERS = sorted(set(TEXT))
DATA = torch.tensor([LETTERS.index(letter) for letter in TEXT])
LENGTH, BATCH = 32, 16


class Transformer(nn.Module):
    """Input (n, length) letters as int64, output (n, length, letters) logits of the next ones."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.letter = nn.Embedding(len(LETTERS), width)
        self.position = nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(width, len(LETTERS))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, letters: Tensor) -> Tensor:
        places = torch.arange(letters.shape[1], device=letters.device)
        hidden = self.body(self.letter(letters) + self.position(places), mask=self.mask)
        logits: Tensor = self.head(hidden)
        return logits


def batch_of(step: int, device: torch.device) -> MicroBatch:
    """A pure function of the step: a run that continues sees what it would have seen."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(DATA) - LENGTH - 1, (BATCH,), generator=generator)
    rows = torch.stack([DATA[start : start + LENGTH + 1] for start in starts]).to(device)
    return MicroBatch(inputs=rows[:, :-1], targets=rows[:, 1:], loss_weight=1.0, last=True)


def loss_of(logits: Tensor, letters: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), letters.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/text"))
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    precision = resolve_precision(PrecisionConfig(), device)
    precision.configure()
    torch.manual_seed(0)
    model = precision.convert(Transformer().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    guard = BufferGuard(model)
    store = CheckpointStore(options.run_dir, needed=["model", "optimizer", "scaler", "moved"])
    start, moved = 0, 0  # steps done, and those that moved the weights
    loaded = store.load_latest()
    if loaded is not None:
        start, moved = loaded.step, loaded.state["moved"]
        model.load_state_dict(loaded.state["model"])
        optimizer.load_state_dict(loaded.state["optimizer"])
        precision.load_state_dict(loaded.state["scaler"])
    with StopSignal() as stop:
        for step in range(start, options.steps):
            gradients = backward(
                model,
                optimizer,
                precision,
                [batch_of(step, device)],
                loss_fn=loss_of,
                guard=guard,
            )
            rate = learning_rate(moved, peak=3e-3, warmup=10, total=options.steps)
            outcome = update(
                optimizer, precision, gradients, guard=guard, learning_rate=rate, max_grad_norm=1.0
            ).read()
            moved += not outcome.skipped
            if (step + 1) % 10 == 0:
                print(f"step {step + 1}: loss {outcome.loss:.3f}", flush=True)
            if stop.number is not None or step + 1 == options.steps:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                store.save({**state, "scaler": precision.state_dict(), "moved": moved}, step + 1)
                return


if __name__ == "__main__":
    main()
