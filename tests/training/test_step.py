"""The AMP step: nothing moves on a skip, gradients are true, the host does not wait."""

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from amptrain.config import OptimConfig, PrecisionConfig
from amptrain.ema import Ema
from amptrain.optim import build_optimizer
from amptrain.precision import Precision, resolve_precision
from amptrain.step import BufferGuard, MicroBatch, PendingOutcome, backward, update
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

CPU = torch.device("cpu")
OPTIMIZERS = [(name, fused) for name in ("sgd", "adamw") for fused in (True, False)]


class Net(nn.Module):
    """With BatchNorm, so that there are buffers to spoil."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(8 * 36, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(images))
        return logits


class Run:
    """A model and all that moves in a step."""

    def __init__(
        self, precision: str, optimizer: str = "sgd", fused: bool = True, **settings: Any
    ) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = Net()
        self.optimizer = build_optimizer(
            self.model, OptimConfig(optimizer=optimizer, fused=fused, lr=0.01)
        )
        self.precision: Precision = resolve_precision(
            PrecisionConfig(precision=precision, **settings), CPU
        )
        self.ema = Ema(self.model)
        self.guard = BufferGuard(self.model)

    def step(
        self, images: Tensor, micro: int = 1, lr: float = 0.01, clip_norm: float | None = None
    ) -> PendingOutcome:
        gradients = backward(
            self.model,
            self.optimizer,
            self.precision,
            self.micro_batches(images, micro),
            loss_fn=cross_entropy,
            guard=self.guard,
        )
        outcome = update(
            self.optimizer,
            self.precision,
            gradients,
            guard=self.guard,
            learning_rate=lr,
            max_grad_norm=clip_norm,
        )
        self.ema.update(self.model, 0.9, outcome.found_inf)
        return outcome

    def micro_batches(self, images: Tensor, micro: int) -> Iterator[MicroBatch]:
        labels = torch.arange(len(images)) % 10
        parts = list(zip(images.tensor_split(micro), labels.tensor_split(micro), strict=True))
        for number, (part, part_labels) in enumerate(parts):
            weight, last = len(part) / len(images), number == micro - 1
            yield MicroBatch(inputs=part, targets=part_labels, loss_weight=weight, last=last)

    def all_that_moves(self) -> dict[str, Tensor]:
        """Copies of weights, buffers, averages and the optimizer's state."""
        state = {f"model.{k}": v for k, v in self.model.state_dict().items()}
        state |= {f"ema.{k}": v for k, v in self.ema.model.state_dict().items()}
        for number, values in self.optimizer.state_dict()["state"].items():
            state |= {
                f"optimizer.{number}.{k}": torch.as_tensor(v)
                for k, v in values.items()
                if v is not None
            }
        return {name: value.clone() for name, value in state.items()}


def images(seed: int, count: int = 20) -> Tensor:
    return torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(seed))


def overflowing(seed: int = 0) -> Tensor:
    bad = images(seed)
    bad[3, 0, 4, 4] = math.inf
    return bad


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize(("optimizer", "fused"), OPTIMIZERS)
@pytest.mark.parametrize("good_steps", [0, 2])
def test_nothing_moves_on_a_skip(
    precision: str, optimizer: str, fused: bool, good_steps: int
) -> None:
    """Weights, BatchNorm buffers, EMA, optimizer: as before the step, and the next steps as if it
    had not been."""
    skipping, never = (Run(precision, optimizer, fused) for _ in range(2))
    for run in (skipping, never):
        for seed in range(good_steps):
            assert not run.step(images(seed)).read().skipped
    before = skipping.all_that_moves()
    outcome = skipping.step(overflowing()).read()
    assert outcome.skipped
    after = skipping.all_that_moves()
    for name, value in before.items():
        assert torch.equal(value, after[name]), name
    if (
        precision == "fp16"
    ):  # the scale is the one thing that may differ, and it is a power of 2: exact
        assert (outcome.scale_before, outcome.scale_after) == (2.0**16, 2.0**15)
        never.precision.load_state_dict({"scale": 2.0**15, "_growth_tracker": 0})
    for seed in range(10, 13):
        for run in (skipping, never):
            assert not run.step(images(seed)).read().skipped
    expected = never.all_that_moves()
    for name, value in skipping.all_that_moves().items():
        assert torch.equal(value, expected[name]), name


