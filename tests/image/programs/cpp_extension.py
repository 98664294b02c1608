"""Build, load and call a C++ extension, as a user's own package would be built."""

import tempfile

import torch
from torch.utils import cpp_extension

SOURCE = """
#include <torch/extension.h>
torch::Tensor twice(torch::Tensor x) {
  auto result = torch::empty_like(x);
  #pragma omp parallel for
  for (int64_t i = 0; i < x.numel(); ++i) result.data_ptr<float>()[i] = 2 * x.data_ptr<float>()[i];
  return result;
}
PYBIND11_MODULE(twice_extension, module) { module.def("twice", &twice); }
"""
with tempfile.TemporaryDirectory() as folder:
    source = f"{folder}/twice.cpp"
    with open(source, "w") as file:
        file.write(SOURCE)
    # The headers alone take 30 s to compile at -O2; a user's setup.py would do the same with any
    # options.
    module = cpp_extension.load(
        "twice_extension",
        [source],
        build_directory=folder,
        extra_cflags=["-O0", "-fopenmp"],
        extra_ldflags=["-lgomp"],
    )
    values = torch.arange(1000, dtype=torch.float32)
    assert torch.equal(module.twice(values), values * 2)
