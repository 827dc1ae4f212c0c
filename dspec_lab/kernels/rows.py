"""The ops of a decoder layer over few rows: torch reference, and a CPU twin compiled from `rows.c`.

On a CPU without bf16 arithmetic torch multiplies 8 rows by a bf16 weight up to 5 times slower than one row, which
would take the gain out of speculative decoding; the twin reads each weight once for all rows. It also computes every
row the same way whatever its neighbours, so a verify pass gives, bit for bit, what one-token passes give.

The twin is compiled once with the system's C compiler (`CC`, cc, gcc or clang) into the cache folder, for this CPU.
Where there is no compiler, "auto" uses torch; `native_status()` says which and why.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from dspec_lab.core.files import cache_dir

Impl = Literal["auto", "torch", "native"]
SOURCE = Path(__file__).with_name("rows.c")
BLOCK = 32  # positions are attended to in blocks of this many
MANY_ROWS = 64  # the compiled product serves up to this many rows; rows are batch-invariant up to here
UNPACK_ROWS = 1536
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fopenmp", "-shared", "-fPIC")


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
    A chain needs no bits: prefix = place + 1. A tree node has prefix = context length and the bits of its ancestors and itself. int64 each.
    """

    owner_N: Tensor
    place_N: Tensor
    first_N: Tensor
    prefix_N: Tensor
    ancestors_N: Tensor
    span: int  # upper bound of the positions any row looks at, a multiple of `BLOCK`


class RowOps(Protocol):
    """What the decoder needs. X and Y are fp32 [N, .]; weights [out, in] in bf16 or fp32."""

    name: str

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
            seen = visible(markers, mine)
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


