"""The CPU twin of the row ops: `rows.c`, compiled for this CPU by the system's C compiler.

That is the one named by `CC`, else cc, gcc or clang. The library lies in the cache folder under a name that holds a
hash of source, flags, compiler and CPU, so a change of any of them compiles it again.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dspec_lab.core.files import cache_dir
from dspec_lab.kernels.layer_stack import LayerStack
from dspec_lab.kernels.rows import LayerCache, RequestCache, RowMarkers, native_pointers

SOURCE = Path(__file__).with_name("rows.c")
MANY_ROWS = 128  # products of 8 lanes serve up to this many rows and are batch-invariant up to here; wider ones always
UNPACK_ROWS = 1536  # output columns of a larger product are unpacked to fp32 this many at a time
MOST_KEPT = 2**23  # numbers of all layers' work space that a thread keeps (SmolLM2: 1248 rows); more is made for a call
FLAGS = ("-O3", "-ffp-contract=off", "-shared", "-fPIC")
# tried in this order: Apple's clang knows no -fopenmp, and some ARM compilers know no -march=native
EXTRA_FLAGS = (("-march=native", "-fopenmp"), ("-march=native",), ("-mcpu=native", "-fopenmp"), ("-mcpu=native",), ())
COMPILE_LIMIT_S = 120


class NativeRows:
    """The compiled CPU twin. Tensors are contiguous; markers that leave a cache are refused, not followed."""

    name = "native"

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, long, real = ctypes.c_void_p, ctypes.c_long, ctypes.c_float
        self._linear = {torch.bfloat16: library.linear_bf16, torch.float32: library.linear_f32}
        for call in self._linear.values():
            call.argtypes, call.restype = [pointer] * 3 + [long] * 4 + [pointer], None
        self._norm, self._silu = library.rms_norm, library.silu_mul
        self._norm.argtypes, self._norm.restype = [pointer] * 3 + [long, long, real], None
        self._silu.argtypes, self._silu.restype = [pointer] * 2 + [long, long], None
        self._rope, self._attend = library.rope_store, library.attend
        self._rope.argtypes, self._rope.restype = [pointer] * 8 + [long] * 5, long
        self._attend.argtypes, self._attend.restype = [pointer] * 10 + [long] * 6 + [real], long
        self._layers = library.layer_rows
        self._layers.argtypes = [
            pointer,
            long,
            long,
            *[pointer] * 10,
            *[long] * 8,
            real,
            real,
            *[pointer] * 4,
            long,
            pointer,
        ]
        self._layers.restype = long
        self._context = library.context_rows
        self._context.argtypes = [pointer, long, long, *[pointer] * 7, *[long] * 6, pointer, pointer]
        self._context.restype = long
        self._walk = library.greedy_walk
        self._walk.argtypes = [
            pointer,
            long,
            pointer,
            long,
            pointer,
            pointer,
            long,
            *[pointer] * 4,
            long,
            long,
            pointer,
        ]
        self._walk.restype = long
        self._scores_alive = library.scores_alive
        self._scores_alive.argtypes, self._scores_alive.restype = [], long
        library.products.restype = ctypes.c_char_p
        self.products = library.products().decode()  # "bf16 tiles", "bf16 pairs", "fp32, 16 lanes", "fp32, 8 lanes"
        # rows are batch-invariant up to this many
        self.most_rows = MANY_ROWS if self.products == "fp32, 8 lanes" else None
        # a call releases the interpreter lock, so each Python thread has its own work space
        self._spaces = threading.local()

    def linear(self, x_NK: Tensor, weight_OK: Tensor, residual_NO: Tensor | None = None) -> Tensor:
        rows, out = x_NK.shape[0], weight_OK.shape[0]
        if x_NK.dtype != torch.float32 or weight_OK.dtype not in self._linear or x_NK.shape[1] != weight_OK.shape[1]:
            raise ValueError(
                f"the native product takes fp32 rows and bf16 or fp32 weights of one width, got "
                f"{x_NK.dtype} {list(x_NK.shape)} and {weight_OK.dtype} {list(weight_OK.shape)}"
            )
        if residual_NO is not None and residual_NO.shape != (rows, out):
            raise ValueError(f"a product of shape {[rows, out]} cannot be added to a residual {[*residual_NO.shape]}")
        _need_contiguous(x_NK, weight_OK, residual_NO)
        if self.most_rows is not None and rows > self.most_rows:
            # arithmetic, not memory, is the limit here: the library's product, on pieces unpacked into a small buffer
            y_NO = torch.empty(rows, out)
            for at in range(0, out, UNPACK_ROWS):
                piece_OK = weight_OK[at : at + UNPACK_ROWS]
                if piece_OK.dtype != torch.float32:
                    piece_OK = self._space("unpacked", piece_OK.numel()).view_as(piece_OK).copy_(piece_OK)
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
            self._rounded(*x_NK.shape) if weight_OK.dtype == torch.bfloat16 else None,
        )
        return y_NO

    def _rounded(self, rows: int, wide: int) -> int | None:
        """Room for rows in bf16 where products are: multiples of 16 rows (tiles are full) and of 32 numbers."""
        if not self.rounds:
            return None
        # two bf16 numbers in the place of an fp32
        return self._space("rounded", -(-rows // 16) * 16 * (-(-wide // 32) * 32) // 2).data_ptr()

    @property
    def rounds(self) -> bool:
        """Whether rows are rounded to bf16 where the weights are bf16."""
        return self.products.startswith("bf16")

    def rms_norm(self, x_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        if x_ND.dtype != torch.float32 or weight_D.dtype != torch.float32 or x_ND.shape[1:] != weight_D.shape:
            raise ValueError(
                f"the native norm takes fp32 rows and an fp32 weight of one width, got {x_ND.dtype} "
                f"{list(x_ND.shape)} and {weight_D.dtype} {list(weight_D.shape)}"
            )
        _need_contiguous(x_ND, weight_D)
        y_ND = torch.empty_like(x_ND)
        self._norm(x_ND.data_ptr(), weight_D.data_ptr(), y_ND.data_ptr(), x_ND.shape[0], x_ND.shape[1], eps)
        return y_ND

    def silu_mul(self, gate_up_NM: Tensor) -> Tensor:
        rows, width = gate_up_NM.shape[0], gate_up_NM.shape[1] // 2
        if gate_up_NM.dtype != torch.float32 or gate_up_NM.shape[1] % 2:
            raise ValueError(
                f"gate and up must be fp32 rows of even width, got {gate_up_NM.dtype} {[*gate_up_NM.shape]}"
            )
        _need_contiguous(gate_up_NM)
        y_NM = torch.empty(rows, width)
        self._silu(gate_up_NM.data_ptr(), y_NM.data_ptr(), rows, width)
        return y_NM

    def rope_store(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache, markers: RowMarkers, heads: tuple[int, int, int]
    ) -> None:
        keys, values, capacity = cache.pointers or native_pointers(cache)
        self._check_heads(qkv, heads, markers)
        bad = self._rope(
            qkv.data_ptr(), cos.data_ptr(), sin.data_ptr(), markers.place_N.data_ptr(), markers.owner_N.data_ptr(),
            keys, values, capacity, len(cache.keys), qkv.shape[0], *heads,
        )  # fmt: skip
        if bad >= 0:
            raise ValueError(f"row {bad} has no place in its cache: {_marker(markers, bad)}, capacities {[*capacity]}")

    def attend(
        self, qkv: Tensor, cache: LayerCache, markers: RowMarkers, heads: tuple[int, int, int], scale: float
    ) -> Tensor:
        rows = qkv.shape[0]
        self._check_heads(qkv, heads, markers)
        work = self._space("work", self._scores_alive() * markers.span)
        out = torch.empty(rows, heads[0] * heads[2])
        keys, values, capacity = cache.pointers or native_pointers(cache)
        bad = self._attend(
            qkv.data_ptr(), out.data_ptr(), work.data_ptr(), markers.first_N.data_ptr(),
            markers.prefix_N.data_ptr(), markers.ancestors_N.data_ptr(), markers.owner_N.data_ptr(),
            keys, values, capacity, len(cache.keys), rows, *heads, markers.span, scale,
        )  # fmt: skip
        if bad >= 0:
            raise ValueError(
                f"row {bad} sees nothing, or more than its cache or the span {markers.span} holds: "
                f"{_marker(markers, bad)}, capacities {[*capacity]}"
            )
        return out

    def layer_rows(
        self,
        stack: LayerStack,
        x_ND: Tensor,
        angles: tuple[Tensor, Tensor],
        caches: Sequence[RequestCache],
        markers: RowMarkers,
        scale: float,
        eps: float,
        tapped_NF: Tensor | None = None,
        taps: Sequence[int] = (),
    ) -> None:
        """All layers of `stack` on the rows `x_ND`, in place: bit for bit what the ops one by one give.

        `angles` are cosines and sines [N, E / 2]. Layer `taps[t]`'s output goes to columns t D .. of `tapped_NF`; an id
        that is no layer's leaves its columns alone.
        """
        rows, (num_heads, num_kv, width) = x_ND.shape[0], stack.heads
        if taps and (tapped_NF is None or tapped_NF.shape != (rows, len(taps) * stack.hidden)):
            raise ValueError(f"{len(taps)} tapped layers need room for {[rows, len(taps) * stack.hidden]} numbers")
        _need_contiguous(tapped_NF)
        joined_L2R, capacity_R = self._check_pass(stack, x_ND, angles, caches, markers)
        taps_T = np.array(taps, dtype=np.int64)
        room = stack.hidden + (2 * num_heads + 2 * num_kv) * width + 3 * stack.inner
        space = self._layer_space(rows * room)
        bad = self._layers(
            ctypes.addressof(stack.structs), stack.count, stack.half, x_ND.data_ptr(), angles[0].data_ptr(),
            angles[1].data_ptr(), markers.place_N.data_ptr(), markers.first_N.data_ptr(), markers.prefix_N.data_ptr(),
            markers.ancestors_N.data_ptr(), markers.owner_N.data_ptr(), joined_L2R.ctypes.data, capacity_R.ctypes.data,
            len(capacity_R), rows, stack.hidden, stack.inner, num_heads, num_kv, width, markers.span, scale, eps,
            self._space("work", self._scores_alive() * markers.span).data_ptr(),
            self._rounded(rows, max(stack.hidden, num_heads * width, stack.inner)) if stack.half else None,
            space.data_ptr(), taps_T.ctypes.data, len(taps),
            None if tapped_NF is None else tapped_NF.data_ptr(),
        )  # fmt: skip
        if bad >= 0:
            raise ValueError(
                f"row {bad} has no place in its cache, or sees nothing or more than its cache or the span "
                f"{markers.span} holds: {_marker(markers, bad)}, capacities {capacity_R.tolist()}"
            )

    def context_rows(
        self,
        stack: LayerStack,
        context_ND: Tensor,
        angles: tuple[Tensor, Tensor],
        caches: Sequence[RequestCache],
        markers: RowMarkers,
    ) -> None:
        """Keys and values of `context_ND` into every layer's caches, as the product and `rope_store` would put them."""
        rows, (num_heads, num_kv, width) = context_ND.shape[0], stack.heads
        joined_L2R, capacity_R = self._check_pass(stack, context_ND, angles, caches, markers)
        space = self._layer_space(rows * 2 * num_kv * width)
        bad = self._context(
            ctypes.addressof(stack.structs), stack.count, stack.half, context_ND.data_ptr(), angles[0].data_ptr(),
            angles[1].data_ptr(), markers.place_N.data_ptr(), markers.owner_N.data_ptr(), joined_L2R.ctypes.data,
            capacity_R.ctypes.data, len(capacity_R), rows, stack.hidden, num_heads, num_kv, width,
            self._rounded(rows, stack.hidden) if stack.half else None,
            space.data_ptr(),
        )  # fmt: skip
        if bad >= 0:
            raise ValueError(
                f"row {bad} has no place in its cache: {_marker(markers, bad)}, capacities {capacity_R.tolist()}"
            )

    def greedy_walk(
        self,
        logits_NW: Tensor,
        counts: Sequence[int],
        anchors: Sequence[int],
        head: tuple[Tensor, Tensor] | None = None,
        target_ids_W: Tensor | None = None,
    ) -> tuple[list[int], Tensor | None, int | None]:
        """(tokens [N], embedded [N, R], None) of blocks that draft greedily, slot by slot; or with the first bad row.

        At slot k the first `counts[k]` blocks draft, each after its token of slot k - 1 or its anchor. Rows of logits
        lie slot by slot and get, in place, W2 e: `head` is (W1 [V, R], W2 [W, R]), e the row of W1 at the token before.
        A row is bad where its largest entry is not finite; what follows it is not done.
        """
        rows, width = logits_NW.shape
        if logits_NW.dtype != torch.float32 or sum(counts) != rows or not counts or counts[0] != len(anchors):
            raise ValueError(f"{list(counts)} drafts of {len(anchors)} blocks do not fit {rows} rows of logits")
        if any(later > earlier for earlier, later in zip(counts, counts[1:], strict=False)) or counts[-1] < 1:
            raise ValueError(f"the number of blocks that draft may not rise from slot to slot, got {list(counts)}")
        if target_ids_W is not None and (target_ids_W.dtype != torch.int64 or target_ids_W.shape != (width,)):
            raise ValueError(f"target ids must be int64 {[width]}, got {target_ids_W.dtype} {[*target_ids_W.shape]}")
        table_VR, w2_WR = head or (None, None)
        rank, embedded_NR, rounded = 0, None, None
        if table_VR is not None and w2_WR is not None:
            rank = table_VR.shape[1]
            if w2_WR.shape != (width, rank) or w2_WR.dtype != table_VR.dtype or table_VR.dtype not in self._linear:
                raise ValueError(f"W1 {[*table_VR.shape]} and W2 {[*w2_WR.shape]} do not fit, or are no bf16 or fp32")
            embedded_NR = torch.empty(rows, rank)
            if self.rounds and w2_WR.dtype == torch.bfloat16:
                rounded = self._rounded(len(anchors), rank)
        _need_contiguous(logits_NW, table_VR, w2_WR, target_ids_W)
        counts_K, previous_B = np.array(counts, dtype=np.int64), np.array(anchors, dtype=np.int64)
        tokens_N = np.empty(rows, dtype=np.int64)
        bad = self._walk(
            None if table_VR is None else table_VR.data_ptr(), 0 if table_VR is None else table_VR.shape[0],
            None if w2_WR is None else w2_WR.data_ptr(),
            w2_WR is not None and w2_WR.dtype == torch.bfloat16, logits_NW.data_ptr(), counts_K.ctypes.data,
            len(counts_K), None if target_ids_W is None else target_ids_W.data_ptr(), previous_B.ctypes.data,
            tokens_N.ctypes.data, None if embedded_NR is None else embedded_NR.data_ptr(), width, rank, rounded,
        )  # fmt: skip
        if bad == -2:
            raise ValueError(f"a token leaves the table of {0 if table_VR is None else table_VR.shape[0]} rows")
        return tokens_N.tolist(), embedded_NR, None if bad < 0 else bad

    def _check_pass(
        self,
        stack: LayerStack,
        x_ND: Tensor,
        angles: tuple[Tensor, Tensor],
        caches: Sequence[RequestCache],
        markers: RowMarkers,
    ) -> tuple[np.ndarray, np.ndarray]:
        """(addresses [L, 2, R] of the caches, their capacities) of a pass over all layers whose parts fit together."""
        rows = x_ND.shape[0]
        if self.most_rows is not None and rows > self.most_rows:
            raise ValueError(f"{rows} rows are more than the {self.most_rows} of one product; run the ops one by one")
        if x_ND.dtype != torch.float32 or x_ND.shape != (markers.owner_N.shape[0], stack.hidden):
            raise ValueError(f"{markers.owner_N.shape[0]} fp32 rows of {stack.hidden} were expected, got {x_ND.shape}")
        half = (rows, stack.heads[2] // 2)
        if any(part.shape != half or part.dtype != torch.float32 for part in angles):
            raise ValueError(f"cosines and sines must be fp32 {[*half]}, got {[*angles[0].shape]}")
        _need_contiguous(x_ND, *angles)
        places = [cache.addresses_L2 for cache in caches]
        if any(place is None or len(place) != stack.count for place in places):
            raise ValueError(f"each cache must have {stack.count} layers on the CPU")
        # [L, 2] of one request, or [L, 2, R] of several in one cache
        parts = [place if place.ndim == 3 else place[..., None] for place in places if place is not None]
        joined_L2R = np.ascontiguousarray(parts[0] if len(parts) == 1 else np.concatenate(parts, -1))
        capacity_R = np.array([key.shape[-1] for cache in caches for key in cache.layers[0].keys], dtype=np.int64)
        if joined_L2R.shape != (stack.count, 2, len(capacity_R)):
            raise ValueError(f"addresses {[*joined_L2R.shape]} of {len(capacity_R)} requests and {stack.count} layers")
        return joined_L2R, capacity_R

    @staticmethod
    def _check_heads(qkv: Tensor, heads: tuple[int, int, int], markers: RowMarkers) -> None:
        num_heads, num_kv, width = heads
        if width % 8 or num_heads % num_kv or qkv.shape[1] != (num_heads + 2 * num_kv) * width:
            raise ValueError(f"{num_heads} and 2 x {num_kv} heads of {width} do not fit rows of {qkv.shape[1]} numbers")
        if qkv.shape[0] != markers.owner_N.shape[0]:
            raise ValueError(f"{qkv.shape[0]} rows but markers for {markers.owner_N.shape[0]}")
        _need_contiguous(qkv)

    def _layer_space(self, size: int) -> Tensor:
        """Work space of a pass over all layers, to be held until the call returns: nobody else keeps a large one."""
        return torch.empty(size) if size > MOST_KEPT else self._space("layers", size)

    def _space(self, name: str, size: int) -> Tensor:
        held = getattr(self._spaces, name, None)
        if held is None or held.numel() < size:
            # a buffer made under inference mode could not be written outside it
            with torch.inference_mode(False):
                held = torch.empty(size)
            setattr(self._spaces, name, held)
        return held[:size]


def _need_contiguous(*tensors: Tensor | None) -> None:
    for tensor in tensors:
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"the native row ops need contiguous tensors, got strides {tensor.stride()}")


