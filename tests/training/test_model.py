"""The shipped model."""

from collections.abc import Iterator

import pytest
import torch
from amptrain.model import QuarterMeans, SmallCNN
from torch import nn


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("size", [(1, 1), (1, 4), (2, 2), (3, 5), (4, 4), (7, 16)])
def test_deterministic_quarter_means_are_those_of_adaptive_pooling(size: tuple[int, int]) -> None:
    images = torch.randn(3, 4, *size, dtype=torch.float64, requires_grad=True)
    means = QuarterMeans()(images)
    torch.testing.assert_close(means, nn.AdaptiveAvgPool2d(2)(images))
    expand = means.grad_fn
    assert expand is not None
    assert "AvgPool2D" in str(expand.next_functions[0][0])
    assert "Adaptive" not in str(expand.next_functions[0][0])


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
def test_the_small_model_trains_with_deterministic_algorithms() -> None:
    model = SmallCNN(3, 10).cuda()
    model(torch.randn(4, 3, 32, 32, device="cuda")).sum().backward()
