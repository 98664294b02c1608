"""Compile a Triton kernel for a GPU that isn't there (argument: 80 or 90) and print what the cubin
is made for."""

import struct
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

EM_CUDA = 190  # ELF machine number of NVIDIA's device code


@triton.jit
def add(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    y = tl.load(y_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, x + y, mask=mask)


capability = int(sys.argv[1])
signature = {
    "x_ptr": "*fp16",
    "y_ptr": "*fp16",
    "out_ptr": "*fp16",
    "n": "i32",
    "BLOCK": "constexpr",
}
source = ASTSource(fn=add, signature=signature, constants={"BLOCK": 1024})
cubin = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]

assert cubin[:4] == b"\x7fELF"
(machine,) = struct.unpack_from("<H", cubin, 18)
assert machine == EM_CUDA
(flags,) = struct.unpack_from("<I", cubin, 48)
print(f"sm_{flags & 0xFF}")
