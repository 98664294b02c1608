"""--precision auto|fp32|tf32|bf16|fp16."""

import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import amptrain
import pytest
import torch
from amptrain import precision
from amptrain.config import PrecisionConfig
from amptrain.errors import ConfigError
from amptrain.precision import (
    Precision,
    has_bf16,
    precision_class,
    precision_name,
    require_fp32,
    resolve_precision,
)
from amptrain.precisions import precision_names
from amptrain.precisions.fp16 import Fp16
from amptrain.report import introduction
from torch import nn

CPU = torch.device("cpu")


def make(name: str, **settings: float) -> Precision:
    return resolve_precision(PrecisionConfig(precision=name, **settings), CPU)


def tf32_switches() -> tuple[bool, bool]:
    """(matmul, cuDNN convolution), as torch has them now."""
    if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        parts = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)
        return parts[0].fp32_precision == "tf32", parts[1].fp32_precision == "tf32"
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize(("has", "expected"), [(True, "bf16"), (False, "fp32")])
def test_auto_on_a_cpu_is_bf16_unless_that_is_emulated(
    monkeypatch: pytest.MonkeyPatch, has: bool, expected: str
) -> None:
    monkeypatch.setattr(precision, "has_bf16", lambda device: has)
    assert make("auto").name == expected


def test_a_cpu_with_avx512_has_bf16() -> None:
    """As Linux says of x86; on others torch is believed."""
    flags = Path("/proc/cpuinfo").read_text()
    if platform.machine() == "x86_64":
        assert has_bf16(CPU) == all(
            f" {name} " in flags for name in ("avx512f", "avx512bw", "avx512vl", "avx512dq")
        )


def test_what_a_cpu_does_slowly_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for has, asked, text in (
        (False, "auto", "--precision auto is fp32 here"),
        (
            False,
            "bf16",
            "bf16 on this CPU is for trying it out: it is emulated, and very slow. fp32 is not.",
        ),
        (
            True,
            "fp16",
            "fp16 on this CPU is for trying it out: it is emulated, and very slow. bf16 is not.",
        ),
        (True, "auto", None),
        (True, "bf16", None),
        (False, "fp32", None),
    ):
        for module in (precision, introduction):
            monkeypatch.setattr(module, "has_bf16", lambda device, has=has: has)
        said = introduction.slow_on_cpu(asked, make(asked), CPU)
        assert [text in line for line in said] == ([True] if text else []), (has, asked, said)


@pytest.mark.parametrize(("native", "expected"), [(True, "bf16"), (False, "fp16")])
def test_auto_on_a_gpu_asks_for_native_bf16(
    monkeypatch: pytest.MonkeyPatch, native: bool, expected: str
) -> None:
    """A T4 says True unless asked without emulation (pytorch#124996)."""
    monkeypatch.setattr(
        torch.cuda,
        "is_bf16_supported",
        lambda including_emulation=True: including_emulation or native,
    )
    assert precision_name("auto", torch.device("cuda")) == expected


@pytest.mark.parametrize(("name", "on"), [("fp32", False), ("tf32", True)])
def test_fp32_has_both_tf32_switches_off_and_tf32_both_on(name: str, on: bool) -> None:
    for earlier in ("tf32", "fp32"):  # whatever they were before
        precision_class(earlier)(CPU, PrecisionConfig()).configure()
        precision_class(name)(CPU, PrecisionConfig()).configure()
        assert tf32_switches() == (on, on)


def test_tf32_on_a_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        make("tf32")


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_forward_computes_in_the_precision(name: str, dtype: torch.dtype) -> None:
    layer = nn.Linear(4, 4)
    with make(name).autocast():
        assert layer(torch.ones(2, 4)).dtype == dtype
    assert layer.weight.dtype == torch.float32


def test_fp16_always_has_a_scaler_with_the_settings() -> None:
    precision = make(
        "fp16", init_scale=2.0**12, growth_factor=3.0, backoff_factor=0.25, growth_interval=7
    )
    assert isinstance(precision, Fp16)
    assert precision.scaler.is_enabled()
    scaler = precision.scaler
    settings = (
        scaler.get_growth_factor(),
        scaler.get_backoff_factor(),
        scaler.get_growth_interval(),
    )
    assert (scaler.get_scale(), *settings) == (4096.0, 3.0, 0.25, 7)
    assert precision.scale(torch.tensor(2.0)) == 8192.0


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_others_never_have_a_scaler(name: str) -> None:
    precision = make(name)
    assert not any(isinstance(value, torch.amp.GradScaler) for value in vars(precision).values())
    assert precision.scale(torch.tensor(2.0)) == 2.0
    assert precision.state_dict() == {}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_other_parameters_than_fp32_are_refused_in_one_sentence(dtype: torch.dtype) -> None:
    require_fp32(nn.Linear(2, 2))
    with pytest.raises(
        ConfigError, match=r"The parameter bias is b?float16; .*needs FP32 parameters"
    ):
        require_fp32(nn.ParameterDict({"bias": nn.Parameter(torch.zeros(2, dtype=dtype))}))


def test_scaler_continues_where_it_was_with_the_factors_of_today() -> None:
    old = make("fp16", growth_interval=50)
    for _ in range(3):
        weight = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=0.0)
        old.scale(weight.sum()).backward()
        old.unscale(optimizer)
        old.step(optimizer, torch.zeros(()))
        old.update()
    old.scaler.update(1024.0)
    new = make("fp16", growth_interval=60)
    new.load_state_dict(old.state_dict())
    assert isinstance(new, Fp16)
    assert new.state_dict() == {**old.state_dict(), "growth_interval": 60}
    assert (new.state_dict()["scale"], new.state_dict()["_growth_tracker"]) == (1024.0, 3)
    assert new.loss_scale == 1024.0


def test_the_flag_and_the_classes_name_the_same_precisions() -> None:
    asked = get_args(get_type_hints(PrecisionConfig)["precision"])
    kinds = [precision_class(name) for name in precision_names()]
    assert set(asked) == {"auto", *(kind.name for kind in kinds)}
    assert [kind.name for kind in kinds] == precision_names()
    assert [kind.name for kind in kinds if kind.has_scaler] == ["fp16"]


FP64 = """
import torch
from torch import nn
from amptrain.precision import Precision

class Fp64(Precision):
    name = "fp64"

    def convert(self, model: nn.Module) -> nn.Module:
        return model.double()

    def autocast(self):
        return torch.autocast("cpu", enabled=False)
"""


def test_a_precision_is_one_file(tmp_path: Path) -> None:
    """As CONTRIBUTING.md says: the flag, its help, the run and its result know it then."""
    shutil.copytree(Path(amptrain.__file__).parent, tmp_path / "amptrain")
    (tmp_path / "amptrain/precisions/fp64.py").write_text(FP64)
    model = tmp_path / "own.py"
    model.write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self, classes, channels):\n"
        "        super().__init__()\n"
        "        self.head = torch.nn.Linear(64 * channels, classes)\n"
        "    def forward(self, x):\n"
        "        return self.head(x.flatten(1).to(self.head.weight.dtype))\n"
        "def net(num_classes, in_channels):\n"
        "    return Net(num_classes, in_channels)\n"
    )
    flags = ["--precision=fp64", "--max-steps=3", "--name=one", f"--model={model}:net"]
    done = subprocess.run(
        [sys.executable, "-m", "amptrain", "train", *flags],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "runs/one/result.json").read_text())
    assert result["precision"] == "fp64"
