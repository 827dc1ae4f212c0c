"""Total variation between softmax(draft logits) and softmax(target logits) per row, with its gradient.

Forward, one program a row: a first sweep keeps running maxima and sums of both rows, a second adds up |q - p| and
sum q sign(q - p). Backward, grid (row, chunk): dTV/dz = 0.5 q (sign(q - p) - sum q sign(q - p)), straight from the
logits and three saved numbers a row. Contract: `dspec_lab/kernels/tv_loss.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspec_kernels.inverse_cdf import is_bad_logit
from dspec_kernels.launch import block_of, launch, require_float, require_rows, require_shape


@triton.jit
def _running_lse(peak, total, x):
    """The running (maximum, sum of exponentials) of a row after the block `x`; -inf entries add nothing."""
    new = tl.maximum(peak, tl.max(x, axis=0))
    base = tl.where(new == float("-inf"), 0.0, new)
    return new, total * tl.exp(peak - base) + tl.sum(tl.exp(x - base), axis=0)


@triton.jit
def _sign(x):
    return (x > 0).to(tl.float32) - (x < 0).to(tl.float32)


@triton.jit
def _forward_kernel(
    draft, target, loss, saved, fault_out, draft_stride, target_stride, V, BLOCK_V: tl.constexpr
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    q_row = draft + n * draft_stride
    p_row = target + n * target_stride
    peak_q = tl.full([], float("-inf"), tl.float32)
    peak_p = tl.full([], float("-inf"), tl.float32)
    sum_q = tl.full([], 0.0, tl.float32)
    sum_p = tl.full([], 0.0, tl.float32)
    bad_q = tl.full([], 0, tl.int32)
    bad_p = tl.full([], 0, tl.int32)
    for start in range(0, V, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        x = tl.load(q_row + v, mask=v < V, other=float("-inf")).to(tl.float32)
        y = tl.load(p_row + v, mask=v < V, other=float("-inf")).to(tl.float32)
        bad_q = tl.maximum(bad_q, tl.max(is_bad_logit(x), axis=0))
        bad_p = tl.maximum(bad_p, tl.max(is_bad_logit(y), axis=0))
        peak_q, sum_q = _running_lse(peak_q, sum_q, x)
        peak_p, sum_p = _running_lse(peak_p, sum_p, y)
    fault = tl.where((bad_q == 0) & (peak_q > float("-inf")), 0, 2)
    fault = tl.where((bad_p == 0) & (peak_p > float("-inf")), fault, 1)
    limit = tl.where(fault == 0, V, 0)
    lse_q = peak_q + tl.log(tl.maximum(sum_q, 1e-30))
    lse_p = peak_p + tl.log(tl.maximum(sum_p, 1e-30))
    gap = tl.full([], 0.0, tl.float32)
    slope = tl.full([], 0.0, tl.float32)
    for start in range(0, limit, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        x = tl.load(q_row + v, mask=v < V, other=float("-inf")).to(tl.float32)
        y = tl.load(p_row + v, mask=v < V, other=float("-inf")).to(tl.float32)
        q = tl.exp(x - lse_q)
        diff = q - tl.exp(y - lse_p)
        gap += tl.sum(tl.abs(diff), axis=0)
        slope += tl.sum(q * _sign(diff), axis=0)
    tl.store(loss + n, tl.where(fault == 0, 0.5 * gap, float("nan")))
    tl.store(saved + 3 * n, lse_q)
    tl.store(saved + 3 * n + 1, lse_p)
    tl.store(saved + 3 * n + 2, slope)
    tl.store(fault_out + n, fault.to(tl.int64))


@triton.jit
def _backward_kernel(
    draft, target, saved, grad_loss, grad, draft_stride, target_stride, V, BLOCK_V: tl.constexpr
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    lse_q = tl.load(saved + 3 * n)
    lse_p = tl.load(saved + 3 * n + 1)
    slope = tl.load(saved + 3 * n + 2)
    upstream = tl.load(grad_loss + n).to(tl.float32)
    x = tl.load(draft + n * draft_stride + v, mask=v < V, other=float("-inf")).to(tl.float32)
    y = tl.load(target + n * target_stride + v, mask=v < V, other=float("-inf")).to(tl.float32)
    q = tl.exp(x - lse_q)
    out = 0.5 * upstream * q * (_sign(q - tl.exp(y - lse_p)) - slope)
    tl.store(grad + n * V + v, out.to(grad.dtype.element_ty), mask=v < V)


def tv_forward(draft_NV: Tensor, target_NV: Tensor, block_v: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(loss_N fp32, saved_N3, fault_N); a faulty row has loss NaN."""
    N, V = draft_NV.shape
    for name, rows_NV in dict(draft_NV=draft_NV, target_NV=target_NV).items():
        require_float(name, rows_NV)
        require_rows(name, rows_NV)
        require_shape(name, rows_NV, (N, V))
    loss_N = torch.empty(N, dtype=torch.float32, device=draft_NV.device)
    saved_N3 = torch.empty((N, 3), dtype=torch.float32, device=draft_NV.device)
    fault_N = torch.empty(N, dtype=torch.int64, device=draft_NV.device)
    strides = draft_NV.stride(0), target_NV.stride(0)
    block_v = block_v or block_of(V, 4096)
    launch(
        _forward_kernel,
        (N,),
        *(draft_NV, target_NV, loss_N, saved_N3, fault_N, *strides, V),
        BLOCK_V=block_v,
        num_warps=8,
    )
    return loss_N, saved_N3, fault_N


def tv_backward(
    draft_NV: Tensor, target_NV: Tensor, saved_N3: Tensor, grad_loss_N: Tensor, block_v: int | None = None
) -> Tensor:
    """Gradient to the draft logits, in their dtype."""
    N, V = draft_NV.shape
    require_shape("grad_loss_N", grad_loss_N, (N,))
    grad_NV = torch.empty((N, V), dtype=draft_NV.dtype, device=draft_NV.device)
    strides = draft_NV.stride(0), target_NV.stride(0)
    block_v = block_v or block_of(V, 4096)
    launch(
        _backward_kernel,
        (N, triton.cdiv(V, block_v)),
        *(draft_NV, target_NV, saved_N3, grad_loss_N.contiguous(), grad_NV, *strides, V),
        BLOCK_V=block_v,
        num_warps=8,
    )
    return grad_NV


class _TotalVariation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, draft_NV: Tensor, target_NV: Tensor, block_v: int | None) -> tuple[Tensor, Tensor]:
        loss_N, saved_N3, fault_N = tv_forward(draft_NV, target_NV, block_v)
        ctx.save_for_backward(draft_NV, target_NV, saved_N3)
        ctx.block_v = block_v
        ctx.mark_non_differentiable(fault_N)
        return loss_N, fault_N

    @staticmethod
    def backward(ctx, grad_loss_N: Tensor, _grad_fault: Tensor) -> tuple[Tensor, None, None]:
        draft_NV, target_NV, saved_N3 = ctx.saved_tensors
        return tv_backward(draft_NV, target_NV, saved_N3, grad_loss_N, ctx.block_v), None, None


def tv_loss(draft_NV: Tensor, target_NV: Tensor, block_v: int | None = None) -> tuple[Tensor, Tensor]:
    """(loss_N, fault_N); the loss carries a gradient to `draft_NV` and none to `target_NV`."""
    return _TotalVariation.apply(draft_NV, target_NV, block_v)
