"""Settings: sentences for what is wrong, YAML under flags, the merged settings saved."""

import math
from pathlib import Path
from typing import Any

import pytest
from amptrain.cli import main, parse_config
from amptrain.config import RunConfig, TrainConfig, flatten, from_flat, load_yaml, save_yaml
from amptrain.errors import ConfigError

WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"data": "mnist"},
        "--data is 'mnist'; it needs to be one of cifar10, digits, fake:N",
    ),
    ({"data": "fake:many"}, "N needs to be a number above 0"),
    ({"data": "imagefolder:"}, "it needs to be imagefolder:PATH"),
    ({"data": "digits:8"}, "it needs to be digits."),
    ({"data": "imagefoldr:pets"}, "Do you mean imagefolder?"),
    ({"val_fraction": 1.0}, "--val-fraction is 1.0"),
    ({"batch_size": 0}, "--global-batch-size is 0; it needs to be at least 1."),
    ({"batch_size": 10, "accumulate": 3}, "cannot be split evenly into --grad-accum-steps 3"),
    ({"epochs": 0}, "--epochs is 0"),
    ({"max_steps": 0}, "--max-steps is 0"),
    ({"lr": 0.0}, "--lr is 0.0"),
    ({"momentum": 1.0}, "--momentum is 1.0"),
    ({"weight_decay": -1.0}, "--weight-decay is -1.0"),
    ({"warmup_epochs": -1.0}, "--warmup-epochs is -1.0"),
    ({"label_smoothing": 1.0}, "--label-smoothing is 1.0"),
    ({"clip_norm": 0.0}, "--max-grad-norm is 0.0"),
    ({"ema_decay": 1.0}, "--ema-decay is 1.0"),
    ({"init_scale": 0.0}, "--init-scale is 0.0"),
    ({"growth_factor": 1.0}, "--growth-factor is 1.0"),
    ({"backoff_factor": 1.0}, "--backoff-factor is 1.0"),
    ({"growth_interval": 0}, "--growth-interval is 0"),
    ({"min_scale": 2.0**-126}, "it needs to be from 2**-100 to the initial scale 65536"),
    ({"min_scale": 2.0**17}, "it needs to be from 2**-100 to the initial scale 65536"),
    (
        {"max_consecutive_skips": 150},
        "--max-consecutive-skips is 150; it needs to be from 1 to 100.",
    ),
    ({"lr": math.nan}, "--lr is nan; it needs to be a finite number."),
    ({"lr": math.inf}, "--lr is inf; it needs to be a finite number."),
    ({"warmup_epochs": math.inf}, "--warmup-epochs is inf; it needs to be a finite number."),
    ({"init_scale": math.nan}, "--init-scale is nan; it needs to be a finite number."),
    ({"workers": -1}, "--num-workers is -1"),
    ({"prefetch": 0}, "--prefetch-factor is 0"),
    ({"image_size": 4}, "--image-size is 4"),
    ({"log_every": 0}, "--log-every is 0"),
    ({"save_every": 0}, "--save-every is 0"),
    ({"keep": 1}, "--keep-checkpoints is 1; keep at least 2"),
    ({"seed": -1}, "--seed is -1"),
    ({"name": "a/b"}, "without a slash"),
    ({"name": ".."}, "the name of one directory"),
    (
        {"precision": "fp8"},
        "precision is 'fp8'; it needs to be one of auto, fp32, tf32, bf16, fp16.",
    ),
    ({"epochs": "many"}, "epochs is 'many'; it needs to be of type int."),
    ({"epochs": True}, "epochs is True; it needs to be of type int."),
    ({"lr": "fast"}, "lr is 'fast'; it needs to be"),
    ({"compile": 1}, "compile is 1; it needs to be of type bool."),
    ({"learning_rate": 0.1}, "There is no setting learning_rate; the settings are name, runs,"),
]


