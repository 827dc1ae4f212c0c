"""One sequential-head step: base logits + low-rank bias, and a token drawn from them, without a [V, V] table.

First kernel, grid (chunk, requests): bias = latent W2^T on this chunk, corrected logits out, peak and sum of
exponentials. Second, grid (request): log-normaliser, the chunk by its mass, the token inside it, from the very logits
that were written. The second factor W2 is read once per 16 requests. Contract: `dspec_lab/kernels/markov_step.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspec_kernels.inverse_cdf import combine_chunks, first_above, is_bad_logit
from dspec_kernels.launch import block_of, dot_precision, launch, require_float, require_rows, require_shape


@triton.jit(do_not_specialize=["B"])
def _biased_logits_kernel(
    base,
    latent,
    prev_ids,
    w2,
    temperatures,
    logits,
    stats,
    tops,
    faulty,
    base_stride,
    latent_stride,
    w2_stride,
    B,
    R,
    V,
    C,
    GATHER: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    chunk = tl.program_id(0)
    b = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    v = chunk * BLOCK_V + tl.arange(0, BLOCK_V)
    live_b = b < B
    live_v = v < V
    # int64: a row offset passes 2^31 at 262144 tokens x 8192 rows
    row = b.to(tl.int64)
    bad = live_b & (b < 0)
    if GATHER:
        row = tl.load(prev_ids + b, mask=live_b, other=0).to(tl.int64)
        bad = live_b & ((row < 0) | (row >= V))
    read_b = live_b & (bad == 0)
    bias = tl.zeros([BLOCK_B, BLOCK_V], dtype=tl.float32)
    for start in range(0, R, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        live_r = r < R
        e_mask = read_b[:, None] & live_r[None, :]
        e = tl.load(latent + row[:, None] * latent_stride + r[None, :], mask=e_mask, other=0.0).to(tl.float32)
        w_mask = live_v[:, None] & live_r[None, :]
        w = tl.load(w2 + v.to(tl.int64)[:, None] * w2_stride + r[None, :], mask=w_mask, other=0.0).to(tl.float32)
        bias = tl.dot(e, tl.trans(w), bias, input_precision=PRECISION)
    live = live_b[:, None] & live_v[None, :]
    at = b.to(tl.int64)[:, None] * base_stride + v[None, :]
    x = bias + tl.load(base + at, mask=live, other=float("-inf")).to(tl.float32)
    tl.store(logits + b.to(tl.int64)[:, None] * V + v[None, :], x, mask=live)
    x = tl.where(live, x, float("-inf"))
    temperature = tl.load(temperatures + b, mask=live_b, other=0.0).to(tl.float32)
    scale = tl.where((temperature >= 1e-5) & (temperature < float("inf")), temperature, 1.0)
    flag = tl.max(is_bad_logit(x), axis=1) + 2 * bad.to(tl.int32)
    x = tl.div_rn(x, scale[:, None])
    peak, top = tl.max(x, axis=1, return_indices=True)
    floor = tl.where(peak == float("-inf"), 0.0, peak)
    cell = b.to(tl.int64) * C + chunk
    plane = tl.full([BLOCK_B], B, tl.int64) * C
    tl.store(stats + cell, peak, mask=live_b)
    tl.store(stats + plane + cell, tl.sum(tl.exp(x - floor[:, None]), axis=1), mask=live_b)
    tl.store(tops + cell, chunk * BLOCK_V + top, mask=live_b)
    tl.store(faulty + cell, flag, mask=live_b)


@triton.jit
def _sample_kernel(
    logits,
    temperatures,
    uniforms,
    stats,
    tops,
    faulty,
    token_ids,
    row_lse,
    fault_out,
    V,
    C,
    BLOCK_V: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    b = tl.program_id(0)
    temperature = tl.load(temperatures + b).to(tl.float32)
    u = tl.load(uniforms + b).to(tl.float64)
    chunks = tl.arange(0, BLOCK_C)
    at = b.to(tl.int64) * C
    plane = tl.num_programs(0).to(tl.int64) * C
    peak, lse, top = combine_chunks(stats + at, stats + plane + at, tops + at, chunks, C)
    flags = tl.load(faulty + at + chunks, mask=chunks < C, other=0)
    good_row = (tl.max(flags & 1, axis=0) == 0) & (peak > float("-inf"))
    fault = tl.where((u >= 0) & (u < 1), 0, 5)
    fault = tl.where((temperature == 0) | ((temperature >= 1e-5) & (temperature < float("inf"))), fault, 6)
    fault = tl.where(tl.max(flags & 2, axis=0) == 0, fault, 3)
    # without a valid previous token the bias is unknown, so the row says nothing
    fault = tl.where(good_row | (fault == 3), fault, 2)
    go = fault == 0
    live = chunks < tl.where(go, C, 0)
    peak_C = tl.load(stats + at + chunks, mask=live, other=float("-inf"))
    sum_C = tl.load(stats + plane + at + chunks, mask=live, other=0.0)
    mass_C = (sum_C * tl.exp(peak_C - tl.where(go, lse, 0.0))).to(tl.float64)
    threshold = u * tl.sum(mass_C, axis=0)
    chunk, before = first_above(mass_C, threshold, chunks)
    v = chunk * BLOCK_V + tl.arange(0, BLOCK_V)
    live_v = (v >= 0) & (v < tl.where(go, V, 0))
    x = tl.load(logits + b.to(tl.int64) * V + v, mask=live_v, other=float("-inf"))
    q = tl.exp(tl.div_rn(x, tl.where(temperature > 0, temperature, 1.0)) - lse)
    drawn, _ = first_above(tl.where(live_v, q, 0.0).to(tl.float64), threshold - before, v)
    drawn = tl.where(temperature == 0, top, drawn)
    tl.store(token_ids + b, tl.where(go, drawn, -1).to(tl.int64))
    tl.store(row_lse + b, tl.where(go, lse, float("nan")))
    tl.store(fault_out + b, fault.to(tl.int64))


def _step(
    base_BV: Tensor,
    latent: Tensor,
    prev_ids_B: Tensor | None,
    w2_VR: Tensor,
    temperature_B: Tensor,
    uniform_B: Tensor,
    block_v: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (B, V), R = base_BV.shape, w2_VR.shape[-1]
    for name, tensor in dict(base_BV=base_BV, w2_VR=w2_VR, latent=latent).items():
        require_float(name, tensor)
        require_rows(name, tensor)
    require_shape("w2_VR", w2_VR, (V, R))
    require_shape("latent (or w1_VR)", latent, (B if prev_ids_B is None else V, R))
    vectors_B = dict(temperature_B=temperature_B, uniform_B=uniform_B)
    if prev_ids_B is not None:
        vectors_B["prev_ids_B"] = prev_ids_B
    for name, vector_B in vectors_B.items():
        require_shape(name, vector_B, (B,))
        require_rows(name, vector_B)
    C, block_b, device = triton.cdiv(V, block_v), 16, base_BV.device
    logits_BV = torch.empty((B, V), dtype=torch.float32, device=device)
    stats_2BC = torch.empty((2, B, C), dtype=torch.float32, device=device)
    tops_BC, faulty_BC = (torch.empty((B, C), dtype=torch.int32, device=device) for _ in range(2))
    token_ids_B, fault_B = (torch.empty(B, dtype=torch.int64, device=device) for _ in range(2))
    logsumexp_B = torch.empty(B, dtype=torch.float32, device=device)
    launch(
        _biased_logits_kernel,
        (C, triton.cdiv(B, block_b)),
        *(base_BV, latent, prev_ids_B, w2_VR, temperature_B, logits_BV, stats_2BC, tops_BC, faulty_BC),
        *(base_BV.stride(0), latent.stride(0), w2_VR.stride(0), B, R, V, C),
        GATHER=prev_ids_B is not None,
        PRECISION=dot_precision(latent, w2_VR),
        BLOCK_B=block_b,
        BLOCK_R=block_of(R, 64),
        BLOCK_V=block_v,
        num_warps=4,
    )
    launch(
        _sample_kernel,
        (B,),
        *(logits_BV, temperature_B, uniform_B, stats_2BC, tops_BC, faulty_BC, token_ids_B, logsumexp_B, fault_B, V, C),
        BLOCK_V=block_v,
        BLOCK_C=triton.next_power_of_2(C),
        num_warps=4,
    )
    return token_ids_B, logits_BV, logsumexp_B, fault_B


def markov_step(
    base_BV: Tensor,
    prev_ids_B: Tensor,
    w1_VR: Tensor,
    w2_VR: Tensor,
    temperature_B: Tensor,
    uniform_B: Tensor,
    block_v: int = 128,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(token_ids_B, draft_logits_BV fp32, logsumexp_B, fault_B) with the bias w1[previous token] w2^T."""
    return _step(base_BV, w1_VR, prev_ids_B, w2_VR, temperature_B, uniform_B, block_v)


def low_rank_step(
    base_BV: Tensor,
    latent_BR: Tensor,
    w2_VR: Tensor,
    temperature_B: Tensor,
    uniform_B: Tensor,
    block_v: int = 128,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`markov_step` with the bias latent w2^T, for heads that compute the latent vector themselves."""
    return _step(base_BV, latent_BR, None, w2_VR, temperature_B, uniform_B, block_v)
