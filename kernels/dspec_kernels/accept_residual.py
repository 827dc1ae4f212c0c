"""Accept a prefix of the draft and draw the extra token, from probabilities, reading the vocabulary once.

First kernel, grid (request x row, chunk): mass of max(p - q, 0), of p and of q in the chunk, and whether an entry is
NaN, infinite or negative. Second, grid (request): the accepted prefix. Third (`draw.py`): the chunk by its mass, and
the token inside that chunk. Contract: `dspec_lab/kernels/accept_residual.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspec_kernels.draw import draw, write_plan
from dspec_kernels.inverse_cdf import is_bad
from dspec_kernels.launch import launch, require_float, require_rows, require_shape


@triton.jit(do_not_specialize=["target_rows", "draft_rows"])
def _chunk_mass_kernel(
    target,
    draft,
    draft_ids,
    lens,
    target_starts,
    draft_starts,
    one_hot,
    mass,
    faulty,
    target_rows,
    draft_rows,
    target_stride,
    draft_stride,
    J,
    V,
    C,
    HAS_DRAFT: tl.constexpr,
    HAS_ONE_HOT: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    b = row // J
    j = row % J
    length = tl.load(lens + b)
    t_row = tl.load(target_starts + b).to(tl.int64) + j
    d_row = tl.load(draft_starts + b).to(tl.int64) + j
    # a request with a length or start out of range is faulty as a whole; the second kernel says so
    if (j > length) | (length >= J) | (t_row < 0) | (t_row >= target_rows):
        return
    offs = chunk * BLOCK_V + tl.arange(0, BLOCK_V)
    p = tl.load(target + t_row * target_stride + offs, mask=offs < V, other=0.0).to(tl.float32)
    bad = tl.max(is_bad(p) | (p < 0).to(tl.int32), axis=0)
    has_draft = j < length
    token = tl.load(draft_ids + b.to(tl.int64) * (J - 1) + j, mask=has_draft, other=-1)
    # never true where the batch has no dense drafts at all
    dense = has_draft
    if not HAS_DRAFT:
        dense = j < 0
    if HAS_ONE_HOT:
        dense = dense & (tl.load(one_hot + b) == 0)
    q = (offs == tl.where(dense, -1, token)).to(tl.float32)
    if HAS_DRAFT:
        # a scalar condition enters a mask through the limit: the interpreter mistypes `block & scalar`
        limit = tl.where(dense & (d_row >= 0) & (d_row < draft_rows), V, 0)
        dense_q = tl.load(draft + d_row * draft_stride + offs, mask=offs < limit, other=0.0).to(tl.float32)
        bad += 2 * tl.max(is_bad(dense_q) | (dense_q < 0).to(tl.int32), axis=0)
        q += dense_q
    at = row.to(tl.int64) * C + chunk
    plane = tl.num_programs(0).to(tl.int64) * C
    tl.store(mass + at, tl.sum(tl.maximum(p - q, 0.0), axis=0))
    tl.store(mass + plane + at, tl.sum(p, axis=0))
    tl.store(mass + 2 * plane + at, tl.sum(q, axis=0))
    tl.store(faulty + at, bad)


@triton.jit(do_not_specialize=["target_rows", "draft_rows"])
def _accept_kernel(
    target,
    draft,
    draft_ids,
    lens,
    target_starts,
    draft_starts,
    one_hot,
    accept_u,
    replacement_u,
    bonus_u,
    mass,
    faulty,
    num_accepted,
    fault_out,
    plan,
    scalars,
    target_rows,
    draft_rows,
    target_stride,
    draft_stride,
    J,
    V,
    C,
    HAS_DRAFT: tl.constexpr,
    HAS_ONE_HOT: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    b = tl.program_id(0)
    length = tl.load(lens + b).to(tl.int32)
    t_start = tl.load(target_starts + b).to(tl.int64)
    d_start = tl.load(draft_starts + b).to(tl.int64)
    plane = tl.num_programs(0).to(tl.int64) * J * C
    chunks = tl.arange(0, BLOCK_C)
    dense = length > 0
    if not HAS_DRAFT:
        dense = length < 0
    if HAS_ONE_HOT:
        dense = dense & (tl.load(one_hot + b) == 0)
    fault = tl.where((length < 0) | (length >= J) | (t_start < 0) | (t_start + length >= target_rows), 4, 0)
    fault = tl.where(dense & ((d_start < 0) | (d_start + length > draft_rows)), 4, fault)
    rows = tl.where(fault == 0, length + 1, 0)
    kept = rows * 0
    alive = rows * 0 + 1
    for j in range(0, rows):
        at = (b.to(tl.int64) * J + j) * C
        live = chunks < C
        flags = tl.load(faulty + at + chunks, mask=live, other=0)
        sum_p = tl.sum(tl.load(mass + plane + at + chunks, mask=live, other=0.0).to(tl.float64), axis=0)
        sum_q = tl.sum(tl.load(mass + 2 * plane + at + chunks, mask=live, other=0.0).to(tl.float64), axis=0)
        has_draft = j < length
        cell = b.to(tl.int64) * (J - 1) + j
        token = tl.load(draft_ids + cell, mask=has_draft, other=0).to(tl.int64)
        u = tl.load(accept_u + cell, mask=has_draft, other=0.0).to(tl.float64)
        good_id = (token >= 0) & (token < V)
        # comparisons are written so that a NaN mass or uniform counts as bad
        good_p = (tl.max(flags & 1, axis=0) == 0) & (sum_p > 0.98) & (sum_p < 1.02)
        good_q = (dense & has_draft) == 0
        good_q = good_q | ((tl.max(flags & 2, axis=0) == 0) & (sum_q > 0.98) & (sum_q < 1.02))
        good_u = (u >= 0) & (u < 1)
        kind = tl.where(good_u, 0, 5)
        kind = tl.where(good_id, kind, 3)
        kind = tl.where(good_q, kind, 2)
        kind = tl.where(good_p, kind, 1)
        fault = tl.where((fault == 0) & (kind > 0), 8 * j + kind, fault)
        p_at = (t_start + j) * target_stride + token
        p_x = tl.load(target + p_at, mask=has_draft & good_id, other=0.0).to(tl.float32)
        q_x = p_x * 0 + 1
        if HAS_DRAFT:
            read = has_draft & good_id & dense
            q_x = tl.load(draft + (d_start + j) * draft_stride + token, mask=read, other=1.0).to(tl.float32)
        accept = tl.minimum(tl.div_rn(p_x, tl.maximum(q_x, 1e-20)), 1.0).to(tl.float64)
        alive = tl.where(has_draft & (u < accept), alive, 0)
        kept += alive
    # row `kept` gives the extra token: the residual after a rejection, else the target's own law
    rejected = kept < length
    u = tl.where(rejected, tl.load(replacement_u + b).to(tl.float64), tl.load(bonus_u + b).to(tl.float64))
    good_u = (u >= 0) & (u < 1)
    fault = tl.where((fault == 0) & (good_u == 0), 8 * kept + 5, fault)
    good = fault == 0
    token = tl.load(draft_ids + b.to(tl.int64) * (J - 1) + kept, mask=good & rejected, other=-1)
    zero = kept * 0
    write_plan(
        *(plan, scalars, b, good, rejected, dense, t_start + kept, d_start + kept, token, zero, zero),
        *(b * J + kept, u, zero, zero, zero),
    )
    tl.store(num_accepted + b, tl.where(good, kept, 0).to(tl.int64))
    tl.store(fault_out + b, fault.to(tl.int64))


class Batch(NamedTuple):
    """A ragged batch as the kernels read it: rows, ids, lengths and starts, and the counts that go with them."""

    target_NV: Tensor
    draft_NV: Tensor | None
    ids_BG: Tensor
    lens_B: Tensor
    target_starts_B: Tensor
    draft_starts_B: Tensor
    one_hot_B: Tensor | None

    def sizes(self, chunks: int) -> tuple[int, ...]:
        """Row counts, row strides, J, V and C."""
        target_NV, draft_NV = self.target_NV, self.draft_NV
        counts = target_NV.shape[0], 0 if draft_NV is None else draft_NV.shape[0]
        strides = target_NV.stride(0), 0 if draft_NV is None else draft_NV.stride(0)
        return *counts, *strides, self.ids_BG.shape[1] + 1, target_NV.shape[1], chunks

    def switches(self) -> dict[str, bool]:
        """Which optional inputs there are."""
        return dict(HAS_DRAFT=self.draft_NV is not None, HAS_ONE_HOT=self.one_hot_B is not None)


def make_batch(
    target_NV: Tensor,
    draft_NV: Tensor | None,
    draft_ids_BG: Tensor,
    one_hot_B: Tensor | None,
    accept_u_BG: Tensor,
    vectors_B: dict[str, Tensor],
) -> Batch:
    """Check shapes, layouts and dtypes. `vectors_B` holds lens, starts, uniforms and perhaps temperatures, all [B]."""
    B, G = draft_ids_BG.shape
    require_float("target_NV", target_NV)
    require_rows("target_NV", target_NV)
    if draft_NV is not None:
        require_float("draft_NV", draft_NV)
        require_rows("draft_NV", draft_NV)
        require_shape("draft_NV", draft_NV, (draft_NV.shape[0], target_NV.shape[1]))
    require_shape("accept_u_BG", accept_u_BG, (B, G))
    if one_hot_B is not None:
        vectors_B = {**vectors_B, "one_hot_B": one_hot_B}
        one_hot_B = one_hot_B.to(torch.int32)
    for name, vector_B in vectors_B.items():
        require_shape(name, vector_B, (B,))
        require_rows(name, vector_B)
    where = vectors_B["draft_lens_B"], vectors_B["target_starts_B"], vectors_B["draft_starts_B"]
    return Batch(target_NV, draft_NV, draft_ids_BG.contiguous(), *where, one_hot_B)


def accept_residual(
    target_NV: Tensor,
    draft_NV: Tensor | None,
    draft_ids_BG: Tensor,
    draft_lens_B: Tensor,
    accept_u_BG: Tensor,
    replacement_u_B: Tensor,
    bonus_u_B: Tensor,
    target_starts_B: Tensor,
    draft_starts_B: Tensor,
    one_hot_B: Tensor | None,
    block_v: int = 2048,
) -> tuple[Tensor, Tensor, Tensor]:
    """(num_accepted_B, next_ids_B, fault_B) from rows of probabilities; a faulty request gets (0, -1, code)."""
    vectors_B = dict(draft_lens_B=draft_lens_B, target_starts_B=target_starts_B, draft_starts_B=draft_starts_B)
    vectors_B.update(replacement_u_B=replacement_u_B, bonus_u_B=bonus_u_B)
    batch = make_batch(target_NV, draft_NV, draft_ids_BG, one_hot_B, accept_u_BG, vectors_B)
    (B, G), C = draft_ids_BG.shape, triton.cdiv(target_NV.shape[1], block_v)
    device = target_NV.device
    mass_3BJC = torch.empty((3, B, G + 1, C), dtype=torch.float32, device=device)
    faulty_BJC = torch.empty((B, G + 1, C), dtype=torch.int32, device=device)
    plan_B6 = torch.empty((B, 6), dtype=torch.int64, device=device)
    scalars_B4 = torch.empty((B, 4), dtype=torch.float64, device=device)
    num_accepted_B, next_ids_B, fault_B = (torch.empty(B, dtype=torch.int64, device=device) for _ in range(3))
    sizes, switches = batch.sizes(C), batch.switches()
    launch(
        _chunk_mass_kernel,
        (B * (G + 1), C),
        *(*batch, mass_3BJC, faulty_BJC, *sizes),
        **switches,
        BLOCK_V=block_v,
        num_warps=4,
    )
    noise = (accept_u_BG.contiguous(), replacement_u_B, bonus_u_B)
    outputs = (num_accepted_B, fault_B, plan_B6, scalars_B4)
    launch(
        _accept_kernel,
        (B,),
        *(*batch, *noise, mass_3BJC, faulty_BJC, *outputs, *sizes),
        **switches,
        BLOCK_C=triton.next_power_of_2(C),
        num_warps=4,
    )
    draw(target_NV, draft_NV, plan_B6, scalars_B4, mass_3BJC, next_ids_B, is_logits=False, block_v=block_v)
    return num_accepted_B, next_ids_B, fault_B
