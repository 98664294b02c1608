"""CUDA is there once, from torch's own wheels, and nothing of the host's or the base's is mixed
in."""

import json

import pytest
from testinfra.host import Host

from tests.image.conftest import PROGRAMS, RunProgram
from tests.support import IMAGE, docker, run_once

SITE_PACKAGES = "/opt/venv/lib/python3.13/site-packages/"


def test_cuda_libraries_come_from_site_packages_only(host: Host) -> None:
    names = "cublas|cudart|cudnn|cufft|curand|cusolver|cusparse|nccl|nvrtc|cupti"
    found = host.check_output(
        "find / -xdev -not -type d -regextype posix-extended -regex "
        f"'.*/lib({names})[^/]*[.]so[^/]*'"
    ).split()
    assert found
    assert [path for path in found if not path.startswith(SITE_PACKAGES)] == []


def test_no_cuda_library_is_there_twice(host: Host) -> None:
    found = host.check_output(
        f"find {SITE_PACKAGES} -type f -name 'lib*.so*' -size +64k -printf '%f\\n'"
    ).split()
    assert sorted(set(found)) == sorted(found)


def test_no_toolkit_and_no_forward_compatibility_package(host: Host) -> None:
    # cuda-compat in an image breaks hosts whose driver is newer than it; the driver's libcuda comes
    # from the host.
    assert (
        host.run("find / -xdev \\( -path '/usr/local/cuda*' -o -path '*/cuda/compat*' \\)").stdout
        == ""
    )
    assert host.run("find / -xdev -name 'libcuda.so*'").stdout == ""


def test_environment_asks_the_toolkit_for_the_right_things() -> None:
    entries = json.loads(docker("image", "inspect", "--format", "{{json .Config.Env}}", IMAGE))
    environment = dict(entry.split("=", 1) for entry in entries)
    assert environment["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"
    assert environment["NVIDIA_REQUIRE_CUDA"] == "cuda>=12.0"
    # LD_LIBRARY_PATH would decide where cuDNN finds its own parts; NVIDIA_VISIBLE_DEVICES would
    # hand out GPUs unasked; CUDA_VERSION alone makes the toolkit treat the image as one of the old
    # kind, which implies all GPUs.
    assert not {"LD_LIBRARY_PATH", "LD_PRELOAD", "NVIDIA_VISIBLE_DEVICES", "CUDA_VERSION"} & set(
        environment
    )


def test_cudnn_in_memory_is_the_one_torch_came_with(run_program: RunProgram) -> None:
    mapped = json.loads(run_program("mapped_cudnn.py"))
    assert any("libcudnn.so.9" in path for path in mapped)
    assert [
        path for path in mapped if not path.startswith(f"{SITE_PACKAGES}nvidia/cudnn/lib/")
    ] == []


@pytest.mark.gpu
def test_gpu_is_visible_and_computes_in_half_precision() -> None:
    options = ("--gpus=all", "--shm-size=1g", f"--volume={PROGRAMS}:/programs:ro")
    done = run_once("python", "/programs/gpu.py", options=options, timeout_s=300)
    assert done.returncode == 0, done.stdout + done.stderr
