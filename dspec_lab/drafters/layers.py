"""Building blocks of the draft layers, one implementation for all target families.

Query/key/value and gate/up projections are stored fused, in this order, so that a block costs few matrix products.
Matrices may be bf16; activations, norms and biases are fp32. Under `torch.inference_mode` the products run through
`kernels.rows`, which reads each weight once for the few rows of a block; otherwise they are plain torch. Within
`bf16_products` they are made of bf16 numbers, forward and backward.
"""

import contextlib
import contextvars
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from dspec_lab.kernels.rows import RowOps, row_ops
from dspec_lab.models.family import FULL, AttentionShape, ModelSpec, Rotary, inverse_frequencies


def few_row_ops(x: Tensor, weight: Tensor) -> RowOps | None:
    """The ops for few rows where they apply: inference, fp32 activations, a weight stored row by row."""
    if not torch.is_inference_mode_enabled() or x.dtype != torch.float32 or not weight.is_contiguous() or not x.numel():
        return None
    return _row_ops(x.device) if weight.dtype in (torch.bfloat16, torch.float32) else None


@functools.cache
def _row_ops(device: torch.device) -> RowOps:
    # asked for some twenty times a block
    return row_ops("auto", device)


_IN_BF16: contextvars.ContextVar[bool] = contextvars.ContextVar("bf16_products", default=False)


def in_bf16() -> bool:
    """Whether this is within `bf16_products`."""
    return _IN_BF16.get()


@contextlib.contextmanager
def bf16_products(on: bool = True) -> Iterator[None]:
    """Within this context, products of `linear` round both sides to bf16 (mixed-precision training)."""
    token = _IN_BF16.set(on)
    try:
        yield
    finally:
        _IN_BF16.reset(token)


ROW_STEP = 256  # rows of a gradient's product are filled up to a multiple of this with zeros


class _Bf16Product(torch.autograd.Function):
    """x W^T of bf16 numbers, summed and given in fp32. Gradients are products of bf16 numbers, rounded to bf16."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_OD: Tensor) -> Tensor:
        low_ND, low_OD = x_ND.bfloat16(), weight_OD.bfloat16()
        ctx.save_for_backward(low_ND, low_OD)
        ctx.dtypes = x_ND.dtype, weight_OD.dtype
        ops = _row_ops(x_ND.device)
        if getattr(ops, "rounds", False) and x_ND.dtype == torch.float32 and low_OD.is_contiguous():
            return ops.linear(x_ND.contiguous(), low_OD)
        # torch would round the sums to bf16, which is too coarse for logits
        return F.linear(low_ND.to(x_ND.dtype), low_OD.to(x_ND.dtype))

    @staticmethod
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, Tensor | None]:  # type: ignore[override]
        low_ND, low_OD = ctx.saved_tensors
        rows = low_ND.shape[0]
        # the library makes code for each shape that is new to it, which takes longer than the product
        spare = -rows % ROW_STEP
        low_NO = F.pad(grad_NO.bfloat16(), (0, 0, 0, spare))
        dx_ND = (low_NO @ low_OD)[:rows].to(ctx.dtypes[0]) if ctx.needs_input_grad[0] else None
        dw_OD = None
        if ctx.needs_input_grad[1]:
            dw_OD = (low_NO.T @ F.pad(low_ND, (0, 0, 0, spare))).to(ctx.dtypes[1])
        return dx_ND, dw_OD


def linear(x: Float[Tensor, "*N D"], weight_OD: Tensor, bias_O: Tensor | None = None) -> Float[Tensor, "*N O"]:
    """x W^T + b in the dtype of x, whatever the dtype of W."""
    ops = few_row_ops(x, weight_OD)
    if ops is not None:
        out = ops.linear(x.reshape(-1, x.shape[-1]).contiguous(), weight_OD).view(*x.shape[:-1], weight_OD.shape[0])
    elif in_bf16():
        out = _Bf16Product.apply(x.reshape(-1, x.shape[-1]), weight_OD).view(*x.shape[:-1], weight_OD.shape[0])
    else:
        out = F.linear(x.to(weight_OD.dtype), weight_OD).to(x.dtype)
    return out if bias_O is None else out + bias_O


class Linear(nn.Linear):
    """`linear` as a module."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    """w * x / sqrt(mean(x^2) + eps), plain weight for all families."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        ops = few_row_ops(x, self.weight)
        if ops is None or self.weight.dtype != torch.float32:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return ops.rms_norm(x.reshape(-1, x.shape[-1]).contiguous(), self.weight, self.eps).view(x.shape)


