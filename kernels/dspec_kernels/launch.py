"""The one place where a kernel is started, and the checks every launch shares."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import triton
from triton.runtime.interpreter import InterpretedFunction

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """Start `kernel` over `grid` on the device of its tensors; an empty grid starts nothing.

    CPU tensors run only where Triton was imported with TRITON_INTERPRET=1. Numbers that change from round to round are
    marked `do_not_specialize` in the kernels, so that a new batch size compiles nothing.
    """
    if 0 in grid:
        return
    devices = {arg.device for arg in args if isinstance(arg, torch.Tensor)}
    if len(devices) != 1:
        raise ValueError(f"a kernel needs all its tensors on one device, got {sorted(map(str, devices))}")
    (device,) = devices
    if device.type == "cpu" and not isinstance(kernel, InterpretedFunction):
        raise RuntimeError("a Triton kernel got CPU tensors: it needs a GPU, or TRITON_INTERPRET=1 at import")
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](*args, **meta)


def require_float(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that is not fp32, fp16 or bf16 (the kernels compute in fp32)."""
    if tensor.dtype not in FLOAT_DTYPES:
        raise TypeError(f"{name} must be float32, float16 or bfloat16, got {tensor.dtype}")


def require_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Refuse a tensor of another shape."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")


def require_rows(name: str, tensor: torch.Tensor) -> None:
    """Refuse a matrix whose last axis is not contiguous; rows may be any distance apart."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} must be contiguous along its last axis, got strides {tensor.stride()}")


def block_of(length: int, largest: int, smallest: int = 16) -> int:
    """The power of two that covers `length`, within [smallest, largest]."""
    return max(smallest, min(largest, triton.next_power_of_2(max(length, 1))))


def dot_precision(*tensors: torch.Tensor) -> str:
    """Input precision of a dot product over these operands, which the kernel has widened to fp32.

    A bf16 or fp16 value fits tf32 without loss, so their products are exact on the tensor cores; true fp32 operands
    take the exact fp32 path. AMD GPUs have no tf32.
    """
    if torch.version.hip is None and all(tensor.dtype in (torch.bfloat16, torch.float16) for tensor in tensors):
        return "tf32"
    return "ieee"
