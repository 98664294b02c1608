"""One model in one precision, in the container: `inside MODEL PRECISION SECONDS`."""

import copy
import sys
from collections.abc import Callable
from statistics import median

import torch
from amptrain import BufferGuard, MicroBatch, PrecisionConfig, backward, resolve_precision, update
from amptrain.model import SmallCNN
from amptrain.precision import has_bf16
from torch import Tensor, nn
from torch.optim import AdamW

from benchmarks.paired import interleave, ratio, timed

DEVICE = torch.device("cpu")
LR = 1e-3
Step = Callable[[], object]
READS = ("item", "tolist", "__bool__", "__float__", "__int__")


def model_and_batch(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """The model in channels_last, and one batch of noise."""
    import torchvision

    if name == "small_cnn":
        model: nn.Module = SmallCNN(1, 10)
        shape, classes = (64, 1, 8, 8), 10
    elif name == "resnet18":
        model, shape, classes = torchvision.models.resnet18(num_classes=10), (32, 3, 64, 64), 10
    elif name == "resnet50":
        model, shape, classes = torchvision.models.resnet50(), (8, 3, 224, 224), 1000
    else:
        import timm

        model, shape, classes = timm.create_model("vit_small_patch16_224"), (8, 3, 224, 224), 1000
    images = torch.randn(shape).to(memory_format=torch.channels_last)
    labels = torch.randint(classes, shape[:1])
    return model.to(memory_format=torch.channels_last).train(), images, labels


def optimizer_of(model: nn.Module) -> AdamW:
    """The same for all."""
    return AdamW(model.parameters(), lr=LR, fused=True)


def bare(model: nn.Module, images: Tensor, labels: Tensor, precision: str) -> Step:
    """The shortest loop that is right."""
    optimizer, loss_fn = optimizer_of(model), nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            loss = loss_fn(model(images), labels)
        loss.backward()
        optimizer.step()

    return step


def ours(model: nn.Module, images: Tensor, labels: Tensor, precision: str) -> Step:
    """amptrain's two halves, with the outcome of the step before read between them."""
    optimizer, loss_fn = optimizer_of(model), nn.CrossEntropyLoss()
    kind = resolve_precision(PrecisionConfig(precision=precision), DEVICE)
    guard = BufferGuard(model)
    batches = [MicroBatch(inputs=images, targets=labels, loss_weight=1.0, last=True)]
    pending = []

    def step() -> None:
        gradients = backward(model, optimizer, kind, batches, loss_fn=loss_fn, guard=guard)
        if pending:
            pending.pop().read()
        pending.append(update(optimizer, kind, gradients, guard=guard, learning_rate=LR))

    return step


def fabric(model: nn.Module, images: Tensor, labels: Tensor, precision: str) -> Step:
    """Lightning Fabric."""
    from lightning_fabric import Fabric  # type: ignore[import-not-found]

    name = "bf16-mixed" if precision == "bf16" else "32-true"
    helper = Fabric(accelerator="cpu", devices=1, precision=name)
    helper.launch()
    wrapped, optimizer = helper.setup(model, optimizer_of(model))
    loss_fn = nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad()
        with helper.autocast():
            loss = loss_fn(wrapped(images), labels)
        helper.backward(loss)
        optimizer.step()

    return step


def accelerate(model: nn.Module, images: Tensor, labels: Tensor, precision: str) -> Step:
    """Accelerate."""
    from accelerate import Accelerator  # type: ignore[import-not-found]

    helper = Accelerator(cpu=True, mixed_precision="bf16" if precision == "bf16" else "no")
    wrapped, optimizer = helper.prepare(model, optimizer_of(model))
    loss_fn = nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad()
        with helper.autocast():
            loss = loss_fn(wrapped(images), labels)
        helper.backward(loss)
        optimizer.step()

    return step


def timm_way(model: nn.Module, images: Tensor, labels: Tensor, precision: str) -> Step:
    """As timm's train.py: the loss read at each step for its meter."""
    from timm.utils import AverageMeter  # type: ignore[import-not-found]

    meter = AverageMeter()
    optimizer, loss_fn = optimizer_of(model), nn.CrossEntropyLoss()

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            loss = loss_fn(model(images), labels)
        loss.backward()
        optimizer.step()
        meter.update(loss.item(), images.size(0))
        optimizer.zero_grad()

    return step


def torchvision_way(model: nn.Module, images: Tensor, labels: Tensor, precision: str) -> Step:
    """As torchvision's reference script: loss and two accuracies read at each step."""
    optimizer, loss_fn = optimizer_of(model), nn.CrossEntropyLoss()
    seen = [0.0, 0.0, 0.0]

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            output = model(images)
            loss = loss_fn(output, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.inference_mode():
            right = output.topk(5, 1)[1].t().eq(labels[None])
            seen[0] += loss.item()
            seen[1] += right[:1].flatten().sum(dtype=torch.float32).item()
            seen[2] += right[:5].flatten().sum(dtype=torch.float32).item()

    return step


WAYS = {
    "bare loop": bare,
    "bare loop, once more": bare,  # what differs between two loops that are the same
    "amptrain": ours,
    "Lightning Fabric": fabric,
    "Accelerate": accelerate,
    "timm's way": timm_way,
    "torchvision's way": torchvision_way,
}


def reads(step: Step) -> int:
    """How often a step asks for a tensor's value on the host, whoever asks."""
    count = 0
    originals = {name: getattr(torch.Tensor, name) for name in READS}

    def counted(original: Callable[..., object]) -> Callable[..., object]:
        def read(*arguments: object) -> object:
            nonlocal count
            count += 1
            return original(*arguments)

        return read

    for name, original in originals.items():
        setattr(torch.Tensor, name, counted(original))
    try:
        step()
    finally:
        for name, original in originals.items():
            setattr(torch.Tensor, name, original)
    return count


def main(name: str, precision: str, seconds: float) -> None:
    """Measure, and print one table."""
    if precision == "bf16" and not has_bf16(DEVICE):
        print(f"{name}: this CPU has no bf16.\n")
        return
    threads = 1  # on a machine shared with others, threads wait for each other
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model, images, labels = model_and_batch(name)
    steps = {
        way: make(copy.deepcopy(model), images, labels, precision) for way, make in WAYS.items()
    }
    torch.set_num_threads(threads)  # a peer may have set its own
    times = interleave({way: timed(step) for way, step in steps.items()}, seconds, 20000)
    base = times["bare loop"]
    size = "×".join(map(str, images.shape))
    print(f"{name}, {size}, {precision}, {threads} thread, {len(base)} rounds\n")
    print("| step | ms, median | to the bare loop (95 %) | µs more | reads |")
    print("| --- | ---: | --- | ---: | ---: |")
    for way, taken in times.items():
        more = median(t - b for t, b in zip(taken, base, strict=True)) * 1e6
        told = "1" if way == "bare loop" else str(ratio(base, taken))
        print(f"| {way} | {median(taken) * 1e3:.2f} | {told} | {more:.0f} | {reads(steps[way])} |")
    print(flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