class RotaryTable:
    """Cosines and sines by position, computed in fp32 and kept per dtype; grows on demand up to `max_positions`.

    Ref: Su et al. 2021 (arXiv:2104.09864), with the two halves of a head as the pairs.
    """

    def __init__(self, rotary: Rotary, head_dim: int, max_positions: int) -> None:
        self._rotary, self._head_dim = rotary, head_dim
        self._max_positions = max_positions
        self._tables: dict[tuple[torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}

    def span(self, start: int, count: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [count, E], of positions start, start + 1, ... in the dtype and on the device of `like`."""
        cos_SE, sin_SE = self._up_to(start + count, like)
        return cos_SE[start : start + count], sin_SE[start : start + count]

    def at(self, positions_BT: Int[Tensor, "B T"], like: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [B, T, E], of the given positions."""
        cos_SE, sin_SE = self._up_to(int(positions_BT.max()) + 1, like)
        return cos_SE[positions_BT], sin_SE[positions_BT]

    def halves(self, positions_N: Int[Tensor, " N"], like: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [N, E / 2], of the given positions: one angle a pair, as the row ops take them."""
        cos_SE, sin_SE = self._up_to(int(positions_N.max()) + 1, like)
        half = cos_SE.shape[-1] // 2
        return cos_SE[positions_N, :half].contiguous(), sin_SE[positions_N, :half].contiguous()

    def _up_to(self, end: int, like: Tensor) -> tuple[Tensor, Tensor]:
        key = (like.dtype, like.device)
        table = self._tables.get(key)
        if table is None or table[0].shape[0] < end:
            if end > self._max_positions:
                raise ValueError(f"position {end - 1} is beyond the drafter's {self._max_positions} positions")
            rows = min(max(2 * end, 512), self._max_positions)
            # a table made under inference mode could not be saved for backward later
            with torch.inference_mode(False):
                frequencies_P = inverse_frequencies(self._rotary, self._head_dim)
                angle_SE = torch.arange(rows, dtype=torch.float32)[:, None] * frequencies_P.repeat(2)
                table = (angle_SE.cos().to(like), angle_SE.sin().to(like))
            self._tables[key] = table
        return table


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x turned by its position's angles; `cos` and `sin` broadcast against x, last axis E."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class DraftAttention(nn.Module):
    """Projections of grouped-query attention: norms per head, values reused from keys where the family says so."""

    def __init__(self, spec: ModelSpec, shape: AttentionShape, input_width: int) -> None:
        super().__init__()
        self.shape = shape
        self.value_norm = spec.family.value_norm
        self.eps = spec.norm_eps
        self.query_width = shape.num_heads * shape.head_dim
        self.kv_width = shape.num_kv_heads * shape.head_dim
        num_kv_projections = 1 if shape.keys_as_values else 2
        fused_width = self.query_width + num_kv_projections * self.kv_width
        self.qkv_proj = Linear(input_width, fused_width, bias=spec.attention_bias)
        self.o_proj = Linear(self.query_width, spec.hidden_size, bias=spec.attention_bias)
        self.q_norm = RMSNorm(shape.head_dim, spec.norm_eps) if spec.family.qk_norm else None
        self.k_norm = RMSNorm(shape.head_dim, spec.norm_eps) if spec.family.qk_norm else None

    def project(self, x_BTD: Float[Tensor, "B T D"]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B,T,H,E], keys and values [B,T,K,E] of x: normed, not yet rotated."""
        qkv_BTX = self.qkv_proj(x_BTD)
        q_BTX, kv_BTX = qkv_BTX.split([self.query_width, qkv_BTX.shape[-1] - self.query_width], dim=-1)
        q_BTHE = q_BTX.unflatten(-1, (self.shape.num_heads, self.shape.head_dim))
        if self.q_norm is not None:
            q_BTHE = self.q_norm(q_BTHE)
        return q_BTHE, *self._keys_and_values(kv_BTX)

    def project_context(self, context_BTD: Float[Tensor, "B T D"]) -> tuple[Tensor, Tensor]:
        """Keys and values [B,T,K,E] of injected context, by the same projections: normed, not yet rotated."""
        bias = self.qkv_proj.bias
        weight_XD = self.qkv_proj.weight[self.query_width :]
        kv_BTX = linear(context_BTD, weight_XD, None if bias is None else bias[self.query_width :])
        return self._keys_and_values(kv_BTX)

    def _keys_and_values(self, kv_BTX: Tensor) -> tuple[Tensor, Tensor]:
        heads = (self.shape.num_kv_heads, self.shape.head_dim)
        raw_BTKE = kv_BTX[..., : self.kv_width].unflatten(-1, heads)
        v_BTKE = raw_BTKE if self.shape.keys_as_values else kv_BTX[..., self.kv_width :].unflatten(-1, heads)
        if self.value_norm:
            v_BTKE = F.rms_norm(v_BTKE, heads[1:], None, self.eps)
        k_BTKE = raw_BTKE if self.k_norm is None else self.k_norm(raw_BTKE)
        return k_BTKE, v_BTKE


class GatedMLP(nn.Module):
    """down(act(gate x) * up x)."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.activation = spec.activation
        self.gate_up_proj = Linear(spec.hidden_size, 2 * spec.intermediate_size, bias=spec.mlp_bias)
        self.down_proj = Linear(spec.intermediate_size, spec.hidden_size, bias=spec.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate_up = self.gate_up_proj(x)
        ops = few_row_ops(gate_up, self.gate_up_proj.weight)
        if ops is not None and self.activation == "silu":
            inner = ops.silu_mul(gate_up.view(-1, gate_up.shape[-1]))
            return self.down_proj(inner.view(*gate_up.shape[:-1], -1))
        gate, up = gate_up.chunk(2, dim=-1)
        gate = F.silu(gate) if self.activation == "silu" else F.gelu(gate, approximate="tanh")
        return self.down_proj(gate * up)


class DraftLayer(nn.Module):
    """One decoder layer without its attention pattern: the caller attends, `finish` does the rest."""

    layer_scalar: Tensor | None

    def __init__(self, spec: ModelSpec, *, attention_input: int | None = None) -> None:
        super().__init__()
        # drafters attend fully even where layer_types says sliding_attention: so does the code they were trained with
        shape = spec.attention[FULL]
        width, eps = spec.hidden_size, spec.norm_eps
        self.self_attn = DraftAttention(spec, shape, attention_input or width)
        self.mlp = GatedMLP(spec)
        self.input_layernorm = RMSNorm(width, eps)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.sandwich = spec.family.sandwich_norms
        if self.sandwich:
            self.pre_feedforward_layernorm = RMSNorm(width, eps)
            self.post_feedforward_layernorm = RMSNorm(width, eps)
        # carried along, not trained
        self.register_buffer("layer_scalar", torch.ones(1) if spec.family.layer_scalar else None)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Residual stream after this layer, from the stream `x` before it and the heads' output `attended`."""
        update = self.self_attn.o_proj(attended)
        if self.sandwich:
            x = x + self.post_attention_layernorm(update)
            x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        else:
            x = x + update
            x = x + self.mlp(self.post_attention_layernorm(x))
        return x if self.layer_scalar is None else x * self.layer_scalar


def attend(
    q_THE: Float[Tensor, "T H E"],
    keys_1KSE: Float[Tensor, "1 K S E"],
    values_1KSE: Float[Tensor, "1 K S E"],
    scale: float,
    causal: bool,
) -> Float[Tensor, "1 T X"]:
    """Attention of one request's new rows over all S keys, heads concatenated.

    With `causal`, row t of T sees the first S - T + 1 + t keys; without, every row sees every key.
    """
    num_rows, num_heads, head_dim = q_THE.shape
    num_kv_heads, num_keys = keys_1KSE.shape[1:3]
    group = num_heads // num_kv_heads
    # query heads that share a key head become extra rows of it: no key is copied
    q_KXE = q_THE.view(num_rows, num_kv_heads, group, head_dim).permute(1, 2, 0, 3).reshape(num_kv_heads, -1, head_dim)
    mask_XS = None
    if causal and num_rows > 1:
        mask_TS = torch.ones(num_rows, num_keys, dtype=torch.bool, device=q_THE.device).tril(num_keys - num_rows)
        mask_XS = mask_TS.repeat(group, 1)
    out_1KXE = F.scaled_dot_product_attention(q_KXE[None], keys_1KSE, values_1KSE, attn_mask=mask_XS, scale=scale)
    return out_1KXE.view(num_kv_heads, group, num_rows, head_dim).permute(2, 0, 1, 3).reshape(1, num_rows, -1)
