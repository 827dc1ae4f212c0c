"""Accept a prefix of the draft and draw the extra token, straight from both models' logits.

Every live row is read once for its log-normaliser; after the accept decision one row of each request is read again for
the chunk masses of max(p - q, 0). No row of probabilities is written. Contract: `dspec_lab/kernels/accept_residual.py`
with a temperature.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspec_kernels.accept_residual import make_batch
from dspec_kernels.draw import draw, load_pair, probs_at, write_plan
from dspec_kernels.inverse_cdf import combine_chunks, is_bad_logit
from dspec_kernels.launch import launch


@triton.jit
def _good_temperature(temperature):
    return (temperature == 0) | ((temperature >= 1e-5) & (temperature < float("inf")))


@triton.jit
def _store_chunk(x, scale, chunk, stats, tops, plane, at, BLOCK_V: tl.constexpr):
    """Store peak and sum of exponentials of x / scale in this chunk, and the index of its first maximum."""
    x = tl.div_rn(x, scale)
    peak, top = tl.max(x, axis=0, return_indices=True)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    tl.store(stats + at, peak)
    tl.store(stats + plane + at, tl.sum(tl.exp(x - base), axis=0))
    tl.store(tops + at, chunk * BLOCK_V + top)


@triton.jit(do_not_specialize=["target_rows", "draft_rows"])
def _row_stats_kernel(
    target,
    draft,
    lens,
    target_starts,
    draft_starts,
    one_hot,
    temperatures,
    stats,
    tops,
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
    temperature = tl.load(temperatures + b).to(tl.float32)
    if (j > length) | (length >= J) | (t_row < 0) | (t_row >= target_rows):
        return
    scale = tl.where(_good_temperature(temperature) & (temperature > 0), temperature, 1.0)
    offs = chunk * BLOCK_V + tl.arange(0, BLOCK_V)
    at = row.to(tl.int64) * C + chunk
    plane = tl.num_programs(0).to(tl.int64) * C
    x = tl.load(target + t_row * target_stride + offs, mask=offs < V, other=float("-inf")).to(tl.float32)
    bad = tl.max(is_bad_logit(x), axis=0)
    _store_chunk(x, scale, chunk, stats, tops, plane, at, BLOCK_V)
    if HAS_DRAFT:
        dense = (j < length) & (d_row >= 0) & (d_row < draft_rows)
        if HAS_ONE_HOT:
            dense = dense & (tl.load(one_hot + b) == 0)
        limit = tl.where(dense, V, 0)
        x = tl.load(draft + d_row * draft_stride + offs, mask=offs < limit, other=float("-inf")).to(tl.float32)
        bad += 2 * tl.max(is_bad_logit(x), axis=0)
        _store_chunk(x, scale, chunk, stats + 2 * plane, tops + plane, plane, at, BLOCK_V)
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
    temperatures,
    accept_u,
    replacement_u,
    bonus_u,
    stats,
    tops,
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
    temperature = tl.load(temperatures + b).to(tl.float32)
    plane = tl.num_programs(0).to(tl.int64) * J * C
    chunks = tl.arange(0, BLOCK_C)
    dense = length > 0
    if not HAS_DRAFT:
        dense = length < 0
    if HAS_ONE_HOT:
        dense = dense & (tl.load(one_hot + b) == 0)
    fault = tl.where(_good_temperature(temperature), 0, 6)
    fault = tl.where(dense & ((d_start < 0) | (d_start + length > draft_rows)), 4, fault)
    fault = tl.where((length < 0) | (length >= J) | (t_start < 0) | (t_start + length >= target_rows), 4, fault)
    rows = tl.where(fault == 0, length + 1, 0)
    kept = rows * 0
    alive = rows * 0 + 1
    for j in range(0, rows):
        at = (b.to(tl.int64) * J + j) * C
        flags = tl.load(faulty + at + chunks, mask=chunks < C, other=0)
        peak_p, lse_p, top_p = combine_chunks(stats + at, stats + plane + at, tops + at, chunks, C)
        has_draft = j < length
        cell = b.to(tl.int64) * (J - 1) + j
        token = tl.load(draft_ids + cell, mask=has_draft, other=0).to(tl.int64)
        u = tl.load(accept_u + cell, mask=has_draft, other=0.0).to(tl.float64)
        good_id = (token >= 0) & (token < V)
        x = tl.load(target + (t_start + j) * target_stride + token, mask=has_draft & good_id, other=0.0).to(tl.float32)
        p_x = probs_at(x, temperature, lse_p, top_p, token)
        q_x = p_x * 0 + 1
        good_q = length >= 0
        if HAS_DRAFT:
            read = has_draft & dense
            base = stats + 2 * plane + at
            limit = tl.where(read, C, 0)
            peak_q, lse_q, top_q = combine_chunks(base, base + plane, tops + plane + at, chunks, limit)
            x = tl.load(draft + (d_start + j) * draft_stride + token, mask=read & good_id, other=0.0).to(tl.float32)
            q_x = tl.where(read, probs_at(x, temperature, lse_q, top_q, token), 1.0)
            good_q = (read == 0) | ((tl.max(flags & 2, axis=0) == 0) & (peak_q > float("-inf")))
        good_p = (tl.max(flags & 1, axis=0) == 0) & (peak_p > float("-inf"))
        good_u = (u >= 0) & (u < 1)
        kind = tl.where(good_u, 0, 5)
        kind = tl.where(good_id, kind, 3)
        kind = tl.where(good_q, kind, 2)
        kind = tl.where(good_p, kind, 1)
        fault = tl.where((fault == 0) & (kind > 0), 8 * j + kind, fault)
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
    at = (b.to(tl.int64) * J + kept) * C
    limit = tl.where(good, C, 0)
    _, lse_p, top_p = combine_chunks(stats + at, stats + plane + at, tops + at, chunks, limit)
    lse_q = lse_p
    top_q = top_p
    if HAS_DRAFT:
        base = stats + 2 * plane + at
        limit = tl.where(dense & rejected, limit, 0)
        _, lse_q, top_q = combine_chunks(base, base + plane, tops + plane + at, chunks, limit)
    write_plan(
        *(plan, scalars, b, good, rejected, dense, t_start + kept, d_start + kept, token, top_p, top_q),
        *(b, u, temperature, lse_p, lse_q),
    )
    tl.store(num_accepted + b, tl.where(good, kept, 0).to(tl.int64))
    tl.store(fault_out + b, fault.to(tl.int64))


@triton.jit
def _residual_mass_kernel(
    target,
    draft,
    plan,
    scalars,
    mass,
    target_stride,
    draft_stride,
    V,
    C,
    HAS_DRAFT: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    b = tl.program_id(0)
    chunk = tl.program_id(1)
    offs = chunk * BLOCK_V + tl.arange(0, BLOCK_V)
    p, q = load_pair(
        target, draft, plan, scalars, target_stride, draft_stride, V, b, offs, HAS_DRAFT=HAS_DRAFT, IS_LOGITS=True
    )
    at = b.to(tl.int64) * C + chunk
    plane = tl.num_programs(0).to(tl.int64) * C
    tl.store(mass + at, tl.sum(tl.maximum(p - q, 0.0), axis=0))
    tl.store(mass + plane + at, tl.sum(p, axis=0))


def accept_residual_logits(
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
    temperature_B: Tensor,
    block_v: int = 4096,
) -> tuple[Tensor, Tensor, Tensor]:
    """(num_accepted_B, next_ids_B, fault_B) from rows of logits; a faulty request gets (0, -1, code)."""
    vectors_B = dict(draft_lens_B=draft_lens_B, target_starts_B=target_starts_B, draft_starts_B=draft_starts_B)
    vectors_B.update(replacement_u_B=replacement_u_B, bonus_u_B=bonus_u_B, temperature_B=temperature_B)
    batch = make_batch(target_NV, draft_NV, draft_ids_BG, one_hot_B, accept_u_BG, vectors_B)
    (B, G), C = draft_ids_BG.shape, triton.cdiv(target_NV.shape[1], block_v)
    device = target_NV.device
    stats_4BJC = torch.empty((4, B, G + 1, C), dtype=torch.float32, device=device)
    tops_2BJC = torch.empty((2, B, G + 1, C), dtype=torch.int32, device=device)
    faulty_BJC = torch.empty((B, G + 1, C), dtype=torch.int32, device=device)
    mass_2BC = torch.empty((2, B, C), dtype=torch.float32, device=device)
    plan_B6 = torch.empty((B, 6), dtype=torch.int64, device=device)
    scalars_B4 = torch.empty((B, 4), dtype=torch.float64, device=device)
    num_accepted_B, next_ids_B, fault_B = (torch.empty(B, dtype=torch.int64, device=device) for _ in range(3))
    sizes, switches = batch.sizes(C), batch.switches()
    partial = (stats_4BJC, tops_2BJC, faulty_BJC)
    rows = (batch.target_NV, batch.draft_NV, *batch[3:])  # the drafted ids are not needed for the statistics
    launch(
        _row_stats_kernel,
        (B * (G + 1), C),
        *(*rows, temperature_B, *partial, *sizes),
        **switches,
        BLOCK_V=block_v,
        num_warps=8,
    )
    noise = (accept_u_BG.contiguous(), replacement_u_B, bonus_u_B)
    outputs = (num_accepted_B, fault_B, plan_B6, scalars_B4)
    launch(
        _accept_kernel,
        (B,),
        *(*batch, temperature_B, *noise, *partial, *outputs, *sizes),
        **switches,
        BLOCK_C=triton.next_power_of_2(C),
        num_warps=4,
    )
    launch(
        _residual_mass_kernel,
        (B, C),
        *(target_NV, draft_NV, plan_B6, scalars_B4, mass_2BC, *sizes[2:4], *sizes[5:]),
        HAS_DRAFT=batch.draft_NV is not None,
        BLOCK_V=block_v,
        num_warps=8,
    )
    draw(target_NV, draft_NV, plan_B6, scalars_B4, mass_2BC, next_ids_B, is_logits=True, block_v=block_v)
    return num_accepted_B, next_ids_B, fault_B