def _marker(markers: RowMarkers, row: int) -> str:
    fields = ("owner", "place", "first", "prefix", "ancestors")
    return ", ".join(f"{name} {int(getattr(markers, name + '_N')[row])}" for name in fields)


def _compiler() -> tuple[list[str] | None, str]:
    """(command, name) of the C compiler, or (None, why there is none). A compiler named by CC has no replacement."""
    wanted = shlex.split(os.environ.get("CC", ""))
    if wanted:
        found = shutil.which(wanted[0])
        return (wanted, " ".join(wanted)) if found else (None, f"the C compiler CC={wanted[0]} was not found")
    name = next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
    return ([name], name) if name else (None, "no C compiler was found (set CC, or install gcc or clang)")


def _cpu_identity() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {platform.processor()} {flags}"


@functools.lru_cache(maxsize=1)
def build() -> tuple[NativeRows | None, str]:
    """(the compiled ops, which compiler made them), or (None, why they cannot be had). Looked up once a process."""
    compiler, name = _compiler()
    if compiler is None:
        return None, name
    what = (SOURCE.read_bytes(), repr((FLAGS, EXTRA_FLAGS, compiler)).encode(), _cpu_identity().encode())
    tag = hashlib.blake2b(b"\0".join(what), digest_size=8).hexdigest()
    folder = cache_dir() / "native"
    choices = [(folder / f"rows-{tag}-{index}.so", extra) for index, extra in enumerate(EXTRA_FLAGS)]
    ready = next((choice for choice in choices if choice[0].exists()), None)
    if ready is None:
        try:
            ready, why = _compile(compiler, choices)
        except (OSError, subprocess.TimeoutExpired) as error:
            return None, f"rows.c could not be compiled into {folder}: {error}"
        if ready is None:
            return None, f"{name} could not build rows.c: {why}"
    library, extra = ready
    threads = "" if "-fopenmp" in extra else ", for one thread (the compiler has no OpenMP)"
    try:
        # torch is imported, so its OpenMP runtime is the one the library binds to: one pool of threads
        ops = NativeRows(ctypes.CDLL(str(library)))
        return ops, f"compiled by {name}, products of {ops.products}{threads}"
    except OSError as error:
        return None, f"{library} does not load: {error}"


def _compile(
    compiler: list[str], choices: list[tuple[Path, tuple[str, ...]]]
) -> tuple[tuple[Path, tuple[str, ...]] | None, str]:
    """The first choice of extra flags that gives a library that loads, or None and what was said about the first."""
    folder = choices[0][0].parent
    folder.mkdir(parents=True, exist_ok=True)
    said = ""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        built = Path(scratch) / "rows.so"
        for library, extra in choices:
            command = [*compiler, *FLAGS, *extra, str(SOURCE), "-o", str(built), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMPILE_LIMIT_S)
            if done.returncode == 0:
                try:
                    ctypes.CDLL(str(built))
                except OSError as error:  # linked against an OpenMP runtime that is not there, for example
                    said = said or f"the library does not load: {error}"
                    continue
                os.replace(built, library)
                return (library, extra), ""
            lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
            said = said or next((line for line in lines if "error" in line), lines[-1] if lines else "no message")
    return None, said
