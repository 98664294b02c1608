"""A class for each pixel: a small segmentation model, with micro-batches and averaged weights.

    python segmentation.py [--steps 60] [--run-dir runs/segmentation]

Ctrl-C stops it with a checkpoint; the same command continues, bit for bit.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from amptrain import (
    BufferGuard,
    CheckpointStore,
    Ema,
    MicroBatch,
    PrecisionConfig,
    StopSignal,
    backward,
    ema_decay,
    resolve_precision,
    update,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

SIZE, BATCH, MICRO_BATCHES = 24, 16, 2


def model_of(classes: int = 2) -> nn.Module:
    """Input (n, 1, height, width), output (n, classes, height, width) logits."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=2, dilation=2),
        nn.ReLU(),
        nn.Conv2d(16, classes, 1),
    )


def pictures(step: int) -> tuple[Tensor, Tensor]:
    """Noisy pictures of a bright square, and which pixels are its own: a pure function of the
    step."""
    generator = torch.Generator().manual_seed(step)
    masks = torch.zeros(BATCH, SIZE, SIZE, dtype=torch.int64)
    for mask, (top, left) in zip(
        masks, torch.randint(SIZE - 8, (BATCH, 2), generator=generator).tolist(), strict=True
    ):
        mask[top : top + 8, left : left + 8] = 1
    noise = torch.randn(BATCH, 1, SIZE, SIZE, generator=generator)
    return masks.unsqueeze(1).float() + 0.5 * noise, masks


def micro_batches(step: int, device: torch.device) -> Iterator[MicroBatch]:
    """The step in two parts, which need half the memory and give the same step."""
    images, masks = pictures(step)
    parts = zip(images.chunk(MICRO_BATCHES), masks.chunk(MICRO_BATCHES), strict=True)
    for number, (inputs, targets) in enumerate(parts, start=1):
        yield MicroBatch(
            inputs=inputs.to(device),
            targets=targets.to(device),
            loss_weight=len(inputs) / BATCH,
            last=number == MICRO_BATCHES,
        )


@torch.no_grad()
def found(model: nn.Module, device: torch.device) -> float:
    """Intersection over union of the squares, on pictures that were not trained on."""
    images, masks = pictures(-1)
    predicted = model(images.to(device)).argmax(1).cpu() == 1
    true = masks == 1
    return float((predicted & true).sum() / (predicted | true).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/segmentation"))
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    precision = resolve_precision(PrecisionConfig(), device)
    precision.configure()
    torch.manual_seed(0)
    model = precision.convert(model_of().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ema, guard = Ema(model), BufferGuard(model)
    store = CheckpointStore(options.run_dir, needed=["model", "ema", "optimizer", "scaler"])
    start = 0
    loaded = store.load_latest()
    if loaded is not None:
        start = loaded.step
        model.load_state_dict(loaded.state["model"])
        ema.model.load_state_dict(loaded.state["ema"])
        optimizer.load_state_dict(loaded.state["optimizer"])
        precision.load_state_dict(loaded.state["scaler"])
    with StopSignal() as stop:
        for step in range(start, options.steps):
            gradients = backward(
                model,
                optimizer,
                precision,
                micro_batches(step, device),
                loss_fn=cross_entropy,
                guard=guard,
            )
            pending = update(optimizer, precision, gradients, guard=guard, learning_rate=1e-2)
            ema.update(model, ema_decay(step, decay=0.95), pending.found_inf)
            if (step + 1) % 20 == 0:
                loss = pending.read().loss
                print(
                    f"step {step + 1}: loss {loss:.3f}, IoU {found(ema.model, device):.3f}",
                    flush=True,
                )
            if stop.number is not None or step + 1 == options.steps:
                store.save(
                    {
                        "model": model.state_dict(),
                        "ema": ema.model.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "scaler": precision.state_dict(),
                    },
                    step + 1,
                )
                return


if __name__ == "__main__":
    main()
