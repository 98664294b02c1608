"""docs/extending.md, "A CUDA compiler": its lines make an image whose nvcc compiles for a GPU.

It is here since it fetches a gigabyte."""

import re
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import CUDA, IMAGE, ROOT, docker, run_once

PROGRAM = """
#include <cmath>
#include <cub/cub.cuh>
#include <cublas_v2.h>
#include <cuda_fp16.h>
__global__ void root(float *x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = std::sqrt(x[i]);
}
int main() { root<<<1, 32>>>(nullptr, 0); return 0; }
"""


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The guide's Dockerfile, built as it stands."""
    guide = (ROOT / "docs/extending.md").read_text().partition("## A CUDA compiler")[2]
    dockerfile = re.search(r"```dockerfile\n(FROM .*?)```", guide, re.DOTALL)
    assert dockerfile
    folder = tmp_path_factory.mktemp("nvcc")
    (folder / "Dockerfile").write_text(dockerfile[1].replace("pytorch-cuda:v2.6", IMAGE))
    tag = f"test-{uuid.uuid4().hex[:12]}:nvcc"
    docker("build", "--quiet", f"--tag={tag}", str(folder), timeout_s=600)
    yield tag
    docker("image", "rm", tag, check=False)


def test_nvcc_of_the_guide_compiles_for_a_gpu_and_links(image: str, tmp_path: Path) -> None:
    (tmp_path / "root.cu").write_text(PROGRAM)
    tmp_path.chmod(0o755)
    steps = [
        "cd /tmp",
        "nvcc --version",
        "nvcc -arch=sm_80 -c /src/root.cu -o root.o",
        "cuobjdump root.o",
        "nvcc root.o -o root",
        "python -c 'from torch.utils.cpp_extension import CUDA_HOME; print(CUDA_HOME)'",
    ]
    options = [f"--volume={tmp_path}:/src:ro", "--network=none"]
    done = run_once("bash", "-c", " && ".join(steps), image=image, options=options)
    assert done.returncode == 0, done.stderr
    assert f"release {CUDA}," in done.stdout
    assert "arch = sm_80" in done.stdout
    assert done.stdout.rstrip().endswith("/usr")
