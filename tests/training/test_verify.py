"""`amptrain verify-resume`: it finds runs the same that are, and those different that are not."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from amptrain import verify
from amptrain.cli import main
from amptrain.config import TrainConfig
from amptrain.errors import ConfigError, TrainingError
from amptrain.verify import differences, verify_resume

Make = Callable[..., TrainConfig]


def command(runs: Path, *flags: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "amptrain",
        "verify-resume",
        "--device",
        "cpu",
        "--runs",
        str(runs),
        *flags,
    ]


def test_runs_kills_resumes_and_compares_hashes(tmp_path: Path) -> None:
    flags = [
        "--schedule",
        "constant",
        "--ema-decay",
        "0.99",
        "--grad-accum-steps",
        "2",
        "--num-workers",
        "1",
        "--max-steps",
        "24",
    ]
    done = subprocess.run(
        command(tmp_path, *flags), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    hashes = re.findall(r"weights sha256 ([0-9a-f]{64})$", done.stdout, re.MULTILINE)
    assert len(hashes) == 2
    assert hashes[0] == hashes[1]
    assert len(re.findall(r"kill \d of 3: the newest checkpoint is step-\d+\.pt", done.stdout)) == 3
    assert done.stdout.endswith("random generators, progress.\n")
    assert list(tmp_path.iterdir()) == []


def test_a_difference_is_found_and_the_runs_are_kept(
    tmp_path: Path,
    make_config: Make,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The second run is made another one: as if its order did not continue where it was."""

    def another(config: TrainConfig, name: str) -> TrainConfig:
        from dataclasses import replace

        config = replace(config, run=replace(config.run, seed=int(name == "killed")))
        return named(config, name)

    named = verify.named
    monkeypatch.setattr(verify, "named", another)
    monkeypatch.setattr(verify, "KILLS", 0)
    assert verify_resume(make_config(max_steps=8, runs=tmp_path)) == 1
    said = capsys.readouterr().out
    assert re.search(r"NOT the same: model\.\S+weight, .*Both runs are kept in", said)
    [folder] = tmp_path.iterdir()
    assert {"whole", "killed"} <= {path.name for path in folder.iterdir()}


def test_a_run_that_fails_by_itself_is_told_with_its_words(
    tmp_path: Path, make_config: Make
) -> None:
    config = make_config(data=f"imagefolder:{tmp_path}/nothing", runs=tmp_path)
    with pytest.raises(TrainingError, match="ended with exit code 2") as caught:
        verify_resume(config)
    assert f"{tmp_path}/nothing" in str(caught.value)


def test_too_few_steps_to_be_killed_in_are_refused(make_config: Make) -> None:
    with pytest.raises(
        ConfigError, match="--max-steps 7 leaves nothing to continue; verify-resume needs 8 or more"
    ):
        verify_resume(make_config(max_steps=7))


def test_under_torchrun_it_is_refused(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="call it without torchrun"):
        verify_resume(make_config())


def test_help_is_that_of_train(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify-resume", "--help"]) == 0
    assert "amptrain verify-resume" in capsys.readouterr().out


def test_differences_are_bits() -> None:
    assert (
        differences(
            {"a": [torch.tensor([1.0, float("nan")])]}, {"a": [torch.tensor([1.0, float("nan")])]}
        )
        == []
    )
    assert differences({"a": [torch.tensor(0.0)]}, {"a": [torch.tensor(-0.0)]}) == ["a[0]"]
    assert differences({"a": {"b": 1}, "c": float("nan")}, {"a": {"b": 2}, "c": float("nan")}) == [
        "a.b"
    ]
    assert differences({"a": 1}, {"b": 1}, "state") == ["state"]
    assert differences(torch.ones(2), torch.ones(2, dtype=torch.float64), "x") == ["x"]
