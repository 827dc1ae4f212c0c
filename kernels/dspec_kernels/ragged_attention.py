"""Verification attention from the marker tensor: many requests, each with its own context and draft tree.

First kernel, grid (request x row block, key/value head, split): the rows of a request and all query heads that share a
key/value head form one tile, so the cache is read once a tile. A split covers `SPLIT` places: blocks that every row
sees whole first, then the blocks where prefixes end and ancestor bits begin. Second kernel, grid (row, head): merge the
splits. Split and tile sizes do not depend on the batch, so a request's result does not either. Contract:
`dspec_lab/kernels/ragged_attention.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspec_kernels.launch import block_of, dot_precision, launch, require_float, require_shape

SPLIT = 512  # places of one program, a multiple of every BLOCK_S


@triton.jit
def _fold(peak, total, mixed, scores, seen, values, PRECISION: tl.constexpr):
    """Running softmax: fold a block of masked scores and its values into (peak, total, mixed)."""
    scores = tl.where(seen, scores, float("-inf"))
    new = tl.maximum(peak, tl.max(scores, axis=1))
    # a row that has seen nothing yet keeps peak -inf, whose difference with itself would be NaN
    base = tl.where(new == float("-inf"), 0.0, new)
    weights = tl.exp(scores - base[:, None])
    shrink = tl.exp(peak - base)
    total = total * shrink + tl.sum(weights, axis=1)
    mixed = tl.dot(weights, values, mixed * shrink[:, None], input_precision=PRECISION)
    return new, total, mixed


@triton.jit(do_not_specialize=["splits", "row_blocks"])
def _attend_kernel(
    query,
    keys,
    values,
    marker,
    slots,
    row_starts,
    row_counts,
    ends,
    part_mixed,
    part_peak,
    part_total,
    scale,
    H,
    E,
    splits,
    row_blocks,
    query_stride_n,
    query_stride_h,
    key_stride_s,
    key_stride_k,
    value_stride_s,
    value_stride_k,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
    SPLIT_S: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    b = tl.program_id(0) // row_blocks
    row_block = tl.program_id(0) % row_blocks
    k = tl.program_id(1)
    split = tl.program_id(2)
    count = tl.load(row_counts + b).to(tl.int32)
    end = tl.load(ends + b).to(tl.int32)
    low = split * SPLIT_S
    if (row_block * BLOCK_M >= count * GROUP) | (low >= end):
        return
    high = tl.minimum(end, low + SPLIT_S)
    m = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    live_m = m < count * GROUP
    n = tl.load(row_starts + b).to(tl.int64) + m // GROUP
    head = k * GROUP + m % GROUP
    e = tl.arange(0, BLOCK_E)
    live_e = e < E
    q_mask = live_m[:, None] & live_e[None, :]
    q_at = n[:, None] * query_stride_n + head.to(tl.int64)[:, None] * query_stride_h + e[None, :]
    q = tl.load(query + q_at, mask=q_mask, other=0.0).to(tl.float32)
    # places fit 31 bits; only the pool needs 64
    first = tl.load(marker + n * 5 + 2, mask=live_m, other=0).to(tl.int32)
    prefix = tl.load(marker + n * 5 + 3, mask=live_m, other=0).to(tl.int32)
    ancestors = tl.load(marker + n * 5 + 4, mask=live_m, other=0)
    shortest = tl.min(tl.where(live_m, prefix, end), axis=0)
    # up to `whole`, in full blocks, only `first` can hide a place
    whole = tl.maximum(tl.minimum(high, shortest) // BLOCK_S * BLOCK_S, low)
    slot = tl.load(slots + b).to(tl.int64)
    key_base = keys + slot * key_stride_s + k.to(tl.int64) * key_stride_k
    value_base = values + slot * value_stride_s + k.to(tl.int64) * value_stride_k
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_E], dtype=tl.float32)
    for start in range(low, whole, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        kv_mask = (s < whole)[:, None] & live_e[None, :]
        key = tl.load(key_base + s.to(tl.int64)[:, None] * key_stride_s + e[None, :], mask=kv_mask, other=0.0)
        value = tl.load(value_base + s.to(tl.int64)[:, None] * value_stride_s + e[None, :], mask=kv_mask, other=0.0)
        seen = live_m[:, None] & (s[None, :] >= first[:, None])
        scores = tl.dot(q, tl.trans(key.to(tl.float32)), input_precision=PRECISION) * scale
        peak, total, mixed = _fold(peak, total, mixed, scores, seen, value.to(tl.float32), PRECISION)
    for start in range(whole, high, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        offset = s[None, :] - prefix[:, None]
        bit = (ancestors[:, None] >> tl.minimum(tl.maximum(offset, 0), 62).to(tl.int64)) & 1
        seen = ((s[None, :] >= first[:, None]) & (offset < 0)) | ((offset >= 0) & (offset < 63) & (bit == 1))
        seen = seen & live_m[:, None] & (s < high)[None, :]
        # what no row sees may be NaN, and 0 x NaN would reach every row
        useful = tl.max(seen.to(tl.int32), axis=0) > 0
        kv_mask = useful[:, None] & live_e[None, :]
        key = tl.load(key_base + s.to(tl.int64)[:, None] * key_stride_s + e[None, :], mask=kv_mask, other=0.0)
        value = tl.load(value_base + s.to(tl.int64)[:, None] * value_stride_s + e[None, :], mask=kv_mask, other=0.0)
        scores = tl.dot(q, tl.trans(key.to(tl.float32)), input_precision=PRECISION) * scale
        peak, total, mixed = _fold(peak, total, mixed, scores, seen, value.to(tl.float32), PRECISION)
    cell = (n * H + head) * splits + split
    tl.store(part_peak + cell, peak, mask=live_m)
    tl.store(part_total + cell, total, mask=live_m)
    tl.store(part_mixed + cell[:, None] * E + e[None, :], mixed, mask=q_mask)


@triton.jit(do_not_specialize=["splits"])
def _merge_kernel(
    part_mixed,
    part_peak,
    part_total,
    marker,
    ends,
    out,
    H,
    E,
    splits,
    SPLIT_S: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    owner = tl.load(marker + n * 5)
    e = tl.arange(0, BLOCK_E)
    end = tl.load(ends + owner, mask=owner >= 0, other=0).to(tl.int32)
    peak = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    mixed = tl.zeros([BLOCK_E], dtype=tl.float32)
    # splits past the request's end were never written
    for i in range(0, (end + SPLIT_S - 1) // SPLIT_S):
        cell = (n * H + head) * splits + i
        part = tl.load(part_peak + cell)
        new = tl.maximum(peak, part)
        base = tl.where(new == float("-inf"), 0.0, new)
        shrink = tl.exp(peak - base)
        grow = tl.exp(part - base)
        total = total * shrink + tl.load(part_total + cell) * grow
        mixed = mixed * shrink + tl.load(part_mixed + cell * E + e, mask=e < E, other=0.0) * grow
        peak = new
    mixed = mixed / tl.where(owner >= 0, total, 1.0)
    tl.store(out + (n * H + head) * E + e, mixed.to(out.dtype.element_ty), mask=e < E)


def ragged_attention(
    query_NHE: Tensor,
    keys_SKE: Tensor,
    values_SKE: Tensor,
    marker_NP: Tensor,
    slots_B: Tensor,
    starts_B: Tensor,
    counts_B: Tensor,
    ends_B: Tensor,
    *,
    scale: float,
    max_rows: int,
    max_end: int,
    split: int = SPLIT,
) -> Tensor:
    """Attention output [N, H, E] in the query's dtype.

    `max_rows` and `max_end` bound the rows and the places of a request; they only size the grid, so bounds above the
    true maxima cost empty programs and change no bit.
    """
    (N, H, E), (S, K, _), B = query_NHE.shape, keys_SKE.shape, slots_B.shape[0]
    for name, tensor in dict(query_NHE=query_NHE, keys_SKE=keys_SKE, values_SKE=values_SKE).items():
        require_float(name, tensor)
        if E > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name} must be contiguous along the head width, got strides {tensor.stride()}")
    require_shape("keys_SKE", keys_SKE, (S, K, E))
    require_shape("values_SKE", values_SKE, (S, K, E))
    require_shape("marker_NP", marker_NP, (N, 5))
    if H % K:
        raise ValueError(f"{H} query heads cannot share {K} key/value heads")
    if E > 256:
        raise ValueError(f"head width must be at most 256, got {E}")
    group = H // K
    # from the head layout alone: a tile that followed the batch would change the order of additions with it
    block_m = block_of(8 * group, 64)
    block_e, precision = block_of(E, 256), dot_precision(query_NHE, keys_SKE, values_SKE)
    # exact fp32 products run on the plain units and keep more in registers, so more warps share a tile
    heavy = precision == "ieee" or block_e > 128
    block_s = 32
    if split % block_s:
        raise ValueError(f"split must be a multiple of {block_s}, got {split}")
    splits, row_blocks = max(triton.cdiv(max_end, split), 1), triton.cdiv(max_rows * group, block_m)
    device = query_NHE.device
    part_peak_NHC = torch.empty((N, H, splits), dtype=torch.float32, device=device)
    part_total_NHC = torch.empty_like(part_peak_NHC)
    part_mixed_NHCE = torch.empty((N, H, splits, E), dtype=torch.float32, device=device)
    out_NHE = torch.empty((N, H, E), dtype=query_NHE.dtype, device=device)
    marker_NP = marker_NP.contiguous()
    launch(
        _attend_kernel,
        (B * row_blocks, K, splits),
        *(query_NHE, keys_SKE, values_SKE, marker_NP, slots_B, starts_B, counts_B, ends_B),
        *(part_mixed_NHCE, part_peak_NHC, part_total_NHC, float(scale), H, E, splits, row_blocks),
        *(*query_NHE.stride()[:2], *keys_SKE.stride()[:2], *values_SKE.stride()[:2]),
        GROUP=group,
        PRECISION=precision,
        SPLIT_S=split,
        BLOCK_M=block_m,
        BLOCK_S=block_s,
        BLOCK_E=block_e,
        num_warps=8 if heavy else 4,
        num_stages=2,
    )
    launch(
        _merge_kernel,
        (N, H),
        *(part_mixed_NHCE, part_peak_NHC, part_total_NHC, marker_NP, ends_B, out_NHE, H, E, splits),
        SPLIT_S=split,
        BLOCK_E=block_e,
        num_warps=1,
    )
    return out_NHE
