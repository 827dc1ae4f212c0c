"""Target families as data: what differs between Llama, Qwen3 and Gemma 4, read from a config dict.

Target decoders and drafters are one implementation each; they read the fields below instead of branching on a name.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

FULL = "full_attention"
SLIDING = "sliding_attention"


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetFamily:
    """Traits that every model of one family shares."""

    name: str
    prefix: str  # first part of a drafter's architecture name, as in Qwen3DSparkModel
    qk_norm: bool  # RMS norm with weight on queries and keys, before the rotary embedding
    value_norm: bool  # RMS norm without weight on values
    sandwich_norms: bool  # x += post_norm(f(pre_norm(x))) in place of x += f(norm(x))
    layer_scalar: bool  # the layer output is multiplied by a learned scalar
    unit_score_scale: bool  # attention scores unscaled in place of head_dim ** -0.5
    scaled_embedding: bool  # embeddings times sqrt(hidden size)


FAMILIES: Mapping[str, TargetFamily] = {
    family.name: family
    for family in (
        TargetFamily(
            name="llama",
            prefix="Llama",
            qk_norm=False,
            value_norm=False,
            sandwich_norms=False,
            layer_scalar=False,
            unit_score_scale=False,
            scaled_embedding=False,
        ),
        TargetFamily(
            name="qwen3",
            prefix="Qwen3",
            qk_norm=True,
            value_norm=False,
            sandwich_norms=False,
            layer_scalar=False,
            unit_score_scale=False,
            scaled_embedding=False,
        ),
        TargetFamily(
            name="gemma4",
            prefix="Gemma4",
            qk_norm=True,
            value_norm=True,
            sandwich_norms=True,
            layer_scalar=True,
            unit_score_scale=True,
            scaled_embedding=True,
        ),
    )
}
MODEL_TYPES: Mapping[str, str] = {"llama": "llama", "qwen3": "qwen3", "gemma4": "gemma4", "gemma4_text": "gemma4"}

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_ROTARY_KINDS = ("default", "linear", "llama3", "proportional")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotary:
    """Frequencies of one rotary embedding; entry m pairs with m + head_dim / 2."""

    theta: float
    kind: str = "default"
    partial: float = 1.0  # share of pairs that turn; the rest keep frequency 0 (kind "proportional")
    factor: float = 1.0  # context stretch (kinds "linear" and "llama3")
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in _ROTARY_KINDS:
            raise ValueError(f"rope_type must be one of {', '.join(_ROTARY_KINDS)}, got {self.kind!r}")
        if self.theta <= 0 or not 0 < self.partial <= 1 or self.factor <= 0:
            raise ValueError(f"rotary needs theta > 0, 0 < partial <= 1 and factor > 0, got {self}")


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionShape:
    """Sizes of one attention layer type."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    score_scale: float
    keys_as_values: bool  # values are the raw key projection, so there is no value projection
    window: int | None  # last positions seen, None for all
    rotary: Rotary

    def __post_init__(self) -> None:
        if self.num_heads < 1 or self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} query heads cannot be grouped over {self.num_kv_heads} key/value heads")
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim must be even and positive, got {self.head_dim}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """One model of a family: sizes, and the attention shape of each layer."""

    family: TargetFamily
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    activation: str  # "silu" or "gelu_tanh"
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    logit_softcap: float | None
    layer_types: tuple[str, ...]
    attention: Mapping[str, AttentionShape]  # by layer type
    unsupported: tuple[str, ...]  # config features that no plain decoder of this package runs

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    @property
    def embedding_scale(self) -> float:
        """Factor on the embedding table; cast it to the table's dtype before multiplying, as transformers does."""
        return math.sqrt(self.hidden_size) if self.family.scaled_embedding else 1.0

    def attention_of(self, layer: int) -> AttentionShape:
        return self.attention[self.layer_types[layer]]


def model_spec(config: Mapping[str, object]) -> ModelSpec:
    """Spec of the text model that a config.json (or a transformers config's `to_dict()`) describes.

    A multi-modal config is read through its `text_config`. Unknown model types and rotary types are refused by name.
    """
    config = text_config(config)
    family = FAMILIES[MODEL_TYPES[str(config["model_type"])]]
    act = str(config.get("hidden_activation") or config.get("hidden_act") or "silu")
    if act not in _ACTIVATIONS:
        raise ValueError(f"activation {act!r} is not one of {', '.join(_ACTIVATIONS)}")
    num_layers = _positive(config, "num_hidden_layers")
    layer_types = tuple(str(kind) for kind in config.get("layer_types") or [FULL] * num_layers)
    if len(layer_types) != num_layers:
        raise ValueError(f"layer_types has {len(layer_types)} entries for num_hidden_layers {num_layers}")
    for kind in layer_types:
        if kind not in (FULL, SLIDING):
            raise ValueError(f"layer type {kind!r} is neither {FULL!r} nor {SLIDING!r}")
    return ModelSpec(
        family=family,
        hidden_size=_positive(config, "hidden_size"),
        intermediate_size=_positive(config, "intermediate_size"),
        vocab_size=_positive(config, "vocab_size"),
        max_positions=_positive(config, "max_position_embeddings"),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        activation=_ACTIVATIONS[act],
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        logit_softcap=_optional_float(config.get("final_logit_softcapping")),
        layer_types=layer_types,
        # full attention is always described, for the drafters have no other kind
        attention={kind: _attention_shape(config, family, kind) for kind in sorted({FULL, *layer_types})},
        unsupported=_unsupported(config),
    )


