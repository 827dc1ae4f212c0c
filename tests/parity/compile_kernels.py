"""Compile every launch of the kernel package for one GPU model, without a GPU; prints the names of the kernels.

The wrappers run on tensors that have no data. A launch is caught and its kernel compiled with the types, constants and
alignment that the launch would have had.
"""

from __future__ import annotations

import warnings

import torch
import triton
from dspec_kernels.accept_residual import accept_residual
from dspec_kernels.accept_residual_logits import accept_residual_logits
from dspec_kernels.admission import admit_top_k
from dspec_kernels.compact_kv import compact_kv
from dspec_kernels.markov_step import low_rank_step, markov_step
from dspec_kernels.ragged_attention import ragged_attention
from dspec_kernels.tv_loss import tv_backward, tv_forward
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGET = GPUTarget("cuda", 90, 32)
POINTERS = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def compile_launch(kernel: triton.JITFunction, *args: object, num_warps: int = 4, num_stages: int = 3, **meta: object):
    values = dict(zip(kernel.arg_names, args, strict=False)) | meta
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        name, value = parameter.name, values[parameter.name]
        fixed = isinstance(value, int) and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (fixed and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], attributes[(index,)] = POINTERS[value.dtype], [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if fixed and value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    done = triton.compile(source, target=TARGET, options={"num_warps": num_warps, "num_stages": num_stages})
    assert len(done.asm["cubin"]) > 0
    print(kernel.__name__, flush=True)


class CompileOnly:
    def __init__(self, kernel: triton.JITFunction) -> None:
        self.kernel = kernel

    def __call__(self, *args: object, **meta: object) -> None:
        compile_launch(self.kernel, *args, **meta)


def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


warnings.filterwarnings("ignore")
triton.JITFunction.__getitem__ = lambda kernel, grid: CompileOnly(kernel)
half, single, double = torch.bfloat16, torch.float32, torch.float64

for B, G, V, dense, dtype in ((4, 7, 151936, True, half), (1, 0, 4000, False, single)):
    rows = (empty(B * (G + 1), V, dtype=dtype), empty(B * G, V, dtype=dtype) if dense else None)
    noise = (empty(B, G, dtype=double), empty(B, dtype=double), empty(B, dtype=double))
    hot = empty(B, dtype=torch.bool) if dense else None
    batch = (*rows, empty(B, G), empty(B), *noise, empty(B), empty(B), hot)
    accept_residual(*batch)
    accept_residual_logits(*batch, empty(B, dtype=single))
heat = (empty(8, dtype=single), empty(8, dtype=double))
table = empty(49152, 64, dtype=half)
markov_step(empty(8, 49152, dtype=half), empty(8), table, table, *heat)
low_rank_step(empty(8, 4000, dtype=single), empty(8, 64, dtype=single), empty(4000, 64, dtype=single), *heat)
loss, saved, _ = tv_forward(empty(8, 151936, dtype=half), empty(8, 151936, dtype=half))
tv_backward(empty(8, 151936, dtype=half), empty(8, 151936, dtype=half), saved, loss)
admit_top_k(empty(64, 7, dtype=single), empty(64), 200)
pool = empty(30, 4096, 3, 64, dtype=half)
compact_kv(pool, pool, empty(8), empty(8, 8), empty(8))
index = [empty(16) for _ in range(4)]
pool, query = empty(9000, 3, 64, dtype=half), empty(128, 9, 64, dtype=half)
ragged_attention(query, pool, pool, empty(128, 5), *index, scale=0.1, max_rows=8, max_end=2000)
