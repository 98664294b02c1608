"""Which images make which step."""

from itertools import chain, product

import numpy as np
import pytest
from amptrain.data.order import Order, TrainBatches, ValidationBatches
from amptrain.errors import ConfigError

SPLITS = [(1, 1), (4, 1), (1, 2), (2, 2), (1, 4)]


def epoch_of(order: Order, epoch: int) -> list[int]:
    steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
    return [int(index) for step in steps for index in order.step(step)[1]]


def test_each_epoch_has_all_images_once_in_an_order_of_its_own() -> None:
    order = Order(103, 16, seed=1)
    first, second = epoch_of(order, 0), epoch_of(order, 1)
    assert sorted(first) == sorted(second) == list(range(103))
    assert first != second
    assert first == epoch_of(Order(103, 16, seed=1), 0)
    assert first != epoch_of(Order(103, 16, seed=2), 0)


@pytest.mark.parametrize(("accumulate", "world_size"), SPLITS)
def test_processes_and_micro_batches_share_the_same_steps(accumulate: int, world_size: int) -> None:
    """Disjoint, complete, and weighted so that the step is the mean over its images; the last,
    short step too."""
    whole, split = (
        Order(106, 16, seed=1),
        Order(106, 16, seed=1, accumulate=accumulate, world_size=world_size),
    )
    assert split.steps_per_epoch == whole.steps_per_epoch == 7
    for step in range(14):
        ranks = [split.micro_batches(step, rank) for rank in range(world_size)]
        assert len({len(parts) for parts in ranks}) == 1  # as many exchanges in each process
        indices = [key[1] for parts in ranks for keys, *_ in parts for key in keys]
        epoch, expected = whole.step(step)
        assert sorted(indices) == sorted(int(index) for index in expected)
        assert {key[0] for parts in ranks for keys, *_ in parts for key in keys} == {epoch}
        weights = {
            key: weight / world_size / len(keys)
            for parts in ranks
            for keys, weight, _ in parts
            for key in keys
        }
        assert list(weights.values()) == pytest.approx([1 / len(expected)] * len(expected))
        assert (
            max(len(keys) for parts in ranks for keys, *_ in parts)
            <= 16 // accumulate // world_size
        )


def test_a_last_step_too_small_for_batchnorm_is_left_out() -> None:
    order = Order(35, 16, seed=0, world_size=2)
    assert (order.steps_per_epoch, len(epoch_of(order, 0))) == (2, 32)
    assert set(chain(*(epoch_of(order, epoch) for epoch in range(5)))) == set(range(35))
    assert len(epoch_of(Order(36, 16, seed=0, world_size=2), 0)) == 36


def test_a_batch_that_cannot_be_split_is_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of 3 processes × 2 micro-batches"):
        Order(100, 16, seed=0, accumulate=2, world_size=3)
    with pytest.raises(ConfigError, match="needs to be at least 12"):
        Order(100, 6, seed=0, accumulate=2, world_size=3)
    with pytest.raises(ConfigError, match="1 image to train on: a step"):
        Order(1, 16, seed=0)


@pytest.mark.parametrize("accumulate", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_process_has_two_images_or_more_in_each_micro_batch(
    accumulate: int, world_size: int
) -> None:
    """BatchNorm has no variance of one, and a process without an image nothing to exchange; no
    micro-batch is larger than the memory was planned for."""
    for each, images in product((2, 3, 4), range(40, 90)):
        batch = each * accumulate * world_size
        if images < batch:
            continue
        order = Order(images, batch, seed=0, accumulate=accumulate, world_size=world_size)
        sizes: set[int] = set()
        for rank in range(world_size):
            last = order.micro_batches(order.steps_per_epoch - 1, rank)
            sizes |= {len(part.keys) for part in last}
            assert [part.last for part in last] == [*[False] * (len(last) - 1), True]
        assert 2 <= min(sizes) <= max(sizes) <= each
        assert images - order.images < 2 * world_size


def test_the_sizes_of_steps_need_no_permutation() -> None:
    order = Order(103, 16, seed=1)
    sizes = [len(order.step(step)[1]) for step in range(15)]
    assert [order.size(step) for step in range(15)] == sizes
    assert [order.images_until(step) for step in range(15)] == [sum(sizes[:n]) for n in range(15)]


def test_the_sampler_starts_at_any_step() -> None:
    order = Order(103, 16, seed=1, accumulate=2)
    whole = list(TrainBatches(order, 0, 14, rank=0))
    skip = sum(len(order.micro_batches(step)) for step in range(9))
    assert list(TrainBatches(order, 9, 14, rank=0)) == whole[skip:]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("images", [1, 7, 12, 13])
def test_validation_takes_each_image_once(images: int, world_size: int) -> None:
    ranks = [list(ValidationBatches(images, 4, rank, world_size)) for rank in range(world_size)]
    indices = [index for batches in ranks for keys, *_ in batches for _, index in keys]
    assert sorted(indices) == list(range(images))
    assert ValidationBatches(images, 4, 0, world_size).max_batches == max(map(len, ranks))
    assert np.ptp([sum(len(keys) for keys, *_ in batches) for batches in ranks]) <= 1
