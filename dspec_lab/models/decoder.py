"""The lean decoder: one target implementation for Llama, Qwen3 and dense Gemma 4, made for passes over few rows.

Weights stay in the model's dtype; activations, keys, values and logits are fp32 on every device (a product may round
its rows to the weights' dtype, as torch does and as CPUs with products of bf16 do). A pass takes flattened rows
with markers (`kernels.rows.RowMarkers`), so one request, a ragged batch of many and a draft tree are the same call.
Rolling back is exact: a cache's length is lowered, and what lies beyond it is never looked at. Sliding layers keep all
positions and look only at their window, so they roll back like the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dspec_lab.kernels.layer_stack import LayerStack, PlainLayer
from dspec_lab.kernels.native_rows import NativeRows
from dspec_lab.kernels.rows import (
    BLOCK,
    Impl,
    LayerCache,
    RowMarkers,
    RowOps,
    joined_layers,
    native_pointers,
    row_ops,
)
from dspec_lab.models.family import ModelSpec, inverse_frequencies, model_spec, text_config
from dspec_lab.models.protocol import Features, Taps, TargetRows
from dspec_lab.models.weights import DecoderWeights, decoder_weights, truncated

# longer prompts are fed in pieces of this many rows, which bounds the work space of attention
PREFILL_ROWS = 256


class SequenceCache:
    """Keys and values of one request, one `LayerCache` a layer, with room for a fixed number of tokens."""

    def __init__(self, spec: ModelSpec, capacity: int, device: torch.device) -> None:
        if capacity < 1:
            raise ValueError(f"a cache needs room for at least one token, got {capacity}")
        self.capacity = -(-capacity // BLOCK) * BLOCK
        self.length = 0
        self.layers: list[LayerCache] = []
        for layer in range(spec.num_layers):
            shape = spec.attention_of(layer)
            # zeros, not empty: places that no row may see are still read as part of a vector
            key = torch.zeros(shape.num_kv_heads, shape.head_dim, self.capacity, device=device)
            value = torch.zeros(shape.num_kv_heads, self.capacity, shape.head_dim, device=device)
            self.layers.append(LayerCache([key], [value]))
        self.addresses_L2: np.ndarray | None = None  # of each layer's keys and values, for the compiled row ops
        if device.type == "cpu":
            self.layers = [LayerCache(c.keys, c.values, native_pointers(c)) for c in self.layers]
            self.addresses_L2 = np.array([(c.keys[0].data_ptr(), c.values[0].data_ptr()) for c in self.layers])

    @property
    def cache_bytes(self) -> int:
        """Memory held, bytes."""
        return sum(c.keys[0].nbytes + c.values[0].nbytes for c in self.layers)


class LeanDecoder:
    """A decoder-only target or draft model."""

    def __init__(
        self,
        weights: DecoderWeights,
        spec: ModelSpec,
        *,
        name: str,
        eos_ids: Sequence[int] = (),
        impl: Impl = "auto",
    ) -> None:
        self.weights, self.spec, self.name = weights, spec, name
        self.vocab_size, self.hidden_size = spec.vocab_size, spec.hidden_size
        self.num_layers, self.max_context = spec.num_layers, spec.max_positions
        self.eos_ids = frozenset(eos_ids)
        self.dtype, self.device = weights.embedding.dtype, weights.embedding.device
        odd = sorted({shape.head_dim for shape in spec.attention.values() if shape.head_dim % 8})
        lean = self.dtype in (torch.bfloat16, torch.float32) and not odd
        if impl == "native" and not lean:
            raise ValueError(
                f"the native row ops need bf16 or fp32 weights and head sizes that are multiples of 8, got {self.dtype}"
                + (f" and {odd}" if odd else "")
            )
        self.ops = row_ops(impl if lean else "torch", self.device)
        # transformers multiplies by the scale in the table's dtype
        self._embed_scale = float(torch.tensor(spec.embedding_scale, dtype=self.dtype))
        self._angles: dict[str, tuple[Tensor, Tensor]] = {}
        # the layers as one native call takes them, and what they were made for
        self._stacked: tuple[DecoderWeights, RowOps, LayerStack | None] | None = None

    @classmethod
    def from_folder(
        cls,
        folder: Path | str,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        impl: Impl = "auto",
    ) -> LeanDecoder:
        """Load config.json and *.safetensors of a transformers model folder."""
        import json

        from safetensors import SafetensorError
        from safetensors.torch import load_file

        folder = Path(folder)
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(f"{folder} holds no config.json")
        config = json.loads((folder / "config.json").read_text())
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"{folder} holds no .safetensors file")
        state: dict[str, Tensor] = {}
        for file in files:
            try:
                state |= load_file(file)
            except SafetensorError as error:
                raise ValueError(f"{file} is damaged: {error}") from error
        spec = model_spec(config)
        # a multi-modal config keeps its end token with the text model
        eos = config.get("eos_token_id", text_config(config).get("eos_token_id"))
        generation = folder / "generation_config.json"
        if generation.is_file():
            eos = json.loads(generation.read_text()).get("eos_token_id", eos)
        eos_ids = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
        weights = decoder_weights(state, spec, dtype=dtype, device=device)
        return cls(weights, spec, name=folder.name, eos_ids=eos_ids, impl=impl)

    def keep_layers(self, keep: Sequence[int], *, name: str) -> LeanDecoder:
        """A shallower decoder of the given layers, sharing all tensors with this one."""
        weights, spec = truncated(self.weights, self.spec, tuple(keep))
        return LeanDecoder(weights, spec, name=name, eos_ids=tuple(self.eos_ids), impl=self.ops.name)  # type: ignore[arg-type]

    def embedding(self) -> Tensor:
        """Token embedding table [V, D], the tensor itself."""
        return self.weights.embedding

    def head(self) -> Tensor:
        """Output head [V, D], the tensor itself."""
        return self.weights.head

    def session(self, *, capacity: int, taps: Taps | None = None) -> DecoderSession:
        """A fresh cache for one request of at most `capacity` tokens.

        Weights may be given other memory between requests, but not while one is under way.
        """
        if capacity > self.max_context:
            raise ValueError(f"{capacity} tokens do not fit {self.name}, which takes {self.max_context}")
        if self._stacked is not None and self._stacked[2] is not None and self._stacked[2].moved():
            # asked here and not before each pass: the pass before has thrown what is asked about out of the caches
            self._stacked = None
        return DecoderSession(self, SequenceCache(self.spec, capacity, self.device), taps or Taps())

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Logits [N, V], fp32, of rows after the final norm."""
        logits_NV = self.ops.linear(hidden_ND, self.weights.head)
        cap = self.spec.logit_softcap
        return logits_NV if cap is None else torch.tanh(logits_NV / cap) * cap

    def run_rows(
        self, ids_N: Tensor, positions_N: Tensor, caches: Sequence[SequenceCache], markers: RowMarkers, taps: Taps
    ) -> tuple[Tensor, Tensor | None]:
        """(rows after the final norm [N, D], tapped outputs [N, F] or None) of one pass, which stores keys and values.

        `positions_N` are rotary positions; `markers.owner_N` indexes `caches`. Cache lengths are left to the caller.
        """
        ops, spec, family = self.ops, self.spec, self.spec.family
        x_ND = torch.nn.functional.embedding(ids_N, self.weights.embedding).float()
        if self._embed_scale != 1.0:
            x_ND *= self._embed_scale
        width = self.hidden_size
        tapped_NF = x_ND.new_empty(len(ids_N), width * len(taps.layers)) if taps.layers else None
        # where each tapped layer's output goes; -1 is the embedding
        places = {layer: slice(width * i, width * (i + 1)) for i, layer in enumerate(taps.layers)}
        if tapped_NF is not None and -1 in places:
            tapped_NF[:, places[-1]] = x_ND
        turns = {kind: self._cos_sin(kind, positions_N) for kind in set(spec.layer_types)}
        windows = {kind: _windowed(markers, spec.attention[kind].window, positions_N) for kind in set(spec.layer_types)}
        stack = self._stack()
        if stack is not None and (ops.most_rows is None or len(ids_N) <= ops.most_rows):
            (kind,) = turns
            scale = spec.attention[kind].score_scale
            taken = tuple(taps.layers) if tapped_NF is not None else ()
            ops.layer_rows(stack, x_ND, turns[kind], caches, windows[kind], scale, spec.norm_eps, tapped_NF, taken)  # type: ignore[attr-defined]
            return ops.rms_norm(x_ND, self.weights.norm, spec.norm_eps), tapped_NF
        layers = caches[0].layers if len(caches) == 1 else joined_layers(caches)
        for index, layer in enumerate(self.weights.layers):
            kind = spec.layer_types[index]
            shape = spec.attention[kind]
            heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
            cache = layers[index]
            qkv = ops.linear(ops.rms_norm(x_ND, layer.norm_in, spec.norm_eps), layer.qkv)
            if layer.qkv_bias is not None:
                qkv += layer.qkv_bias
            if family.qk_norm or family.value_norm:
                self._head_norms(qkv, layer.q_norm, layer.k_norm, heads)
            ops.rope_store(qkv, *turns[kind], cache, windows[kind], heads)
            mixed = ops.attend(qkv, cache, windows[kind], heads, shape.score_scale)
            if layer.norm_after_attention is None:
                x_ND = ops.linear(mixed, layer.out, x_ND)
                if layer.out_bias is not None:
                    x_ND += layer.out_bias
                gate_up = ops.linear(ops.rms_norm(x_ND, layer.norm_mid, spec.norm_eps), layer.gate_up)
                x_ND = ops.linear(self._activate(gate_up), layer.down, x_ND)
            else:
                mixed = ops.linear(mixed, layer.out)
                if layer.out_bias is not None:
                    mixed += layer.out_bias
                x_ND = x_ND + ops.rms_norm(mixed, layer.norm_after_attention, spec.norm_eps)
                gate_up = ops.linear(ops.rms_norm(x_ND, layer.norm_mid, spec.norm_eps), layer.gate_up)
                inner = ops.linear(self._activate(gate_up), layer.down)
                x_ND = x_ND + ops.rms_norm(inner, layer.norm_after_mlp, spec.norm_eps)
            if layer.scalar != 1.0:
                x_ND = x_ND * layer.scalar
            if tapped_NF is not None and index in places:
                tapped_NF[:, places[index]] = x_ND
        return ops.rms_norm(x_ND, self.weights.norm, spec.norm_eps), tapped_NF

    def _stack(self) -> LayerStack | None:
        """All layers for one native call, where the ops are compiled and the family's layers are plain ones."""
        spec, weights = self.spec, self.weights
        if self._stacked is None:
            kinds, family = set(spec.layer_types), spec.family
            plain = (
                isinstance(self.ops, NativeRows)
                and len(kinds) == 1
                and spec.activation == "silu"
                and not (family.qk_norm or family.value_norm)
                and all(
                    layer.qkv_bias is layer.out_bias is layer.norm_after_attention is None and layer.scalar == 1.0
                    for layer in weights.layers
                )
            )
            stack = None
            if plain:
                shape = spec.attention[next(iter(kinds))]
                stack = LayerStack.of(
                    [PlainLayer(w.norm_in, w.norm_mid, w.qkv, w.out, w.gate_up, w.down) for w in weights.layers],
                    (shape.num_heads, shape.num_kv_heads, shape.head_dim),
                )
            self._stacked = weights, self.ops, stack
        held, ops, stack = self._stacked
        if held is not weights or ops is not self.ops:
            self._stacked = None
            return self._stack()
        return stack

    def _activate(self, gate_up: Tensor) -> Tensor:
        if self.spec.activation == "silu":
            return self.ops.silu_mul(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.gelu(gate, approximate="tanh") * up

    def _head_norms(
        self, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, heads: tuple[int, int, int]
    ) -> None:
        num_heads, num_kv, width = heads
        rows = qkv.view(qkv.shape[0], num_heads + 2 * num_kv, width)
        eps = self.spec.norm_eps
        norm = torch.nn.functional.rms_norm
        rows[:, :num_heads] = norm(rows[:, :num_heads], (width,), q_norm, eps)
        if self.spec.family.value_norm:
            rows[:, num_heads + num_kv :] = norm(rows[:, num_heads + num_kv :], (width,), None, eps)
        key = slice(num_heads, num_heads + num_kv)
        rows[:, key] = norm(rows[:, key], (width,), k_norm, eps)

    def _cos_sin(self, kind: str, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        top = int(positions_N.max()) + 1
        held = self._angles.get(kind)
        if held is None or held[0].shape[0] < top:
            shape = self.spec.attention[kind]
            size = min(max(1024, 2 * top), max(self.max_context, top))
            angle = torch.arange(size, dtype=torch.float32)[:, None] * inverse_frequencies(shape.rotary, shape.head_dim)
            held = (angle.cos().to(self.device), angle.sin().to(self.device))
            self._angles[kind] = held
        return held[0][positions_N], held[1][positions_N]


class DecoderSession:
    """One request on a lean decoder."""

    def __init__(self, decoder: LeanDecoder, cache: SequenceCache, taps: Taps) -> None:
        taps.check(decoder.num_layers)
        self.decoder, self.cache, self.taps = decoder, cache, taps
        # markers of a chain are slices of these
        self._count = torch.arange(cache.capacity + 1, device=decoder.device)
        self._zeros = torch.zeros(cache.capacity, dtype=torch.int64, device=decoder.device)

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return self.cache.length

    @torch.inference_mode()
    def extend(self, token_ids: Sequence[int], *, logit_rows: int | None = None) -> TargetRows:
        """Feed tokens; see `TargetSession.extend`."""
        count = len(token_ids)
        wanted = count if logit_rows is None else logit_rows
        if count < 1 or not 0 <= wanted <= count:
            raise ValueError(f"cannot give {wanted} rows of logits for {count} tokens")
        if self.length + count > self.cache.capacity:
            raise ValueError(f"{self.length} + {count} tokens do not fit a cache of {self.cache.capacity}")
        ids_N = torch.tensor(token_ids, device=self.decoder.device)
        hidden, tapped = [], []
        for at in range(0, count, PREFILL_ROWS):
            piece_N = ids_N[at : at + PREFILL_ROWS]
            begin, rows = self.length, len(piece_N)
            place_N = self._count[begin : begin + rows]
            markers = RowMarkers(
                owner_N=self._zeros[:rows],
                place_N=place_N,
                first_N=self._zeros[:rows],
                prefix_N=self._count[begin + 1 : begin + rows + 1],
                ancestors_N=self._zeros[:rows],
                span=-(-(begin + rows) // BLOCK) * BLOCK,
            )
            rows_ND, tapped_NF = self.decoder.run_rows(piece_N, place_N, [self.cache], markers, self.taps)
            self.cache.length += rows
            hidden.append(rows_ND)
            tapped.append(tapped_NF)
        all_ND = hidden[0] if len(hidden) == 1 else torch.cat(hidden)
        features = None
        if self.taps:
            features = Features(
                tapped_NF=torch.cat(tapped) if self.taps.layers else None,  # type: ignore[arg-type]
                last_ND=all_ND if self.taps.last_hidden else None,
            )
        logits_JV = (
            self.decoder.logits(all_ND[count - wanted :]) if wanted else all_ND.new_empty(0, self.decoder.vocab_size)
        )
        return TargetRows(logits_JV=logits_JV, features=features)

    def truncate(self, length: int) -> None:
        """Forget all tokens from `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot roll a cache of {self.length} tokens back to {length}")
        self.cache.length = length


def _windowed(markers: RowMarkers, window: int | None, positions_N: Tensor) -> RowMarkers:
    if window is None:
        return markers
    return RowMarkers(
        owner_N=markers.owner_N,
        place_N=markers.place_N,
        # position p sees p - window + 1 .. p, and cache places of committed tokens are their positions
        first_N=(positions_N - window + 1).clamp_min(0),
        prefix_N=markers.prefix_N,
        ancestors_N=markers.ancestors_N,
        span=markers.span,
    )
