"""Move the kept rows of each request's tree to consecutive slots of the KV pool, in place, in all layers and heads.

Grid (request, layer, part of a row); a program moves its part of one kept row after the other. Kept rows ascend, so a
row is written at or before the slot it came from and only over slots already read. Contract:
`dspec_lab/kernels/compact_kv.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dspec_kernels.launch import block_of, launch, require_shape


@triton.jit(do_not_specialize=["max_kept"])
def _compact_kernel(
    keys,
    values,
    first_slots,
    kept,
    num_kept,
    key_stride_l,
    key_stride_s,
    key_stride_k,
    key_stride_e,
    value_stride_l,
    value_stride_s,
    value_stride_k,
    value_stride_e,
    max_kept,
    width,
    E,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    head = (part // E).to(tl.int64)
    first = tl.load(first_slots + b).to(tl.int64)
    key_base = keys + layer * key_stride_l + first * key_stride_s
    value_base = values + layer * value_stride_l + first * value_stride_s
    key_at = head * key_stride_k + (part % E) * key_stride_e
    value_at = head * value_stride_k + (part % E) * value_stride_e
    for i in range(0, tl.minimum(tl.load(num_kept + b).to(tl.int32), max_kept)):
        source = tl.load(kept + b * max_kept + i).to(tl.int64)
        # rows in place stay untouched; the same lane loads and stores an element, so no barrier is needed
        live = part < tl.where(source == i, 0, width)
        key = tl.load(key_base + source * key_stride_s + key_at, mask=live)
        value = tl.load(value_base + source * value_stride_s + value_at, mask=live)
        tl.store(key_base + i * key_stride_s + key_at, key, mask=live)
        tl.store(value_base + i * value_stride_s + value_at, value, mask=live)


def compact_kv(
    keys_LSKE: Tensor,
    values_LSKE: Tensor,
    first_slots_B: Tensor,
    kept_BJ: Tensor,
    num_kept_B: Tensor,
    block: int | None = None,
) -> None:
    """Slot `first + i` takes the content of slot `first + kept[i]`, for i < num_kept. The caller has checked `kept`."""
    L, _, K, E = keys_LSKE.shape
    B, J = kept_BJ.shape
    require_shape("values_LSKE", values_LSKE, tuple(keys_LSKE.shape))
    require_shape("first_slots_B", first_slots_B, (B,))
    require_shape("num_kept_B", num_kept_B, (B,))
    block = block or block_of(K * E, 2048)
    launch(
        _compact_kernel,
        (B, L, triton.cdiv(K * E, block)),
        *(keys_LSKE, values_LSKE, first_slots_B.contiguous(), kept_BJ.contiguous(), num_kept_B.contiguous()),
        *(*keys_LSKE.stride(), *values_LSKE.stride(), J, K * E, E),
        BLOCK=block,
        num_warps=4,
    )
