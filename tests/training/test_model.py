"""The shipped model."""

import pytest
import torch
from amptrain.model import QuarterMeans, SmallCNN
from torch import nn


@pytest.mark.parametrize("size", [(1, 1), (1, 4), (2, 2), (3, 5), (4, 4), (7, 16)])
def test_quarter_means_are_those_of_adaptive_pooling(size: tuple[int, int]) -> None:
    images = torch.randn(3, 4, *size, dtype=torch.float64)
    expected = nn.AdaptiveAvgPool2d(2)(images)
    torch.testing.assert_close(QuarterMeans()(images), expected)


def test_the_small_model_has_no_adaptive_pooling() -> None:
    """Its backward pass on CUDA has no deterministic way."""
    adaptive = [part for part in SmallCNN(3, 10).modules() if "Adaptive" in type(part).__name__]
    assert adaptive == []


@pytest.mark.gpu
def test_the_small_model_trains_with_deterministic_algorithms() -> None:
    model = SmallCNN(3, 10).cuda()
    torch.use_deterministic_algorithms(True)
    try:
        model(torch.randn(4, 3, 32, 32, device="cuda")).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