def text_config(config: Mapping[str, object]) -> Mapping[str, object]:
    """The text part of a config; raises for a model type that is not a known family."""
    nested = config.get("text_config")
    if isinstance(nested, Mapping):
        config = nested
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ValueError(f"model_type {model_type!r} is not supported; known types: {', '.join(MODEL_TYPES)}")
    return config


def inverse_frequencies(rotary: Rotary, head_dim: int) -> Float[Tensor, " P"]:
    """Angle per position of each rotary pair, theta^(-2m/d) in fp32, stretched or zeroed as `kind` says.

    Ref: Su et al. 2021 (arXiv:2104.09864); "llama3" stretches the slow pairs only and blends in between.
    """
    exponent_P = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    freq_P = 1.0 / (rotary.theta**exponent_P)
    if rotary.kind == "proportional":
        freq_P[math.floor(rotary.partial * head_dim / 2) :] = 0.0
        return freq_P / rotary.factor
    if rotary.kind == "linear":
        return freq_P / rotary.factor
    if rotary.kind == "llama3":
        turns_P = rotary.original_max_positions * freq_P / (2 * math.pi)
        low, high = rotary.low_freq_factor, rotary.high_freq_factor
        blend_P = ((turns_P - low) / (high - low)).clamp(0.0, 1.0)
        return (1 - blend_P) * freq_P / rotary.factor + blend_P * freq_P
    return freq_P


def _attention_shape(config: Mapping[str, object], family: TargetFamily, kind: str) -> AttentionShape:
    num_heads = _positive(config, "num_attention_heads")
    num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
    head_dim = int(config.get("head_dim") or _positive(config, "hidden_size") // num_heads)
    keys_as_values = False
    if family.name == "gemma4" and kind == FULL:
        head_dim, num_kv_heads, keys_as_values = _gemma4_full_attention(config, head_dim, num_kv_heads)
    window = config.get("sliding_window") if kind == SLIDING else None
    if family.name == "qwen3" and not config.get("use_sliding_window", False):
        window = None
    return AttentionShape(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        score_scale=1.0 if family.unit_score_scale else head_dim**-0.5,
        keys_as_values=keys_as_values,
        window=None if window is None else int(window),
        rotary=_rotary(config, kind),
    )


def _gemma4_full_attention(config: Mapping[str, object], head_dim: int, num_kv_heads: int) -> tuple[int, int, bool]:
    """(head_dim, num_kv_heads, keys_as_values) of Gemma 4's full-attention layers, from either way of saving them."""
    keys_as_values = bool(config.get("attention_k_eq_v", False))
    per_layer = config.get("per_layer_config")
    if isinstance(per_layer, Mapping) and per_layer and "global_head_dim" not in config:
        # transformers 5.24 moves the two flat fields here; each entry is one full-attention layer
        entries = [entry if isinstance(entry, Mapping) else vars(entry) for entry in per_layer.values()]
        widths = {(int(entry.get("head_dim", head_dim)), entry.get("num_key_value_heads")) for entry in entries}
        if len(widths) != 1:
            raise ValueError(f"per_layer_config gives full-attention layers of {len(widths)} shapes: {widths}")
        ((full_head_dim, full_kv_heads),) = widths
        return full_head_dim, int(full_kv_heads or num_kv_heads), keys_as_values
    full_head_dim = int(config.get("global_head_dim") or 512)
    if keys_as_values and config.get("num_global_key_value_heads"):
        num_kv_heads = int(config["num_global_key_value_heads"])
    return full_head_dim, num_kv_heads, keys_as_values


def _rotary(config: Mapping[str, object], kind: str) -> Rotary:
    fields = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(fields, Mapping):
        raise ValueError(f"rope_parameters must be a mapping, got {fields!r}")
    if isinstance(fields.get(kind), Mapping):
        fields = fields[kind]
    theta = fields.get("rope_theta") or config.get("rope_theta")
    if theta is None:
        raise ValueError(f"no rope_theta for {kind} in rope_parameters or at the top level of the config")
    return Rotary(
        theta=float(theta),
        kind=str(fields.get("rope_type") or fields.get("type") or "default"),
        partial=float(fields.get("partial_rotary_factor") or 1.0),
        factor=float(fields.get("factor") or 1.0),
        low_freq_factor=float(fields.get("low_freq_factor") or 1.0),
        high_freq_factor=float(fields.get("high_freq_factor") or 4.0),
        original_max_positions=int(fields.get("original_max_position_embeddings") or 8192),
    )


def _unsupported(config: Mapping[str, object]) -> tuple[str, ...]:
    features = {
        "enable_moe_block": bool(config.get("enable_moe_block")),
        "hidden_size_per_layer_input": bool(config.get("hidden_size_per_layer_input")),
        "num_kv_shared_layers": bool(config.get("num_kv_shared_layers")),
        "use_double_wide_mlp": bool(config.get("use_double_wide_mlp")),
        "use_bidirectional_attention": config.get("use_bidirectional_attention") == "all",
    }
    return tuple(name for name, present in features.items() if present)


def _positive(config: Mapping[str, object], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"config field {name} must be a positive integer, got {value!r}")
    return value


def _optional_float(value: object) -> float | None:
    return None if value is None else float(value)
