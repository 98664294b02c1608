"""`amptrain bench` and `advise`: real measurements of a model that takes the time it is told to."""

import json
import shlex
from pathlib import Path

import pytest
from amptrain.cli import main, parse_config
from amptrain.config import OptimConfig, RunConfig, TrainConfig
from amptrain.trials.advise import command
from amptrain.trials.bench import default_bench
from amptrain.trials.process import Facts, Fit, Speed
from amptrain.trials.table import Row, duration, markdown, spread
from PIL import Image

OWN = """
import time, torch

@torch.compiler.disable
def sleep(images):
    autocast = torch.is_autocast_enabled("cpu")
    dense = images.is_contiguous(memory_format=torch.channels_last) and images.shape[1] > 1
    time.sleep((0.05 if autocast else 0.3) + (0.25 if dense else 0))

class Net(torch.nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.head = torch.nn.LazyLinear(classes)

    def forward(self, images):
        sleep(images)
        return self.head(images.flatten(1))

def net(num_classes):
    model = Net(num_classes)
    model.head(torch.zeros(1, {inputs}))
    return model
"""
FACTS = Facts(
    device="a GPU",
    is_cuda=True,
    memory=2**34,
    cpus=8,
    versions={"torch": "2"},
    emulated={"tf32": "it needs an Ampere GPU."},
    images=36_000,
    shape=[3, 224, 224],
    is_made=True,
)


def own_model(folder: Path, inputs: int) -> str:
    (folder / "own.py").write_text(OWN.replace("{inputs}", str(inputs)))
    return f"--model={folder}/own.py:net"


def a_speed(rate: float, allocated: int, **more: object) -> Speed:
    peak = Fit(fits=True, allocated=allocated, reserved=2 * allocated)
    settings: dict[str, object] = {"data_images_per_s": rate / 2, "workers": 8, **more}
    return Speed(images_per_s=rate, steps=9, peak=peak, **settings)  # type: ignore[arg-type]


def test_bench_measures_each_precision_and_writes_three_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [own_model(tmp_path, 64), "--data=digits", "--device=cpu", "--quick"]
    assert main(["bench", *flags, f"--output={tmp_path}/out"]) == 0
    told = capsys.readouterr().out
    record = json.loads((tmp_path / "out/bench.json").read_text())
    rates = {row["name"]: row["speeds"][0]["images_per_s"] for row in record["rows"]}
    assert {*rates, *record["machine"]["emulated"]} == {"fp32", "tf32", "bf16", "fp16"}
    assert 0.7 * 8 / 0.3 < rates["fp32"] <= 8 / 0.3  # --quick: 8 images a step
    if "bf16" in rates:
        assert 2 < rates["bf16"] / rates["fp32"] < 0.3 / 0.05 * 1.4
    assert record["settings"]["global_batch_size"] == 8
    table = (tmp_path / "out/bench.md").read_text()
    assert table in told
    assert "- tf32 is not measured: it needs a CUDA device" in table
    (row,) = [line for line in table.splitlines() if line.startswith("| fp32 | ")]
    with_data, epoch = row.split(" | ")[3:5]
    assert float(epoch.removesuffix(" s")) == pytest.approx(1437 / float(with_data), rel=0.1)
    with Image.open(tmp_path / "out/bench.png") as chart:
        assert chart.size[0] == 1200


def test_bench_without_flags_is_a_resnet50_at_imagenets_size() -> None:
    config = default_bench()
    assert (config.model_name, config.data.data) == ("resnet50", "fake:1281167")
    assert config.data.image_size == 224


def test_the_table_tells_medians_spread_ratios_and_what_was_not_done() -> None:
    fp32 = Row("fp32", 36_000, tuple(a_speed(rate, 2**31) for rate in (100, 90, 102)))
    bf16 = Row(
        "bf16",
        36_000,
        (a_speed(250, 2**30, clock_mhz=1200.0, max_clock_mhz=1980, throttled=("power limit",)),),
        512,
        Fit(fits=True, allocated=15 * 2**30),
    )
    lines = markdown("title", [fp32, bf16], FACTS).splitlines()
    assert lines[4].split(" | ")[1:] == [
        *("100 (90–102)", "1.00", "50 (45–51)", "12 min 0 s", "2.00 GiB", "1.00"),
        *("not searched", "- |"),
    ]
    assert lines[5].split(" | ")[1:] == [
        *("250", "2.50", "125", "4 min 48 s", "1.00 GiB", "0.50", "512", "15.00 GiB |"),
    ]
    assert "- tf32 is not measured: it needs an Ampere GPU." in lines
    assert "- The GPU lowered its clock: power limit." in lines
    assert "- Clock: 1200 of 1980 MHz." in lines
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.5, "0.5 s"), (59.4, "59 s"), (130, "2 min 10 s"), (9000, "2 h 30 min")]
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text
    assert spread([seconds]) == f"{seconds:.3g}"


def test_advise_finds_the_fastest_settings_and_prints_a_command_that_parses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = own_model(tmp_path, 3 * 16 * 16)
    flags = [model, "--data=fake:64", "--image-size=16", "--device=cpu", "--quick"]
    assert main(["advise", *flags, "--global-batch-size=8", "--lr=0.01"]) == 0
    told = capsys.readouterr().out
    rows = [line.split(" | ") for line in told.splitlines() if line.startswith("| --")][1:]
    taken = {row[0].removeprefix("| ") for row in rows if row[2] == "taken |"}
    assert "--no-channels-last" in taken
    (line,) = [line.strip() for line in told.splitlines() if line.startswith("    amptrain train")]
    words = line.split()[2:]
    assert "--no-channels-last" in words
    assert words[words.index("--lr") + 1] == "0.01"
    assert {"--precision fp32", f"--precision {words[words.index('--precision') + 1]}"} <= taken
    assert ("--compile" in words) == ("--compile" in taken)


def test_the_command_has_what_differs_from_the_defaults_and_quotes_it() -> None:
    config = TrainConfig(
        run=RunConfig(name="my run", deterministic=True), optim=OptimConfig(fused=False, lr=0.1)
    )
    text = command(config)
    assert text == "amptrain train --name 'my run' --deterministic --no-fused --lr 0.1"
    assert parse_config(shlex.split(text)[2:], prog="amptrain train") == config


@pytest.mark.parametrize("name", ["bench", "advise", "find-batch"])
def test_under_torchrun_it_says_so(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([name]) == 2
    assert f"{name} starts processes of its own" in capsys.readouterr().err
