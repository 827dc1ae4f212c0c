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
from pathlib import Path

import torch
from torch import Tensor

from dspec_lab.core.files import cache_dir
from dspec_lab.kernels.rows import LayerCache, RowMarkers, native_pointers

SOURCE = Path(__file__).with_name("rows.c")
MANY_ROWS = 128  # products of 8 lanes serve up to this many rows and are batch-invariant up to here; wider ones always
UNPACK_ROWS = 1536  # output columns of a larger product are unpacked to fp32 this many at a time
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
            self._rounded(x_NK) if weight_OK.dtype == torch.bfloat16 else None,
        )
        return y_NO

    def _rounded(self, x_NK: Tensor) -> int | None:
        """Room for the rows in bf16 where products are: multiples of 16 rows (tiles are full) and of 32 numbers."""
        if not self.rounds:
            return None
        rows, wide = -(-x_NK.shape[0] // 16) * 16, -(-x_NK.shape[1] // 32) * 32
        return self._space("rounded", rows * wide // 2).data_ptr()  # two bf16 numbers in the place of an fp32

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

    @staticmethod
    def _check_heads(qkv: Tensor, heads: tuple[int, int, int], markers: RowMarkers) -> None:
        num_heads, num_kv, width = heads
        if width % 8 or num_heads % num_kv or qkv.shape[1] != (num_heads + 2 * num_kv) * width:
            raise ValueError(f"{num_heads} and 2 x {num_kv} heads of {width} do not fit rows of {qkv.shape[1]} numbers")
        if qkv.shape[0] != markers.owner_N.shape[0]:
            raise ValueError(f"{qkv.shape[0]} rows but markers for {markers.owner_N.shape[0]}")
        _need_contiguous(qkv)

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