class NativeRows:
    """The compiled CPU twin."""

    name = "native"

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, long, real = ctypes.c_void_p, ctypes.c_long, ctypes.c_float
        self._linear = {torch.bfloat16: library.linear_bf16, torch.float32: library.linear_f32}
        for call in self._linear.values():
            call.argtypes, call.restype = [pointer] * 3 + [long] * 4, None
        self._norm, self._silu = library.rms_norm, library.silu_mul
        self._norm.argtypes, self._norm.restype = [pointer] * 3 + [long, long, real], None
        self._silu.argtypes, self._silu.restype = [pointer] * 2 + [long, long], None
        self._rope, self._attend = library.rope_store, library.attend
        self._rope.argtypes, self._rope.restype = [pointer] * 8 + [long] * 4, None
        self._attend.argtypes, self._attend.restype = [pointer] * 10 + [long] * 5 + [real], None
        self._work = torch.empty(0)
        self._unpacked = torch.empty(0)

    def linear(self, x_NK: Tensor, weight_OK: Tensor, residual_NO: Tensor | None = None) -> Tensor:
        rows, out = x_NK.shape[0], weight_OK.shape[0]
        if rows > MANY_ROWS:
            # arithmetic, not memory, is the limit here: the library's product, on pieces unpacked into a small buffer
            y_NO = torch.empty(rows, out)
            for at in range(0, out, UNPACK_ROWS):
                piece_OK = weight_OK[at : at + UNPACK_ROWS]
                if piece_OK.dtype != torch.float32:
                    if self._unpacked.numel() < piece_OK.numel():
                        self._unpacked = torch.empty(piece_OK.numel())
                    piece_OK = self._unpacked[: piece_OK.numel()].view_as(piece_OK).copy_(piece_OK)
                torch.mm(x_NK, piece_OK.T, out=y_NO[:, at : at + UNPACK_ROWS])
            return y_NO if residual_NO is None else residual_NO.add_(y_NO)
        y_NO = torch.empty(rows, out) if residual_NO is None else residual_NO
        self._linear[weight_OK.dtype](
            weight_OK.data_ptr(),
            x_NK.data_ptr(),
            y_NO.data_ptr(),
            rows,
            out,
            weight_OK.shape[1],
            residual_NO is not None,
        )
        return y_NO

    def rms_norm(self, x_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        y_ND = torch.empty_like(x_ND)
        self._norm(x_ND.data_ptr(), weight_D.data_ptr(), y_ND.data_ptr(), x_ND.shape[0], x_ND.shape[1], eps)
        return y_ND

    def silu_mul(self, gate_up_NM: Tensor) -> Tensor:
        rows, width = gate_up_NM.shape[0], gate_up_NM.shape[1] // 2
        y_NM = torch.empty(rows, width)
        self._silu(gate_up_NM.data_ptr(), y_NM.data_ptr(), rows, width)
        return y_NM

    def rope_store(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache, markers: RowMarkers, heads: tuple[int, int, int]
    ) -> None:
        keys, values, capacity = cache.pointers or native_pointers(cache)
        self._rope(
            qkv.data_ptr(), cos.data_ptr(), sin.data_ptr(), markers.place_N.data_ptr(), markers.owner_N.data_ptr(),
            keys, values, capacity, qkv.shape[0], *heads,
        )  # fmt: skip

    def attend(
        self, qkv: Tensor, cache: LayerCache, markers: RowMarkers, heads: tuple[int, int, int], scale: float
    ) -> Tensor:
        rows = qkv.shape[0]
        need = rows * heads[0] * markers.span
        if self._work.numel() < need:
            self._work = torch.empty(need)
        out = torch.empty(rows, heads[0] * heads[2])
        keys, values, capacity = cache.pointers or native_pointers(cache)
        self._attend(
            qkv.data_ptr(), out.data_ptr(), self._work.data_ptr(), markers.first_N.data_ptr(),
            markers.prefix_N.data_ptr(), markers.ancestors_N.data_ptr(), markers.owner_N.data_ptr(),
            keys, values, capacity, rows, *heads, markers.span, scale,
        )  # fmt: skip
        return out


def native_pointers(cache: LayerCache) -> tuple[object, object, object]:
    """The cache's addresses and capacities in the form the compiled ops take; valid while its tensors live."""
    count = len(cache.keys)
    keys = (ctypes.c_void_p * count)(*(key.data_ptr() for key in cache.keys))
    values = (ctypes.c_void_p * count)(*(value.data_ptr() for value in cache.values))
    capacity = (ctypes.c_int64 * count)(*(key.shape[-1] for key in cache.keys))
    return keys, values, capacity


def _compiler() -> str | None:
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and shutil.which(name):
            return name
    return None


def _cpu_identity() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    flags = next((line for line in lines if line.startswith("flags")), "")
    return f"{platform.machine()} {platform.processor()} {flags}"


@functools.lru_cache(maxsize=1)
def _build() -> tuple[NativeRows | None, str]:
    compiler = _compiler()
    if compiler is None:
        return None, "no C compiler was found (set CC, or install gcc or clang)"
    tag = hashlib.blake2b(
        SOURCE.read_bytes() + " ".join(FLAGS).encode() + _cpu_identity().encode() + compiler.encode(), digest_size=8
    ).hexdigest()
    library = cache_dir() / "native" / f"rows-{tag}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            built = Path(folder) / "rows.so"
            done = subprocess.run(
                [compiler, *FLAGS, str(SOURCE), "-o", str(built), "-lm"], capture_output=True, text=True, check=False
            )
            if done.returncode:
                return None, f"{compiler} could not build rows.c: {done.stderr.strip().splitlines()[-1:]}"
            os.replace(built, library)
    try:
        # torch is imported, so its OpenMP runtime is the one the library binds to: one pool of threads
        return NativeRows(ctypes.CDLL(str(library))), f"compiled by {compiler}"
    except OSError as error:
        return None, f"{library} does not load: {error}"


def native_status() -> tuple[bool, str]:
    """Whether the compiled twin is at hand, and how or why not."""
    ops, why = _build()
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
    ops, why = _build()
    if ops is None:
        if impl == "native":
            raise RuntimeError(f"the native row ops are not available: {why}")
        return TorchRows()
    return ops
