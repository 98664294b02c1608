"""What only a GPU can show."""

from collections.abc import Callable

import pytest
import torch
from amptrain.config import TrainConfig
from amptrain.distributed import Processes
from amptrain.errors import ConfigError
from amptrain.signals import StopSignal
from amptrain.train import Trainer, train

from .support import Spoiled, records
from .test_resume import assert_same, everything, run_to

Make = Callable[..., TrainConfig]
pytestmark = pytest.mark.gpu


def cuda_trainer(config: TrainConfig, steps: frozenset[int] = frozenset()) -> Trainer:
    config.run_dir.mkdir(parents=True, exist_ok=True)
    trainer = Spoiled(config, Processes("cuda"), StopSignal())
    trainer.steps = steps
    return trainer


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("fused", [True, False])
def test_digits_trains_in_each_precision(precision: str, fused: bool, make_config: Make) -> None:
    config = make_config(device="cuda", precision=precision, fused=fused, epochs=20, batch_size=64)
    try:
        assert train(config) == 0
    except ConfigError as error:
        pytest.skip(str(error))  # TF32 on a GPU older than Ampere
    assert records(config, "epoch")[-1]["val_accuracy"] >= 0.97
    assert records(config, "window")[-1]["memory_allocated"] > 0


@pytest.mark.parametrize("fused", [True, False])
def test_a_skip_moves_nothing(fused: bool, make_config: Make) -> None:
    trainer = cuda_trainer(
        make_config(device="cuda", precision="fp16", fused=fused), frozenset({0, 5})
    )
    assert trainer.fit()
    assert trainer.state.progress.optimizer_steps == 10
    assert all(
        bool(torch.isfinite(value).all()) for value in trainer.state.model.state_dict().values()
    )


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_host_waits_only_for_the_step_before(
    precision: str, make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's own count of waits is an error in the step; events, which the outcome is read with,
    are not among them."""
    trainer = cuda_trainer(
        make_config(device="cuda", precision=precision, ema_decay=0.9, clip_norm=1.0)
    )
    step = Trainer._train_step

    def watched(self: Trainer, number: int) -> None:
        torch.cuda.set_sync_debug_mode("error" if number > 2 else "default")
        try:
            step(self, number)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Trainer, "_train_step", watched)
    assert trainer.fit()


def test_continued_is_bit_for_bit_the_run_never_stopped(make_config: Make) -> None:
    settings = {"precision": "fp16", "deterministic": True, "accumulate": 2}
    whole = run_to(make_config(name="whole", device="cuda", **settings), 99, device="cuda")
    part = run_to(make_config(device="cuda", **settings), 5, device="cuda")
    assert part.state.progress.step == 5
    part = run_to(make_config(device="cuda", **settings), 99, device="cuda")
    assert_same(everything(part), everything(whole))
