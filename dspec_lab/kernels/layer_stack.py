"""The layers of a plain decoder as `rows.c` takes them in one call (`layer_rows`, `context_rows` of the native ops)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class _Layer(ctypes.Structure):
    """`Layer` of rows.c."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("norm_in", "norm_mid", "qkv", "out", "gate_up", "down")]


@dataclass(frozen=True, slots=True)
class PlainLayer:
    """A layer of norm, attention, residual, norm, gated MLP and residual. Matrices of one dtype, norms fp32."""

    norm_in: Tensor  # [D]
    norm_mid: Tensor
    qkv: Tensor  # [(H + 2 K) E, D]
    out: Tensor  # [D, H E]
    gate_up: Tensor  # [2 I, D]
    down: Tensor  # [D, I]


class LayerStack:
    """Plain layers as one native call takes them. It reads where they lay; `moved` says that it should be made anew."""

    @classmethod
    def of(cls, layers: Sequence[PlainLayer], heads: tuple[int, int, int]) -> LayerStack | None:
        """The stack, or None for layers that only the ops one by one can run.

        Their matrices are of several dtypes, or neither bf16 nor fp32, or something is not contiguous.
        """
        matrices = [(layer.qkv, layer.out, layer.gate_up, layer.down) for layer in layers]
        dtypes = {matrix.dtype for four in matrices for matrix in four}
        norms = [norm for layer in layers for norm in (layer.norm_in, layer.norm_mid)]
        if dtypes not in ({torch.bfloat16}, {torch.float32}) or heads[2] % 8:
            return None
        if any(norm.dtype != torch.float32 for norm in norms):
            return None
        if not all(part.is_contiguous() for part in (*norms, *(matrix for four in matrices for matrix in four))):
            return None
        return cls(layers, heads)

    def __init__(self, layers: Sequence[PlainLayer], heads: tuple[int, int, int]) -> None:
        num_heads, num_kv, width = heads
        first = layers[0]
        hidden, inner = first.norm_in.shape[0], first.down.shape[1]
        shapes = {
            "norm_in": (hidden,), "norm_mid": (hidden,), "qkv": ((num_heads + 2 * num_kv) * width, hidden),
            "out": (hidden, num_heads * width), "gate_up": (2 * inner, hidden), "down": (hidden, inner),
        }  # fmt: skip
        for layer in layers:
            for name, shape in shapes.items():
                tensor = getattr(layer, name)
                dtype = torch.float32 if name.startswith("norm") else first.qkv.dtype
                if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
                    raise ValueError(
                        f"{name} of a layer must be contiguous {dtype} {list(shape)}, got {tensor.dtype} "
                        f"{[*tensor.shape]}"
                    )
        if first.qkv.dtype not in (torch.bfloat16, torch.float32) or width % 8 or num_heads % num_kv:
            raise ValueError(f"the native layers take bf16 or fp32 and heads by 8, got {first.qkv.dtype} and {heads}")
        self.heads, self.hidden, self.inner, self.count = heads, hidden, inner, len(layers)
        self.half = first.qkv.dtype == torch.bfloat16
        self._tensors = fields(layers)
        self._lies_at = [tensor.data_ptr() for tensor in self._tensors]
        # what a call reads stays alive though a tensor be given other memory
        self._alive = [tensor.detach() for tensor in self._tensors]
        self.structs = (_Layer * len(layers))(
            *(_Layer(*(getattr(layer, name).data_ptr() for name, _ in _Layer._fields_)) for layer in layers)
        )

    def moved(self, tensors: Sequence[Tensor] | None = None) -> bool:
        """Whether the stack's tensors lie elsewhere by now, or these, which stand for them in the order of fields."""
        return [tensor.data_ptr() for tensor in tensors or self._tensors] != self._lies_at


def fields(layers: Sequence[PlainLayer]) -> list[Tensor]:
    """The layers' tensors, in the order in which a stack compares them."""
    return [getattr(layer, name) for layer in layers for name, _ in _Layer._fields_]