def test_batchnorm_is_spoiled_without_the_guard() -> None:
    """The reason for BufferGuard (pytorch#90342); if torch mends it, this says so."""
    run = Run("fp16")
    run.guard = BufferGuard(nn.Linear(1, 1))
    assert run.step(overflowing()).read().skipped
    assert not all(torch.isfinite(buffer).all() for buffer in run.model.buffers())


@pytest.mark.parametrize("fused", [True, False])
def test_outcome_names_the_first_parameter_that_is_not_finite(fused: bool) -> None:
    run = Run("fp16", fused=fused)
    run.model.get_parameter("head.weight").register_hook(lambda gradient: gradient * math.nan)
    assert run.step(images(0)).read().nonfinite_parameter == "head.weight"


def test_where_only_the_norm_of_all_overflows_the_largest_is_named() -> None:
    run = Run("fp32")
    names = [name for name, _ in run.model.named_parameters()]
    for name, parameter in run.model.named_parameters():
        norm = 1.8e19 if name == names[2] else 1.5e19  # their squares are near FP32's largest
        each = norm / math.sqrt(parameter.numel())
        parameter.register_hook(lambda gradient, each=each: torch.full_like(gradient, each))
    outcome = run.step(images(0)).read()
    assert (outcome.skipped, outcome.nonfinite_parameter) == (True, names[2])


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_good_step_says_so(precision: str) -> None:
    outcome = Run(precision).step(images(0)).read()
    assert not outcome.skipped
    assert outcome.nonfinite_parameter is None
    assert outcome.scale_before == outcome.scale_after == (2.0**16 if precision == "fp16" else 1.0)
    assert outcome.loss == pytest.approx(math.log(10), rel=0.3)


def test_grad_norm_is_that_of_the_true_gradient() -> None:
    """Whatever the loss scale, and before clipping."""
    run = Run("fp32")
    cross_entropy(run.model(images(0)), torch.arange(20) % 10).backward()
    true = math.sqrt(
        sum(
            float((p.grad.double() ** 2).sum())
            for p in run.model.parameters()
            if p.grad is not None
        )
    )
    for precision, scale in (("fp32", 1.0), ("fp16", 2.0**16), ("fp16", 2.0**6)):
        settings = {"init_scale": scale} if precision == "fp16" else {}
        norm = Run(precision, **settings).step(images(0), clip_norm=1e-3).read().grad_norm
        assert norm == pytest.approx(true, rel=1e-6 if precision == "fp32" else 2e-2)


def test_clipping_is_of_true_gradients() -> None:
    """Clipped while scaled, the step would be 65536 times too small (pytorch/examples#1196)."""
    run = Run("fp16")
    for group in run.optimizer.param_groups:
        group.update(momentum=0.0, nesterov=False, weight_decay=0.0)
    run.optimizer.state.clear()
    before = copy.deepcopy(run.model)
    run.step(images(0), lr=1.0, clip_norm=0.25)
    moved = [a - b for a, b in zip(before.parameters(), run.model.parameters(), strict=True)]
    norm = torch.linalg.vector_norm(torch.cat([difference.flatten() for difference in moved]))
    assert float(norm.detach()) == pytest.approx(0.25, rel=1e-3)