@pytest.mark.parametrize(
    ("settings", "sentence"), WRONG, ids=[f"{next(iter(w))}-{i}" for i, (w, _) in enumerate(WRONG)]
)
def test_a_wrong_setting_is_told_in_a_sentence(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_flat(settings)
    assert sentence in str(caught.value)


def test_flat_settings_come_back_as_they_were() -> None:
    config = from_flat(
        {"data_dir": "/somewhere", "lr": 1, "max_steps": 3, "compile": True, "ema_decay": "1e-1"}
    )
    assert (config.optim.lr, config.data.data_dir, config.optim.ema_decay) == (
        1.0,
        Path("/somewhere"),
        0.1,
    )
    assert from_flat(flatten(config)) == config


def test_every_setting_has_its_own_name_and_says_what_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    for name in flatten(TrainConfig()):
        assert f"--{name.replace('_', '-')}" in text, name
    assert "auto is bf16 where the hardware has it" in " ".join(text.replace("│", " ").split())


def test_yaml_gives_defaults_and_flags_win(tmp_path: Path) -> None:
    path = tmp_path / "given.yaml"
    path.write_text("lr: 1e-2\nepochs: 7\nprecision: fp16\n")
    config = parse_config(["--config", str(path), "--epochs", "9", "--no-augment"], "x")
    assert (config.optim.lr, config.optim.epochs, config.precision.precision) == (0.01, 9, "fp16")
    assert config.data.augment == "none"
    assert parse_config([f"--config={path}"], "x").optim.epochs == 7
    assert parse_config([], "x") == TrainConfig()


def test_saved_settings_repeat_the_run(tmp_path: Path) -> None:
    config = from_flat({"epochs": 3, "data": "fake:10", "runs": tmp_path})
    save_yaml(config, tmp_path / "config.yaml")
    assert load_yaml(tmp_path / "config.yaml") == config


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("epochs: [", "is not YAML"),
        ("- a\n- b\n", "needs lines of the form `name: value`"),
        ("epoch: 3", "There is no setting epoch"),
        ("lr: -1", "--lr is -1.0"),
        (None, "cannot be read"),
    ],
)
def test_a_wrong_file_is_told_with_its_path(
    text: str | None, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "wrong.yaml"
    if text is not None:
        path.write_text(text)
    assert main(["train", "--config", str(path)]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert str(path) in error
    assert len(error.strip().splitlines()) <= 3 or "YAML" in sentence


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train", "--lr", "-1"], "--lr is -1.0; it needs to be above 0."),
        (
            ["train", "--model", "resnet999", "--device", "cpu"],
            "There is no model 'resnet999'. The nearest are ",
        ),
        (["train", "--model", "ViT-B-16", "--device", "cpu"], "The nearest are vit_b_16"),
        (
            ["train", "--model", "resnet18", "--device", "cpu"],
            "takes images of 3 channels, those of digits have 1",
        ),
        (["train", "--precision", "tf32", "--device", "cpu"], "needs a CUDA device"),
        (
            ["train", "--data", "cifar10", "--data-dir", "nowhere"],
            "nowhere/cifar-10-batches-py/data_batch_1 is missing",
        ),
        (["train", "--data", "imagefolder:nowhere"], "The folder nowhere is missing"),
        (["train", "--no-such-flag"], "no-such-flag"),
        (["train", "--epochs", "many"], "many"),
        (["launch"], "there is no command 'launch'"),
    ],
)
def test_what_cannot_be_asked_for_exits_with_2(
    arguments: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code = main(arguments)
    output = capsys.readouterr()
    assert code == 2
    assert sentence in output.err + output.out
    assert "Traceback" not in output.err


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {command}  " in text for command in ("train", "plot", "verify-resume"))


def test_a_setting_may_be_called_by_its_old_name() -> None:
    """In flags, in files and in runs from before; for one release."""
    old = "--accumulate 2 --batch-size=32 --clip-norm 1 --keep 3 --prefetch 4 --workers 1"
    new = (
        "--grad-accum-steps 2 --global-batch-size=32 --max-grad-norm 1 --keep-checkpoints 3 "
        "--prefetch-factor 4 --num-workers 1"
    )
    assert parse_config(old.split(), "x") == parse_config(new.split(), "x")
    assert from_flat({"batch_size": 32}) == from_flat({"global_batch_size": 32})


def test_a_typo_in_a_file_gets_the_nearest_name(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("num_worker: 2\n")
    with pytest.raises(ConfigError, match=rf"{file}: There is no setting num_worker; perhaps you"):
        load_yaml(file)


def test_the_last_file_wins(tmp_path: Path) -> None:
    for epochs in (3, 4):
        (tmp_path / f"{epochs}.yaml").write_text(f"epochs: {epochs}\n")
    flags = [f"--config={tmp_path}/3.yaml", "--config", f"{tmp_path}/4.yaml"]
    assert parse_config(flags, "x").optim.epochs == 4


@pytest.mark.parametrize(
    ("name", "meant"), [("photos", "imagefolder:photos"), ("list.csv", "table:list.csv")]
)
def test_a_bare_path_as_data_is_told_its_kind(
    name: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make = Path(name).touch if Path(name).suffix else Path(name).mkdir
    make()
    with pytest.raises(ConfigError, match=f"Do you mean {meant}\\?"):
        from_flat({"data": name})


def test_a_tilde_is_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shells leave it alone in --runs=~/runs."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.yaml").write_text("epochs: 3\n")
    assert load_yaml(Path("~/mine.yaml")).optim.epochs == 3
    config = TrainConfig(run=RunConfig(runs=Path("~/runs"), name="one"))
    assert config.run_dir == tmp_path / "runs/one"
