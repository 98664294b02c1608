"""What container/build/prune-* leaves out is out, and what could have needed it works.

A new omission gets a line in LEFT_OUT, with the test that stands for it.
"""

import json

import pytest
from testinfra.host import Host

from tests.image.conftest import RunProgram
from tests.support import CUDA

SITE_PACKAGES = "/opt/venv/lib/python3.13/site-packages"
LEFT_OUT = {
    # find's expression: what could have needed it
    "-path '*/gcc/*' -name lto1": "test_cpp_extension",
    "-name '*lto-dump*'": "test_cpp_extension",
    "-name 'lib[altu]san.so*' -o -name 'libhwasan.so*' -o -name 'libubsan.so*'": (
        "test_cpp_extension"
    ),
    "-name 'libpython*.a' -o -name 'libgprofng.so*'": "test_cpp_extension",
    "-name 'libcusolverMg.so*' -o -name 'libnvblas.so*' -o -name 'libcufftw.so*'": (
        "test_libraries_find_what_they_link"
    ),
    "-name 'libnvperf_*.so' -o -name libcheckpoint.so -o -name libpcsamplingutil.so": (
        "test_profiler"
    ),
    "-path '*/torch/bin/protoc*'": "test_nothing_runs_protoc_or_nvdisasm",
    "-path '*/triton/instrumentation'": "tests/image/test_compute.py, the cubin",
    "-name nvdisasm": "test_nothing_runs_protoc_or_nvdisasm",
    "-path '*/triton/*' -type f -name 'libcupti.so*'": "test_triton_finds_cupti",
    "-path '*/site-packages/*' -type d -name tests": "test_every_package_can_be_imported",
    "-path '*/tensorboard_data_server/bin/server'": "test_tensorboard_serves_an_event_file",
    "-path '/opt/venv/*' -name '*.js.map'": "tests/container, JupyterLab in a browser",
}


@pytest.mark.parametrize("expression", LEFT_OUT, ids=list(LEFT_OUT.values()))
def test_is_left_out(host: Host, expression: str) -> None:
    assert host.check_output(f"find /usr /opt -xdev -not -xtype l \\( {expression} \\)") == ""


@pytest.mark.parametrize(
    "library", ["triton/_C/libtriton.so", "torch/lib/libtorch_cpu.so", "torch/lib/libtorch_cuda.so"]
)
def test_symbol_table_is_stripped(host: Host, library: str) -> None:
    assert ".symtab" not in host.check_output(
        f"readelf --section-headers --wide {SITE_PACKAGES}/{library}"
    )


def test_libraries_find_what_they_link(dev: Host) -> None:
    missing = dev.check_output(
        f"cd {SITE_PACKAGES} && "
        "for library in nvidia/*/lib/*.so* cusparselt/lib/*.so* torch/lib/*.so* triton/_C/*.so; do "
        'ldd "$library" | sed -n "s,^\\s*\\(\\S*\\) => not found,$library \\1,p"; done'
    )
    # libcuda.so.1 is the driver's: the host brings it. Only the lazily loaded NVRTC stub links it.
    assert missing.splitlines() == ["torch/lib/libcaffe2_nvrtc.so libcuda.so.1"]


def test_libraries_that_are_opened_by_name_load(run_program: RunProgram) -> None:
    """No link names these: cuDNN, NVRTC and torch open them when they are first used, on a GPU."""
    cudnn = "adv cnn engines_precompiled engines_runtime_compiled graph heuristic ops"
    needed = {f"libcudnn_{name}.so.9" for name in cudnn.split()}
    needed |= {
        "libnvrtc.so.12",
        f"libnvrtc-builtins.so.{CUDA}",
        "libtorch_cuda_linalg.so",
        "libcupti.so.12",
    }
    assert needed <= set(json.loads(run_program("load_libraries.py")))


def test_cpp_extension(run_program: RunProgram) -> None:
    run_program("cpp_extension.py")


def test_profiler(run_program: RunProgram) -> None:
    run_program("profiler.py")


def test_nothing_runs_protoc_or_nvdisasm(host: Host) -> None:
    named = host.run(
        f"grep -rlE --include=*.py 'protoc\\b|nvdisasm' {SITE_PACKAGES}/torch "
        f"{SITE_PACKAGES}/triton"
    )
    assert named.stdout.split() == []


def test_triton_finds_cupti(run_program: RunProgram) -> None:
    run_program("triton_cupti.py")


def test_torchvision_operators_and_image_files(run_program: RunProgram) -> None:
    run_program("vision.py")


def test_every_package_can_be_imported(run_program: RunProgram) -> None:
    imported = set(run_program("imports.py").split())
    assert {
        "numpy.testing",
        "torch.testing",
        "sympy",
        "networkx",
        "jupyterlab",
        "triton",
        "pip",
    } <= imported


def test_tensorboard_serves_an_event_file(run_program: RunProgram) -> None:
    run_program("tensorboard_reads.py")


def test_plots(run_program: RunProgram) -> None:
    run_program("plot.py")
