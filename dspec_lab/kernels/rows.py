"""The ops of a decoder layer over few rows: torch reference, and a CPU twin compiled from `rows.c`.

On a CPU without bf16 arithmetic torch multiplies 8 rows by a bf16 weight several times slower than one row, which
would take the gain out of speculative decoding; the twin reads each weight once for all rows. It also computes every
row the same way whatever its neighbours, so a verify pass gives, bit for bit, what one-token passes give.

The twin (`native_rows`) is compiled once with the system's C compiler into the cache folder. Where it cannot be had,
"auto" uses torch; `native_status()` says which and why.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

Impl = Literal["auto", "torch", "native"]
BLOCK = 32  # positions are attended to in blocks of this many


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer for the requests of a forward pass (fp32).

    `keys[r]` is [K, E, capacity] (transposed) and `values[r]` [K, capacity, E] for request r; capacities are
    multiples of `BLOCK`.
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    pointers: tuple[object, object, object] | None = None  # prepared by `native_pointers`


@dataclass(frozen=True, slots=True)
class RowMarkers:
    """Where each row goes and what it sees; who sees whom is carried by this, not by padding.

    Row n belongs to request `owner_N[n]`, is stored at cache position `place_N[n]`, and sees that request's positions
    `first_N[n] .. prefix_N[n] - 1`, and `prefix_N[n] + i` for each set bit i (0..62) of `ancestors_N[n]`.
    A chain needs no bits: prefix = place + 1.
    A tree node has prefix = context length and the bits of its ancestors and itself. int64 each.
    """

    owner_N: Tensor
    place_N: Tensor
    first_N: Tensor
    prefix_N: Tensor
    ancestors_N: Tensor
    span: int  # upper bound of the positions any row looks at, a multiple of `BLOCK`

    def __post_init__(self) -> None:
        tensors = (self.owner_N, self.place_N, self.first_N, self.prefix_N, self.ancestors_N)
        if any(t.dtype != torch.int64 or t.shape != self.owner_N.shape or not t.is_contiguous() for t in tensors):
            got = [(t.dtype, [*t.shape], t.is_contiguous()) for t in tensors]
            raise ValueError(f"markers must be contiguous int64 tensors of one length, got {got}")
        if self.span % BLOCK:
            raise ValueError(f"the span of markers must be a multiple of {BLOCK}, got {self.span}")


@runtime_checkable
class RowOps(Protocol):
    """What the decoder needs. X and Y are fp32 [N, .]; weights [out, in] in bf16 or fp32."""

    name: str
    most_rows: int | None  # a pass of more rows is another product than one of few; None: there is no such number

    def linear(self, x_NK: Tensor, weight_OK: Tensor, residual_NO: Tensor | None = None) -> Tensor:
        """x W^T, plus `residual_NO` where given (which the call may overwrite and return)."""
        ...

    def rms_norm(self, x_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """w * x / sqrt(mean(x^2) + eps)."""
        ...

    def silu_mul(self, gate_up_NM: Tensor) -> Tensor:
        """silu(gate) * up of [gate; up]."""
        ...

    def rope_store(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache, markers: RowMarkers, heads: tuple[int, int, int]
    ) -> None:
        """Rotate queries and keys of `qkv` [N, (H + 2K) E] in place and store keys and values at the rows' places."""
        ...

    def attend(
        self, qkv: Tensor, cache: LayerCache, markers: RowMarkers, heads: tuple[int, int, int], scale: float
    ) -> Tensor:
        """Attention output [N, H E] of the queries in `qkv` over what the markers let each row see."""
        ...


