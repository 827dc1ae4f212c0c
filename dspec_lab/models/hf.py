"""Any Hugging Face causal language model as a target, if its cache can be rolled back exactly.

Only caches that hold keys and values of every position qualify. Sliding-window layers get full-length layers here: the
model's own mask still limits what each row sees, and nothing that a rejected token pushed out of the window is lost.
Recurrent, linear-attention, compressed, quantised and static caches are refused by name when the target is made.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dspec_lab.models.protocol import Features, Taps, TargetRows

# longer prompts are fed in pieces of this many rows, which bounds the memory of hidden states and logits
PREFILL_ROWS = 1024
CACHE_ARGUMENTS = ("cache", "past_key_values")  # transformers 5.24 and before it
LIMIT_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
NO_LIMIT = 2**31 - 1  # the config names no context limit


def exact_cache(config: Any, cache: Any | None = None) -> Any:
    """An empty cache for a model of `config` that can be rolled back exactly; `ValueError` names what cannot be.

    `cache` is the one to check and adapt, by default the model's own dynamic cache.
    """
    from transformers import cache_utils

    if cache is None:
        try:
            cache = cache_utils.DynamicCache(config=config)
        except KeyError as error:
            raise ValueError(f"the cache of layer type {error} is not known, so it cannot be rolled back") from error
    if not isinstance(getattr(cache, "layers", None), list):
        raise ValueError(f"a {type(cache).__name__} has no layers that could be rolled back")
    # exact types: a subclass may keep more than keys and values; a DummyLayer (shared keys) keeps nothing
    full = (cache_utils.DynamicLayer, getattr(cache_utils, "DummyLayer", None))
    bad: dict[str, list[int]] = {}
    for index, layer in enumerate(cache.layers):
        if type(layer) is cache_utils.DynamicSlidingWindowLayer:
            cache.layers[index] = cache_utils.DynamicLayer()
        elif type(layer) not in full:
            bad.setdefault(type(layer).__name__, []).append(index)
    if bad:
        kinds = "; ".join(f"{kind} in {_layers(indices)}" for kind, indices in bad.items())
        raise ValueError(f"its cache cannot be rolled back exactly: {kinds}")
    return cache


def refuse_inexact(model: Any) -> None:
    """Raise `ValueError`, naming the model and why, where rejected tokens could not be taken back exactly."""
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    parameters = inspect.signature(model.forward).parameters
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        raise ValueError(f"{name} cannot be a target: it has an encoder, only decoders are supported")
    if getattr(config, "is_decoder", True) is False:
        raise ValueError(f"{name} cannot be a target: is_decoder is false, so its tokens also see later ones")
    try:
        cache = exact_cache(model.config)
    except ValueError as error:
        raise ValueError(f"{name} cannot be a target: {error}") from error
    highest = max((int(module.layer_idx) for module in model.modules() if hasattr(module, "layer_idx")), default=0)
    if cache.layers and highest >= len(cache.layers):
        raise ValueError(f"{name} cannot be a target: layer {highest} has no place in a cache of {len(cache.layers)}")
    if getattr(model, "_is_stateful", False):
        raise ValueError(f"{name} cannot be a target: it has a recurrent state, which cannot be rolled back")
    if not any(argument in parameters for argument in CACHE_ARGUMENTS):
        raise ValueError(f"{name} cannot be a target: it takes no key/value cache, only {', '.join(parameters)}")


class HFTarget:
    """A transformers model behind the target protocol. The model is put into eval mode and frozen.

    Logits have the model's dtype, features are fp32. Rotary embeddings that change their frequencies past a length
    ("dynamic", "longrope") limit the context to that length: beyond it, cached keys would depend on what came later.
    """

    def __init__(self, model: Any, *, name: str | None = None) -> None:
        refuse_inexact(model)
        self.model = model.eval().requires_grad_(False)
        config = model.config.get_text_config(decoder=True)
        self.name = name or model.config.name_or_path or type(model).__name__
        self.num_layers, self.hidden_size = int(config.num_hidden_layers), int(config.hidden_size)
        self.vocab_size = int(config.vocab_size)
        self.max_context = context_limit(config)
        self.eos_ids = _eos_ids(model.generation_config, config, model.config)
        self.dtype, self.device = model.dtype, self.embedding().device
        parameters = inspect.signature(model.forward).parameters
        self.cache_argument = next(argument for argument in CACHE_ARGUMENTS if argument in parameters)
        self.keeps_logits = "logits_to_keep" in parameters
        # layers that reuse keys drop the rows whose logits are not asked for, so with taps all rows are asked for
        self.drops_rows = bool(getattr(config, "num_kv_shared_layers", 0))

    def session(self, *, capacity: int, taps: Taps | None = None) -> HFSession:
        """A fresh cache for one request of at most `capacity` tokens."""
        if not 1 <= capacity <= self.max_context:
            raise ValueError(f"{capacity} tokens do not fit {self.name}, which takes 1 to {self.max_context}")
        return HFSession(self, capacity, taps or Taps())

    def embedding(self) -> Tensor:
        """Token embedding table [V, D], the tensor itself."""
        return self.model.get_input_embeddings().weight

    def head(self) -> Tensor:
        """Output head [V, D], the tensor itself; `ValueError` where the head is more than one matrix."""
        layer = self.model.get_output_embeddings()
        if layer is None or getattr(layer, "bias", None) is not None:
            raise ValueError(f"the output head of {self.name} is not one matrix without bias")
        return layer.weight


class HFSession:
    """One request on a Hugging Face model."""

    def __init__(self, target: HFTarget, capacity: int, taps: Taps) -> None:
        taps.check(target.num_layers)
        self.target, self.capacity, self.taps = target, capacity, taps
        self._cache = exact_cache(target.model.config)
        self._length = 0

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return self._length

    @torch.inference_mode()
    def extend(self, token_ids: Sequence[int], *, logit_rows: int | None = None) -> TargetRows:
        """Feed tokens; see `TargetSession.extend`."""
        count = len(token_ids)
        wanted = count if logit_rows is None else logit_rows
        if count < 1 or not 0 <= wanted <= count:
            raise ValueError(f"cannot give {wanted} rows of logits for {count} tokens")
        if self._length + count > self.capacity:
            raise ValueError(f"{self._length} + {count} tokens do not fit a cache of {self.capacity}")
        ids_N = torch.tensor(token_ids, device=self.target.device)
        logits, tapped, last = [], [], []
        for at in range(0, count, PREFILL_ROWS):
            piece_N = ids_N[at : at + PREFILL_ROWS]
            keep = max(0, min(len(piece_N), wanted - (count - at - len(piece_N))))
            logits_JV, hidden = self._forward(piece_N, keep)
            logits.append(logits_JV)
            if self.taps.layers:
                tapped.append(torch.cat([self._rows(hidden[layer + 1]) for layer in self.taps.layers], -1))
            if self.taps.last_hidden:
                last.append(self._rows(hidden[-1]))
        features = None
        if self.taps:
            features = Features(
                tapped_NF=torch.cat(tapped) if tapped else None, last_ND=torch.cat(last) if last else None
            )
        return TargetRows(logits_JV=torch.cat(logits), features=features)

    def _rows(self, state_1ND: Tensor) -> Tensor:
        # layers may lie on several devices
        return state_1ND[0].to(self.target.device, torch.float32)

    def _forward(self, piece_N: Tensor, keep: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """(the last `keep` rows of logits, hidden states of all rows where tapped) of one pass."""
        target, rows = self.target, len(piece_N)
        options: dict[str, Any] = {target.cache_argument: self._cache, "use_cache": True}
        if self.taps:
            options["output_hidden_states"] = True
        if target.keeps_logits and not (self.taps and target.drops_rows):
            options["logits_to_keep"] = max(keep, 1)  # 0 would mean all
        out = target.model(input_ids=piece_N[None], **options)
        self._length += rows
        self._check_cache()
        if out.logits.shape[-1] != target.vocab_size:
            raise ValueError(f"{target.name} gave {out.logits.shape[-1]} logits for {target.vocab_size} tokens")
        logits_JV = out.logits[0, out.logits.shape[1] - keep :]
        if not self.taps:
            return logits_JV, ()
        hidden = out.hidden_states
        if len(hidden) != target.num_layers + 1 or any(state.shape[:2] != (1, rows) for state in hidden):
            raise ValueError(
                f"{target.name} gave hidden states of shape {[[*state.shape] for state in hidden]} "
                f"for {rows} tokens and {target.num_layers} layers"
            )
        return logits_JV, hidden

    def _check_cache(self) -> None:
        # a model that keeps its keys and values elsewhere would not forget what is rolled back
        held = {layer.keys.shape[-2] for layer in self._cache.layers if getattr(layer, "keys", None) is not None}
        if held != {self._length}:
            raise ValueError(
                f"the cache of {self.target.name} holds {sorted(held) or 'no'} positions after {self._length} tokens, "
                f"so it cannot be rolled back exactly"
            )

    def truncate(self, length: int) -> None:
        """Forget all tokens from `length` on."""
        if not 0 <= length <= self._length:
            raise ValueError(f"cannot roll a cache of {self._length} tokens back to {length}")
        if length < self._length:
            self._cache.crop(length - self._length)  # transformers 5.24 takes only a negative count
            self._length = length
            self._check_cache()


def context_limit(config: Any) -> int:
    """Tokens that a text config allows, and for which its rotary embedding keeps one set of frequencies."""
    limit = next((int(getattr(config, field)) for field in LIMIT_FIELDS if getattr(config, field, None)), NO_LIMIT)
    rotary = getattr(config, "rope_parameters", None) or {}
    entries = [rotary] if "rope_type" in rotary else [entry for entry in rotary.values() if isinstance(entry, Mapping)]
    for entry in entries:
        kind = str(entry.get("rope_type"))
        if "dynamic" in kind or kind == "longrope":
            limit = min(limit, int(entry.get("original_max_position_embeddings") or limit))
    return limit


def _eos_ids(*sources: Any) -> frozenset[int]:
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()


def _layers(indices: Sequence[int]) -> str:
    shown = ", ".join(map(str, indices[:4])) + (", ..." if len(indices) > 4 else "")
    return f"layer{'s' if len(indices) > 1 else ''} {shown}"