def test_growth_and_backoff_do_not_change_the_update() -> None:
    """Scale updated before unscaling would halve the gradient on growth steps (deepspeed PR
    8588)."""
    growing, fixed = (
        Run("fp16", growth_interval=2, init_scale=2.0**4),
        Run("fp16", init_scale=2.0**4),
    )
    scales = set()
    for seed in range(8):
        for run in (growing, fixed):
            outcome = run.step(images(seed)).read()
        scales.add(growing.precision.loss_scale.item())
        assert not outcome.skipped
    assert len(scales) >= 4
    for one, other in zip(growing.model.parameters(), fixed.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(("count", "micro"), [(20, 4), (18, 4)])
def test_accumulation_gives_the_same_step(count: int, micro: int) -> None:
    """Also of micro-batches that differ in size, as in the last window of an epoch."""
    whole, parts = Run("fp32"), Run("fp32")
    for run in (whole, parts):
        run.model.eval()  # BatchNorm's statistics are of each micro-batch
    one, other = whole.step(images(0, count)).read(), parts.step(images(0, count), micro).read()
    assert other.loss == pytest.approx(one.loss, rel=1e-5)
    for a, b in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_the_backward_half_moves_no_weight_and_the_rate_is_that_of_each_group() -> None:
    """One rate for all groups would move a backbone as fast as a new head, silently."""
    run = Run("fp32")
    for group, scale in zip(run.optimizer.param_groups, (1.0, 0.0), strict=True):
        group["lr_scale"] = scale
    before = copy.deepcopy(run.model.state_dict())
    batches = run.micro_batches(images(0), 1)
    gradients = backward(
        run.model,
        run.optimizer,
        run.precision,
        batches,
        loss_fn=cross_entropy,
        guard=run.guard,
    )
    for name, parameter in run.model.named_parameters():
        assert torch.equal(parameter, before[name])
    update(run.optimizer, run.precision, gradients, guard=run.guard, learning_rate=0.5)
    assert [group["lr"] for group in run.optimizer.param_groups] == [0.5, 0.0]
    moved = {n for n, p in run.model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {"body.0.weight", "head.weight"}  # those of the group of matrices


class Words(nn.Module):
    """An embedding, whose gradient may be a sparse one."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8, sparse=sparse)
        self.head = nn.Linear(8, 3)

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embedding(words).mean(1))
        return logits


def words_step(*, sparse: bool, precision: str, scale: float = 1.0) -> tuple[nn.Module, Any]:
    """One clipped SGD step of two micro-batches, in which words come more than once."""
    torch.manual_seed(0)
    model = Words(sparse)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kind = resolve_precision(PrecisionConfig(precision=precision, init_scale=1024.0), CPU)
    guard = BufferGuard(model)
    batches = [
        MicroBatch(
            inputs=torch.tensor([[1, 2, 2], [2, 7, part]]),
            targets=torch.tensor([0, 2]),
            loss_weight=0.5 * scale,
            last=part == 1,
        )
        for part in range(2)
    ]
    gradients = backward(model, optimizer, kind, batches, loss_fn=cross_entropy, guard=guard)
    outcome = update(optimizer, kind, gradients, guard=guard, learning_rate=0.1, max_grad_norm=0.01)
    return model, outcome.read()


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_sparse_gradients_make_the_step_of_dense_ones(precision: str) -> None:
    (dense, told), (sparse, of_sparse) = (
        words_step(sparse=kind, precision=precision) for kind in (False, True)
    )
    assert of_sparse.grad_norm == pytest.approx(told.grad_norm, rel=1e-3)
    assert told.grad_norm > 0.1  # so it was clipped
    for own, other in zip(sparse.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-6)
    before, _ = words_step(sparse=True, precision=precision, scale=math.inf)
    after, outcome = words_step(sparse=True, precision=precision, scale=math.nan)
    assert (outcome.skipped, outcome.nonfinite_parameter) == (True, "embedding.weight")
    torch.manual_seed(0)
    for model in (before, after):
        for own, other in zip(model.parameters(), Words(True).parameters(), strict=True):
            assert torch.equal(own, other)
        torch.manual_seed(0)


class Waits(TorchDispatchMode):
    """Counts the operations that on CUDA make the host wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in {
            "_local_scalar_dense",
            "item",
            "nonzero",
            "is_nonzero",
            "equal",
        }:
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_host_does_not_wait_in_a_step(
    precision: str, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the fused optimizers, over a good and a skipped step, with clipping, EMA and
    accumulation."""
    run = Run(precision, optimizer)
    run.step(images(0))
    with Waits() as waits:
        run.step(images(1), micro=2, clip_norm=1.0)
        outcome = run.step(overflowing(), clip_norm=1.0)
    assert waits.seen == []
    assert outcome.read().skipped


def test_the_count_of_waits_sees_one() -> None:
    run = Run("fp16", fused=False)  # torch's scaler reads found_inf on the host for this one
    with Waits() as waits:
        run.step(images(0))
    assert waits.seen
