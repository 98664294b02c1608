"""What the image is for works in it: mixed precision, torch.compile, Triton. No GPU is needed to
see it."""

import json

import pytest

from tests.image.conftest import RunProgram


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_autocast_gives_the_right_dtypes_and_the_loss_falls(
    run_program: RunProgram, dtype: str
) -> None:
    losses = json.loads(run_program("amp.py", dtype))
    assert losses[-1] < 0.2 * losses[0], losses


def test_torch_compile_builds_cpp_kernels_as_dev(run_program: RunProgram) -> None:
    built = run_program("compile_cpu.py").split()
    assert built, "inductor compiled no C++ kernel"


@pytest.mark.parametrize("capability", ["80", "90"])
def test_triton_compiles_a_cubin_without_a_gpu(run_program: RunProgram, capability: str) -> None:
    assert run_program("triton_cubin.py", capability).strip() == f"sm_{capability}"
