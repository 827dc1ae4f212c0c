"""The ways to multiply of the compiled row ops, side by side: what each CPU generation's products take a pass.

`python -m dspec_lab.bench.products [FILE]` times them by turns on this CPU, on matrices of the default target's shapes.
"""

from __future__ import annotations

import ctypes
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dspec_lab.bench.record import run_record
from dspec_lab.core.files import json_text, write_text
from dspec_lab.kernels import native_rows
from dspec_lab.kernels.native_rows import COMPILE_LIMIT_S, FLAGS, SOURCE, NativeRows

# what an older CPU lacks: (flag in /proc/cpuinfo of a CPU that can run it, compiler flags, what the ops then say)
WAYS: Mapping[str, tuple[str, tuple[str, ...], str]] = {
    "AVX2": ("avx2", ("-march=x86-64-v3",), "fp32, 8 lanes"),
    "AVX-512 without bf16": ("avx512bw", ("-march=skylake-avx512",), "fp32, 16 lanes"),
    "bf16 without tiles": ("avx512_bf16", ("-march=native", "-mno-amx-bf16"), "bf16 pairs"),
    "tiles": ("amx_bf16", ("-march=native",), "bf16 tiles"),
}
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
# (matrices, output and input numbers of each) of a pass of SmolLM2-135M
SHAPES = ((30, 960, 576), (30, 576, 576), (30, 3072, 576), (30, 576, 1536), (1, 49152, 576))


def build_way(name: str, folder: Path) -> NativeRows:
    """The ops as `name` of `WAYS` has them, built in `folder`; `LookupError` where this machine cannot run them."""
    needed, extra, products = WAYS[name]
    info, command = Path("/proc/cpuinfo"), native_rows._compiler()[0]
    if command is None or not info.exists() or needed not in info.read_text().split():
        raise LookupError(f"{name}: no compiler, or a CPU without {needed}")
    library = folder / f"rows-{needed}.so"
    flags = [*FLAGS, *extra, "-fopenmp", str(SOURCE), "-o", str(library), "-lm"]
    done = subprocess.run([*command, *flags], check=False, capture_output=True, timeout=COMPILE_LIMIT_S)
    if done.returncode:
        raise LookupError(f"{name}: {command[0]} does not build with {' '.join(extra)}")
    ops = NativeRows(ctypes.CDLL(str(library)))
    if ops.products != products:
        if name == "tiles":
            raise LookupError(f"{name}: the system hands out no tile registers")
        raise RuntimeError(f"{name}: the ops say {ops.products!r}, expected {products!r}")
    return ops


def bench_products(
    rows: Sequence[int] = ROWS, *, repeats: int = 25, shapes: Sequence[tuple[int, int, int]] = SHAPES
) -> dict[str, Any]:
    """Milliseconds of all products of a pass by way and number of rows: least and median over `repeats`, by turns."""
    if repeats < 1 or not rows or min(rows) < 1:
        raise ValueError(f"need repeats and rows of at least 1, got {repeats} and {list(rows)}")
    result: dict[str, Any] = {"repeats": repeats, "shapes": [list(shape) for shape in shapes], "ms": {}, "missing": []}
    with tempfile.TemporaryDirectory() as folder:
        ways: dict[str, NativeRows] = {}
        for name in WAYS:
            try:
                ways[name] = build_way(name, Path(folder))
            except LookupError as error:
                result["missing"].append(str(error))
        weights = [torch.randn(out, wide).bfloat16() for count, out, wide in shapes for _ in range(count)]
        for count in rows:
            inputs = {wide: torch.randn(count, wide) for _, _, wide in shapes}
            times: dict[str, list[float]] = {name: [] for name in ways}
            for repeat in range(repeats + 1):
                for name, ops in ways.items():
                    start = time.perf_counter()
                    for weight_OK in weights:
                        ops.linear(inputs[weight_OK.shape[1]], weight_OK)
                    if repeat:
                        times[name].append(1e3 * (time.perf_counter() - start))
            for name, found in times.items():
                held = result["ms"].setdefault(name, {})
                held[str(count)] = {"least": min(found), "median": statistics.median(found)}
    result["run"] = run_record({"rows": list(rows), "repeats": repeats}, 0, dtype="bf16", model="random matrices")
    return result


if __name__ == "__main__":
    text = json_text(bench_products())
    if len(sys.argv) > 1:
        write_text(Path(sys.argv[1]), text)
    print(text, end="")