class TorchRows:
    """The reference: plain torch, any device."""

    name = "torch"
    most_rows: int | None = None

    def linear(self, x_NK: Tensor, weight_OK: Tensor, residual_NO: Tensor | None = None) -> Tensor:
        out_NO = torch.nn.functional.linear(x_NK.to(weight_OK.dtype), weight_OK).to(x_NK.dtype)
        return out_NO if residual_NO is None else out_NO.add_(residual_NO)

    def rms_norm(self, x_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        return torch.nn.functional.rms_norm(x_ND, (x_ND.shape[-1],), weight_D, eps)

    def silu_mul(self, gate_up_NM: Tensor) -> Tensor:
        gate_NM, up_NM = gate_up_NM.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate_NM) * up_NM

    def rope_store(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache, markers: RowMarkers, heads: tuple[int, int, int]
    ) -> None:
        num_heads, num_kv, width = heads
        rows = qkv.view(qkv.shape[0], num_heads + 2 * num_kv, width)
        turned = rows[:, : num_heads + num_kv]
        low, high = turned.chunk(2, dim=-1)
        c, s = cos[:, None], sin[:, None]
        turned.copy_(torch.cat((low * c - high * s, high * c + low * s), dim=-1))
        key, value = rows[:, num_heads : num_heads + num_kv], rows[:, num_heads + num_kv :]
        for request in range(len(cache.keys)):
            mine = (markers.owner_N == request).nonzero()[:, 0]
            place = markers.place_N[mine]
            cache.keys[request][:, :, place] = key[mine].permute(1, 2, 0)
            cache.values[request][:, place] = value[mine].transpose(0, 1)

    def attend(
        self, qkv: Tensor, cache: LayerCache, markers: RowMarkers, heads: tuple[int, int, int], scale: float
    ) -> Tensor:
        num_heads, num_kv, width = heads
        rows = qkv.view(qkv.shape[0], num_heads + 2 * num_kv, width)
        out = torch.empty(qkv.shape[0], num_heads, width, dtype=qkv.dtype, device=qkv.device)
        for request in range(len(cache.keys)):
            mine = (markers.owner_N == request).nonzero()[:, 0]
            if not len(mine):
                continue
            # the span covers the request with the longest view, which may be more than this cache has
            seen = visible(markers, mine)[:, : cache.keys[request].shape[-1]]
            end = seen.shape[1]
            key = cache.keys[request][:, :, :end].repeat_interleave(num_heads // num_kv, 0)
            value = cache.values[request][:, :end].repeat_interleave(num_heads // num_kv, 0)
            query = rows[mine, :num_heads].transpose(0, 1)
            scores = (query @ key * scale).masked_fill(~seen, float("-inf"))
            # an unseen place may hold anything, NaN included
            value = value.masked_fill(~seen.any(0)[None, :, None], 0.0)
            out[mine] = (torch.softmax(scores, -1) @ value).transpose(0, 1)
        return out.view(qkv.shape[0], num_heads * width)


def visible(markers: RowMarkers, rows: Tensor) -> Tensor:
    """Which cache positions each of `rows` sees, bool [rows, positions]: the marker rule written out."""
    bits = markers.ancestors_N[rows]
    prefix = markers.prefix_N[rows]
    reach = 63 if bool((bits != 0).any()) else 0
    end = min(int(prefix.max()) + reach, markers.span)
    place = torch.arange(end, device=rows.device)
    base = (place >= markers.first_N[rows][:, None]) & (place < prefix[:, None])
    offset = place - prefix[:, None]
    inside = (offset >= 0) & (offset < 63)
    return base | (inside & ((bits[:, None] >> offset.clamp(0, 62)) & 1).bool())


def native_pointers(cache: LayerCache) -> tuple[object, object, object]:
    """The cache's addresses and capacities in the form the compiled ops take; valid while its tensors live."""
    count = len(cache.keys)
    keys = (ctypes.c_void_p * count)(*(key.data_ptr() for key in cache.keys))
    values = (ctypes.c_void_p * count)(*(value.data_ptr() for value in cache.values))
    capacity = (ctypes.c_int64 * count)(*(key.shape[-1] for key in cache.keys))
    return keys, values, capacity


@runtime_checkable
class RequestCache(Protocol):
    """A request's keys and values (or several requests'), layer by layer, and where they lie in memory."""

    layers: list[LayerCache]
    # of each layer's keys and values, where the compiled row ops may read them; [L, 2, R] for R requests in one cache
    addresses_L2: np.ndarray | None


def joined_layers(caches: Sequence[RequestCache]) -> list[LayerCache]:
    """Each layer's keys and values of all requests."""
    keys = [[cache.layers[layer].keys[0] for cache in caches] for layer in range(len(caches[0].layers))]
    values = [[cache.layers[layer].values[0] for cache in caches] for layer in range(len(caches[0].layers))]
    addresses = [cache.addresses_L2 for cache in caches if cache.addresses_L2 is not None]
    if len(addresses) < len(caches):
        return [LayerCache(*layer) for layer in zip(keys, values, strict=True)]
    # all addresses at once: many requests times many layers of small calls would hold up the pass
    pointers, count = np.ascontiguousarray(np.stack(addresses, -1)), len(caches)
    capacity = (ctypes.c_int64 * count)(*(key.shape[-1] for key in keys[0]))
    kind = ctypes.c_void_p * count
    return [
        LayerCache(k, v, (kind.from_buffer(rows_2R[0]), kind.from_buffer(rows_2R[1]), capacity))
        for k, v, rows_2R in zip(keys, values, pointers, strict=True)
    ]


def row_runs(counts: Sequence[int], most: int | None) -> list[slice]:
    """Runs of neighbours with at most `most` rows together, or one of more rows alone; all in one run for None."""
    if most is None:
        return [slice(0, len(counts))]
    parts, begin, rows = [], 0, 0
    for i, count in enumerate(counts):
        if rows and rows + count > most:
            parts.append(slice(begin, i))
            begin, rows = i, 0
        rows += count
    return [*parts, slice(begin, len(counts))]


def native_status() -> tuple[bool, str]:
    """Whether the compiled twin is at hand, and how or why not."""
    from dspec_lab.kernels.native_rows import build

    ops, why = build()
    return ops is not None, why


def row_ops(impl: Impl = "auto", device: torch.device | str = "cpu") -> RowOps:
    """The ops to use. "native" never falls back; "auto" takes torch off the CPU or where nothing could be compiled."""
    if impl not in ("auto", "torch", "native"):
        raise ValueError(f"impl must be 'auto', 'torch' or 'native', got {impl!r}")
    on_cpu = torch.device(device).type == "cpu"
    if impl == "torch" or (impl == "auto" and not on_cpu):
        return TorchRows()
    if not on_cpu:
        raise ValueError(f"the native row ops run on the CPU, not on {device}")
    from dspec_lab.kernels.native_rows import build

    ops, why = build()
    if ops is None:
        if impl == "native":
            raise RuntimeError(f"the native row ops are not available: {why}")
        return TorchRows()
    return ops
