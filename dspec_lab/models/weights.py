"""Weights of a decoder, fused for few-row passes: one matrix for q, k, v and one for gate and up."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dspec_lab.models.family import ModelSpec


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Matrices keep the model's dtype; norms, biases and scalars are fp32."""

    qkv: Tensor  # [(H + 2 K) E, D]
    qkv_bias: Tensor | None
    out: Tensor  # [D, H E]
    out_bias: Tensor | None
    gate_up: Tensor  # [2 M, D]
    down: Tensor  # [D, M]
    norm_in: Tensor
    norm_mid: Tensor  # before the MLP
    norm_after_attention: Tensor | None  # sandwich families only
    norm_after_mlp: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    scalar: float  # the layer output is multiplied by it


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights of a decoder."""

    embedding: Tensor  # [V, D]
    head: Tensor  # [V, D]; the embedding itself where they are tied
    norm: Tensor
    layers: tuple[LayerWeights, ...]


class StateReader:
    """Takes tensors out of a state dict by name, so that what is missing or left over can be named."""

    def __init__(self, state: Mapping[str, Tensor], prefix: str) -> None:
        self._state, self._prefix = state, prefix
        self.used: set[str] = set()

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor `name`; `ValueError` if it is missing or has another shape."""
        full = self._prefix + name
        if full not in self._state:
            raise ValueError(f"the model has no tensor {full!r}")
        tensor = self._state[full]
        if tuple(tensor.shape) != shape:
            raise ValueError(f"tensor {full!r} has shape {tuple(tensor.shape)}, expected {shape}")
        self.used.add(full)
        return tensor

    def has(self, name: str) -> bool:
        """Whether there is a tensor `name`."""
        return self._prefix + name in self._state


def decoder_weights(
    state: Mapping[str, Tensor], spec: ModelSpec, *, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> DecoderWeights:
    """Fused weights from a transformers state dict of a Llama, Qwen3 or dense Gemma 4 causal language model."""
    if spec.unsupported:
        raise ValueError(f"the lean decoder cannot run a model with {', '.join(spec.unsupported)}")
    prefix = next((p for p in ("model.language_model.", "model.", "") if p + "embed_tokens.weight" in state), "model.")
    reader = StateReader(state, prefix)

    def matrix(name: str, *shape: int) -> Tensor:
        return reader.take(name, shape).to(device=device, dtype=dtype)

    def small(name: str, *shape: int) -> Tensor:
        return reader.take(name, shape).to(device=device, dtype=torch.float32).contiguous()

    width, inner = spec.hidden_size, spec.intermediate_size
    layers = []
    for index in range(spec.num_layers):
        shape, at, family = spec.attention_of(index), f"layers.{index}.", spec.family
        sizes = {
            "q": shape.num_heads * shape.head_dim,
            "k": shape.num_kv_heads * shape.head_dim,
            "v": shape.num_kv_heads * shape.head_dim,
        }
        # values that are the raw key projection are projected once more by the same rows
        source = {"q": "q", "k": "k", "v": "k" if shape.keys_as_values else "v"}
        qkv = torch.cat([matrix(f"{at}self_attn.{source[n]}_proj.weight", size, width) for n, size in sizes.items()])
        qkv_bias = out_bias = None
        if spec.attention_bias:
            qkv_bias = torch.cat([small(f"{at}self_attn.{source[n]}_proj.bias", size) for n, size in sizes.items()])
            out_bias = small(f"{at}self_attn.o_proj.bias", width)
        if spec.mlp_bias:
            raise ValueError("the lean decoder cannot run a model with mlp_bias")
        gate_up = torch.cat([matrix(f"{at}mlp.{n}_proj.weight", inner, width) for n in ("gate", "up")])
        sandwich = family.sandwich_norms
        layers.append(
            LayerWeights(
                qkv=qkv,
                qkv_bias=qkv_bias,
                out=matrix(f"{at}self_attn.o_proj.weight", width, sizes["q"]).contiguous(),
                out_bias=out_bias,
                gate_up=gate_up,
                down=matrix(f"{at}mlp.down_proj.weight", width, inner).contiguous(),
                norm_in=small(f"{at}input_layernorm.weight", width),
                norm_mid=small(f"{at}{'pre_feedforward' if sandwich else 'post_attention'}_layernorm.weight", width),
                norm_after_attention=small(f"{at}post_attention_layernorm.weight", width) if sandwich else None,
                norm_after_mlp=small(f"{at}post_feedforward_layernorm.weight", width) if sandwich else None,
                q_norm=small(f"{at}self_attn.q_norm.weight", shape.head_dim) if family.qk_norm else None,
                k_norm=small(f"{at}self_attn.k_norm.weight", shape.head_dim) if family.qk_norm else None,
                scalar=float(small(f"{at}layer_scalar", 1)) if family.layer_scalar else 1.0,
            )
        )
    embedding = matrix("embed_tokens.weight", spec.vocab_size, width).contiguous()
    if spec.tie_word_embeddings or "lm_head.weight" not in state:
        if not spec.tie_word_embeddings:
            raise ValueError("the model has no tensor 'lm_head.weight' and its config does not tie it to the embedding")
        head = embedding
    else:
        head = StateReader(state, "").take("lm_head.weight", (spec.vocab_size, width)).to(device=device, dtype=dtype)
    return DecoderWeights(
        embedding=embedding, head=head.contiguous(), norm=small("norm.weight", width), layers=tuple(layers)
    )


def truncated(weights: DecoderWeights, spec: ModelSpec, keep: tuple[int, ...]) -> tuple[DecoderWeights, ModelSpec]:
    """The same decoder with only the layers in `keep`, in that order: a draft model that shares all its tensors."""
    bad = [layer for layer in keep if not 0 <= layer < spec.num_layers]
    if bad or not keep:
        raise ValueError(f"layers to keep must lie in 0..{spec.num_layers - 1}, got {list(keep)}")
    kinds = tuple(spec.layer_types[layer] for layer in keep)
    layers = tuple(weights.layers[layer] for layer in keep)
    return dataclasses.replace(weights, layers=layers), dataclasses.replace(spec, layer_types=kinds)
