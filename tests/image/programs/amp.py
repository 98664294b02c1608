"""Train on the digits under CPU autocast; check the dtype of every step's tensors and print the
losses as JSON."""

import json
import sys

import numpy as np
import torch
from torch import nn

dtype = getattr(torch, sys.argv[1])
torch.manual_seed(0)
with np.load("/opt/workspace/amptrain/data/datafiles/digits.npz") as digits:
    images, labels = digits["images"], digits["labels"]  # (1797, 1, 8, 8) of 0..16, and 0..9
inputs = torch.from_numpy(images.astype(np.float32) / 16).flatten(1)
targets = torch.from_numpy(labels.astype(np.int64))

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
losses = []
for _ in range(60):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=dtype):
        output = model(inputs)
        hidden = model[0](inputs)
    loss = nn.functional.cross_entropy(output.float(), targets)
    scaler.scale(loss).backward()
    assert output.dtype is dtype
    assert hidden.dtype is dtype
    assert all(
        p.dtype is torch.float32 and p.grad.dtype is torch.float32 for p in model.parameters()
    )
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())

# Autocast is rounding of the inputs, no more: what it gives is the product of the rounded tensors.
by_hand = nn.functional.linear(inputs.to(dtype), model[0].weight.to(dtype), model[0].bias.to(dtype))
with torch.autocast("cpu", dtype=dtype):
    torch.testing.assert_close(model[0](inputs), by_hand)
print(json.dumps(losses))
