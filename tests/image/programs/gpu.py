"""On a real GPU: convolution in fp16 and bf16 by autocast, a loss that falls, the right cuDNN, a
compiled kernel."""

from pathlib import Path

import torch
from torch import nn

assert torch.cuda.is_available(), "torch sees no GPU"
torch.manual_seed(0)
images = torch.randn(256, 3, 32, 32, device="cuda")
labels = torch.randint(10, (256,), device="cuda")
for dtype in (torch.float16, torch.bfloat16):
    layers = (
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(512, 10),
    )
    model = nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype is torch.float16)
    losses = []
    for _ in range(60):
        with torch.autocast("cuda", dtype=dtype):
            output = model(images)
            loss = nn.functional.cross_entropy(output, labels)
        assert output.dtype is dtype
        assert loss.dtype is torch.float32
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0], losses

maps = Path("/proc/self/maps").read_text().splitlines()
cudnn = {line.split()[-1] for line in maps if "cudnn" in line}
assert any("libcudnn_engines" in path for path in cudnn), (
    cudnn
)  # opened by name at the first convolution
assert all("/site-packages/nvidia/cudnn/lib/" in path for path in cudnn), cudnn

compiled = torch.compile(lambda x: torch.sin(x) + torch.cos(x))
values = torch.randn(1000, device="cuda")
torch.testing.assert_close(compiled(values), torch.sin(values) + torch.cos(values))
