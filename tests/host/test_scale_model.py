"""The arithmetic of docs/scale.md: its limits, and numbers one can do by hand."""

import math
import subprocess
import sys

import pytest

from benchmarks.scale import model
from host.versions import ROOT

BILLION = model.Model(1e9)
FAST = model.Network(bandwidth=100e9, latency=10e-6)


def test_one_rank_communicates_nothing() -> None:
    assert model.ring_all_reduce(1e9, 1, FAST) == 0
    assert model.step(BILLION, 0.5, 1, FAST) == model.Step(0.5, 0, 0)


def test_all_reduce_by_hand() -> None:
    # 4 ranks, 1 GB: 6 messages of 250 MB; 2 Gbit each at 100 Gbit/s are 20 ms, and 10 µs.
    assert model.ring_all_reduce(1e9, 4, FAST) == pytest.approx(6 * (0.020 + 10e-6))


def test_doubled_bandwidth_halves_what_bandwidth_costs() -> None:
    slow, fast = model.Network(1e9, 0), model.Network(2e9, 0)
    assert model.ring_all_reduce(1e9, 8, slow) == 2 * model.ring_all_reduce(1e9, 8, fast)


def test_many_ranks_send_twice_the_data_and_pay_latency_for_each() -> None:
    assert model.ring_all_reduce(1e9, 10**6, model.Network(8e9, 0)) == pytest.approx(2, rel=1e-5)
    only_latency = model.Network(math.inf, 1e-6)
    assert model.ring_all_reduce(1e9, 1025, only_latency) == pytest.approx(2048e-6)


def test_bf16_gradients_are_half_of_fp32() -> None:
    assert model.Model(1e9, 2).gradients * 2 == BILLION.gradients


@pytest.mark.parametrize("gradients", [4e3, 102e6, 4e9])
def test_buckets_hold_all_gradients(gradients: float) -> None:
    sizes = model.bucket_sizes(gradients)
    assert sum(sizes) == pytest.approx(gradients)
    assert max(sizes) <= 25 * 2**20


def test_overlap_hides_all_but_the_last_bucket_on_a_fast_network() -> None:
    fast = model.Network(1e15, 0)
    sizes = model.bucket_sizes(BILLION.gradients)
    last = model.ring_all_reduce(sizes[-1], 8, fast)
    assert model.step(BILLION, 1, 8, fast).exposed == pytest.approx(last, abs=1e-9)


def test_overlap_hides_at_most_the_backward_pass() -> None:
    slow = model.Network(1e9, 0)
    hidden, shown = (model.step(BILLION, 1, 8, slow, overlap=way) for way in (True, False))
    assert shown.exposed == pytest.approx(shown.communication)
    assert 0 < shown.exposed - hidden.exposed <= 2 / 3


def test_a_checkpoint_with_adam_and_ema_is_16_bytes_a_parameter() -> None:
    assert model.checkpoint_bytes(1e9, 4) == 16e9


def test_young_s_interval_loses_least() -> None:
    best = model.checkpoint_interval(20, 3600)
    assert best == pytest.approx(math.sqrt(2 * 20 * 3600))
    loss = [model.lost_fraction(best * part, 20, 60, 3600) for part in (0.9, 1, 1.1)]
    assert loss[1] == min(loss)


def test_twice_the_nodes_fail_twice_as_often() -> None:
    assert model.mean_time_between_failures(50_000, 1000) == 50


def tables(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.scale", *flags]
    return subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)


def test_tables_take_one_s_own_numbers() -> None:
    flags = ("--model=resnet50", "--nodes", "1", "--gpus-per-node=1", "--compute=0.25")
    done = tables(*flags)
    assert "| 1 | 1 | 0.000 | 0.000 | 0.250 | 100% |" in done.stdout, done.stderr


@pytest.mark.parametrize("flag", ["--bandwidth=0", "--nodes=0", "--model=large", "--compute=-1"])
def test_numbers_that_are_none_are_named(flag: str) -> None:
    done = tables(flag)
    assert done.returncode == 2
    assert flag.split("=", maxsplit=1)[0] in done.stderr
    assert "Traceback" not in done.stderr
