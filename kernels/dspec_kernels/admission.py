"""Admit the K largest survival products over all requests: prefix lengths per request, without a sort.

Grid (request block). An entry is admitted when fewer than K entries rank before it, and the rank is a count over all
entries, so that ties are exact: larger survival first, then the earlier request, then the earlier position. Contract:
`dspec_lab/kernels/admission.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspec_kernels.launch import block_of, launch, require_float, require_shape


@triton.jit(do_not_specialize=["B", "budget"])
def _admit_kernel(
    survival, lens, admitted, fault_out, B, G, budget, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    b = tl.program_id(0)
    g = tl.arange(0, BLOCK_G)
    length = tl.load(lens + b).to(tl.int32)
    good = (length >= 0) & (length <= G)
    limit = tl.where(good, length, 0)
    at = b.to(tl.int64) * G
    mine = tl.load(survival + at + g, mask=g < limit, other=0.0).to(tl.float32)
    before = tl.load(survival + at + g - 1, mask=(g > 0) & (g < limit), other=1.0).to(tl.float32)
    # written so that NaN counts as a fault: each value lies in [0, 1] and never above the one before it
    falls = ((mine >= 0) & (mine <= before)).to(tl.int32)
    first_bad = tl.min(tl.where((g < limit) & (falls == 0), g, BLOCK_G), axis=0)
    fault = tl.where(first_bad < BLOCK_G, 8 * first_bad + 7, 0)
    fault = tl.where(good, fault, 4)
    tl.store(fault_out + b, fault.to(tl.int64))
    my_rank = b * G + g
    rank = tl.zeros([BLOCK_G], dtype=tl.int32)
    total = B * G
    for start in range(0, total, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        other = tl.load(survival + n, mask=n < total, other=0.0).to(tl.float32)
        other_len = tl.load(lens + n // G, mask=n < total, other=0).to(tl.int32)
        live = (n < total) & (n % G < other_len)
        ahead = (other[None, :] > mine[:, None]) | ((other[None, :] == mine[:, None]) & (n[None, :] < my_rank[:, None]))
        rank += tl.sum((ahead & live[None, :]).to(tl.int32), axis=1)
    count = tl.sum(((g < limit) & (rank < budget)).to(tl.int32), axis=0)
    tl.store(admitted + b, count.to(tl.int64))


def admit_top_k(survival_BG: Tensor, lens_B: Tensor, budget: int, block_n: int = 1024) -> tuple[Tensor, Tensor]:
    """(num_admitted_B, fault_B). With a fault in any request no count means anything."""
    B, G = survival_BG.shape
    require_float("survival_BG", survival_BG)
    require_shape("lens_B", lens_B, (B,))
    if budget < 0:
        raise ValueError(f"budget must be 0 or more, got {budget}")
    num_admitted_B = torch.empty(B, dtype=torch.int64, device=survival_BG.device)
    fault_B = torch.empty_like(num_admitted_B)
    if G == 0:
        # nothing to launch for; a length of other than 0 is out of range (fault 4) here too
        return num_admitted_B.zero_(), fault_B.copy_(4 * (lens_B != 0))
    launch(
        _admit_kernel,
        (B,),
        *(survival_BG.contiguous(), lens_B.contiguous(), num_admitted_B, fault_B, B, G, min(budget, B * G)),
        BLOCK_G=block_of(G, 1 << 20, smallest=8),
        BLOCK_N=block_n,
        num_warps=4,
    )
    return num_admitted_B, fault_B
