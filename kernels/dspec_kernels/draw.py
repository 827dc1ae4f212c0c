"""Draw one token a request from max(p - q, 0) or from p, at the row that the accept kernels have written in a plan.

`plan_B6` int64: target row (-1: commit nothing), draft row (-1: no dense q), the token of a one-hot q (-1: none), first
largest entry of the target row, of the draft row, row of the chunk masses. `scalars_B4` fp64: uniform, temperature,
log-normaliser of the target row, of the draft row. Probabilities use the first three and the uniform only.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dspec_kernels.inverse_cdf import first_above
from dspec_kernels.launch import launch


@triton.jit
def probs_at(logits, temperature, lse, top, offs):
    """softmax(logits / temperature) given its log-normaliser; one-hot on `top` at temperature 0. -inf gives 0."""
    scaled = tl.div_rn(logits, tl.where(temperature == 0, 1.0, temperature))
    return tl.where(temperature == 0, (offs == top).to(tl.float32), tl.exp(scaled - lse))


@triton.jit
def write_plan(
    plan, scalars, b, good, rejected, dense, t_row, d_row, token, top_p, top_q, mass_row, u, temperature, lse_p, lse_q
):
    """Store what `_draw_kernel` needs for request `b`."""
    tl.store(plan + 6 * b, tl.where(good, t_row, -1).to(tl.int64))
    tl.store(plan + 6 * b + 1, tl.where(good & rejected & dense, d_row, -1).to(tl.int64))
    tl.store(plan + 6 * b + 2, tl.where(good & rejected & (dense == 0), token, -1).to(tl.int64))
    tl.store(plan + 6 * b + 3, top_p.to(tl.int64))
    tl.store(plan + 6 * b + 4, top_q.to(tl.int64))
    tl.store(plan + 6 * b + 5, mass_row.to(tl.int64))
    tl.store(scalars + 4 * b, u.to(tl.float64))
    tl.store(scalars + 4 * b + 1, temperature.to(tl.float64))
    tl.store(scalars + 4 * b + 2, lse_p.to(tl.float64))
    tl.store(scalars + 4 * b + 3, lse_q.to(tl.float64))


@triton.jit
def load_pair(
    target, draft, plan, scalars, target_stride, draft_stride, V, b, offs,
    HAS_DRAFT: tl.constexpr, IS_LOGITS: tl.constexpr,
):  # fmt: skip
    """(p, q) of request `b` at `offs`, 0 wherever the plan names no row."""
    t_row = tl.load(plan + 6 * b)
    d_row = tl.load(plan + 6 * b + 1)
    token = tl.load(plan + 6 * b + 2)
    temperature = tl.load(scalars + 4 * b + 1).to(tl.float32)
    # a scalar condition enters a mask through the limit: the interpreter mistypes `block & scalar`
    live = (offs >= 0) & (offs < tl.where(t_row >= 0, V, 0))
    p = tl.load(target + t_row * target_stride + offs, mask=live, other=0.0).to(tl.float32)
    if IS_LOGITS:
        p = probs_at(p, temperature, tl.load(scalars + 4 * b + 2).to(tl.float32), tl.load(plan + 6 * b + 3), offs)
        p = tl.where(live, p, 0.0)
    q = (offs == token).to(tl.float32)
    if HAS_DRAFT:
        live = (offs >= 0) & (offs < tl.where(d_row >= 0, V, 0))
        dense = tl.load(draft + d_row * draft_stride + offs, mask=live, other=0.0).to(tl.float32)
        if IS_LOGITS:
            lse = tl.load(scalars + 4 * b + 3).to(tl.float32)
            dense = probs_at(dense, temperature, lse, tl.load(plan + 6 * b + 4), offs)
        q = tl.where(live, dense, q)
    return p, q


@triton.jit(do_not_specialize=["plane"])
def _draw_kernel(
    target,
    draft,
    plan,
    scalars,
    mass,
    next_ids,
    target_stride,
    draft_stride,
    plane,
    V,
    C,
    HAS_DRAFT: tl.constexpr,
    IS_LOGITS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    b = tl.program_id(0)
    good = tl.load(plan + 6 * b) >= 0
    rejected = (tl.load(plan + 6 * b + 1) >= 0) | (tl.load(plan + 6 * b + 2) >= 0)
    at = tl.load(plan + 6 * b + 5) * C
    chunks = tl.arange(0, BLOCK_C)
    live_c = chunks < tl.where(good, C, 0)
    left_c = tl.load(mass + at + chunks, mask=live_c, other=0.0).to(tl.float64)
    p_c = tl.load(mass + plane + at + chunks, mask=live_c, other=0.0).to(tl.float64)
    # no more mass than rounding noise: p and q agree, so p itself is drawn from
    use_left = rejected & (tl.sum(left_c, axis=0) > 1e-8)
    chunk_c = tl.where(use_left, left_c, p_c)
    threshold = tl.load(scalars + 4 * b) * tl.sum(chunk_c, axis=0)
    chunk, before = first_above(chunk_c, threshold, chunks)
    offs = chunk * BLOCK_V + tl.arange(0, BLOCK_V)
    p, q = load_pair(
        target, draft, plan, scalars, target_stride, draft_stride, V, b, offs, HAS_DRAFT=HAS_DRAFT, IS_LOGITS=IS_LOGITS
    )
    entry = tl.where(use_left, tl.maximum(p - q, 0.0), p).to(tl.float64)
    drawn, _ = first_above(entry, threshold - before, offs)
    tl.store(next_ids + b, tl.where(good, drawn, -1).to(tl.int64))


def draw(
    target_NV: Tensor,
    draft_NV: Tensor | None,
    plan_B6: Tensor,
    scalars_B4: Tensor,
    mass: Tensor,
    next_ids_B: Tensor,
    is_logits: bool,
    block_v: int,
) -> None:
    """Write the drawn token of every request into `next_ids_B`, -1 where its plan commits nothing.

    `mass[0]` holds the residual masses of the chunks, `mass[1]` those of p; the last axis is the chunk.
    """
    V, C = target_NV.shape[-1], mass.shape[-1]
    launch(
        _draw_kernel,
        (next_ids_B.shape[0],),
        *(target_NV, draft_NV, plan_B6, scalars_B4, mass, next_ids_B),
        *(target_NV.stride(0), 0 if draft_NV is None else draft_NV.stride(0), mass.stride(0), V, C),
        HAS_DRAFT=draft_NV is not None,
        IS_LOGITS=is_logits,
        BLOCK_V=block_v,
        BLOCK_C=triton.next_power_of_2(C),
        num_warps=8,
    )
