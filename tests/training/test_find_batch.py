"""`amptrain find-batch`: real trials, each in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest
from amptrain.cli import main
from amptrain.config import OptimConfig, TrainConfig
from amptrain.trials.find_batch import advice
from amptrain.trials.search import RESOLUTION, fewest_micro_batches, largest_fitting

OWN = """
import os, torch

class Net(torch.nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.head = torch.nn.Linear(64, classes)

    def forward(self, images):
        if images.device.type == "cpu" and len(images) > {most}:
            {beyond}
        return self.head(images.flatten(1))

def net(num_classes):
    return Net(num_classes)
"""
KILLED = "os.kill(os.getpid(), 9)"  # as the kernel does it


def own_model(folder: Path, most: int, beyond: str) -> str:
    (folder / "own.py").write_text(OWN.format(most=most, beyond=beyond))
    return f"{folder}/own.py:net"


@pytest.mark.parametrize("true", [*range(2, 70), 100, 1000])
def test_the_search_is_near_and_never_above(true: int) -> None:
    trials: list[int] = []

    def fits(size: int) -> bool:
        trials.append(size)
        return size <= true

    found = largest_fitting(fits, start=2, cap=4096)
    assert true - max(1, true // RESOLUTION) < found <= true
    assert len(trials) == len(set(trials)) <= 2 * true.bit_length() + 2
    assert largest_fitting(lambda size: size <= true, start=2, cap=true) == true


def test_nothing_is_found_where_nothing_fits() -> None:
    assert largest_fitting(lambda size: False, start=8, cap=64) == 0
    assert largest_fitting(lambda size: size < 3, start=64, cap=64) == 2


def test_a_step_is_split_into_the_fewest_equal_parts() -> None:
    assert fewest_micro_batches(64, 64) == 1
    assert fewest_micro_batches(64, 63) == 2
    assert fewest_micro_batches(60, 13) == 5
    assert fewest_micro_batches(62, 30) == 31
    assert fewest_micro_batches(61, 30) is None  # a prime


@pytest.mark.parametrize("largest", [2, 3, 5, 17, 40, 64, 1000])
@pytest.mark.parametrize("batch", [64, 62, 96, 61, 127, 5])
def test_the_flags_fit_and_keep_the_global_batch_where_they_can(batch: int, largest: int) -> None:
    text = advice(TrainConfig(optim=OptimConfig(global_batch_size=batch)), largest)
    words = text.splitlines()[0].split()
    total, parts = int(words[2]), int(words[4])
    assert OptimConfig(global_batch_size=total, grad_accum_steps=parts)
    assert 2 <= total // parts <= largest
    assert batch - largest < total <= batch
    assert (total != batch) == ("another training" in text)


def test_a_trial_that_is_killed_or_refused_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = own_model(tmp_path, 2, f"torch.empty(2**50) if len(images) == 3 else {KILLED}")
    flags = [f"--model={model}", "--precision=fp32", "--device=cpu", "--max-batch=4"]
    assert main(["find-batch", *flags, "--global-batch-size=12"]) == 0
    told = capsys.readouterr().out
    rows = [line.split(" | ") for line in told.splitlines() if line.startswith("| ")][2:]
    assert [(row[0], row[1]) for row in rows] == [("| 2", "yes"), ("| 4", "no"), ("| 3", "no")]
    assert rows[1][2] == "killed by SIGKILL, likely by the kernel for want of memory |"
    assert rows[2][2] == "no memory for 4294967296 MiB more |"
    assert "The largest micro-batch that fits: 2 images (to one part in 32).\n" in told
    assert "Flags: --global-batch-size 12 --grad-accum-steps 6\n" in told


def test_where_not_even_two_images_fit_it_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = own_model(tmp_path, 1, KILLED)
    flags = [f"--model={model}", "--precision=fp32", "--device=cpu"]
    assert main(["find-batch", *flags]) == 1
    assert "Not even 2 images fit: killed by SIGKILL" in capsys.readouterr().err


def test_settings_that_cannot_be_are_told_as_in_training(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["find-batch", "--max-batch=1"]) == 2
    assert "--max-batch is 1; it needs to be at least 2." in capsys.readouterr().err
    assert main(["find-batch", "--model=resnet5O", "--device=cpu"]) == 2
    assert "resnet50" in capsys.readouterr().err


def test_memory_above_the_limit_is_refused_in_words() -> None:
    """RLIMIT_DATA, so that torch raises and the kernel need not kill."""
    code = (
        "import torch; from amptrain.memory import held, is_out_of_memory, told_at\n"
        "with told_at(held('RssAnon') + 2**28):\n"
        "    small = torch.ones(2**24)\n"
        "    try: torch.ones(2**28)\n"
        "    except RuntimeError as error: print('refused', is_out_of_memory(error))\n"
        "print(len(torch.ones(2**28)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["refused True", str(2**28)]
