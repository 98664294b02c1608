"""Learning rate, EMA: functions of the step."""

import pytest
import torch
from amptrain.ema import Ema
from amptrain.schedule import ema_decay, learning_rate
from torch import nn

SETTINGS = {"peak": 2.0, "warmup": 4, "total": 24}


def test_learning_rate_warms_up_and_falls_as_a_cosine_to_nothing() -> None:
    rates = [learning_rate(step, **SETTINGS) for step in range(25)]
    assert rates[:5] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])
    assert rates[14] == pytest.approx(1.0)  # half-way down
    assert rates[24] == pytest.approx(0.0)
    assert rates[4:] == sorted(rates[4:], reverse=True)


def test_learning_rate_past_the_end_stays_at_nothing_and_may_have_no_warmup() -> None:
    assert learning_rate(99, **SETTINGS) == pytest.approx(0.0)
    assert learning_rate(0, peak=2.0, warmup=0, total=1) == 2.0


def test_ema_decay_rises_to_its_setting() -> None:
    assert [ema_decay(step, decay=0.9) for step in (0, 10, 1000)] == pytest.approx([0.1, 0.55, 0.9])


def test_ema_follows_the_weights_and_takes_buffers() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    ema = Ema(model)
    start = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
        for buffer in model.buffers():
            buffer.add_(3)
    ema.update(model, 0.75, torch.zeros(()))
    for average, old in zip(ema.model.parameters(), start, strict=True):
        torch.testing.assert_close(average, old + 0.25)
    for average, buffer in zip(ema.model.buffers(), model.buffers(), strict=True):
        assert torch.equal(average, buffer)
    before = [parameter.clone() for parameter in ema.model.parameters()]
    ema.update(model, 0.75, torch.ones(()))
    assert all(torch.equal(a, b) for a, b in zip(before, ema.model.parameters(), strict=True))
