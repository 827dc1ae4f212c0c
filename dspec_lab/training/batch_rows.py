"""Row ops for many sequences side by side: one cache tensor a layer, one product for the attention of all.

torch's row ops go through the requests one by one. Here every request of a batch has one row in each pass, or the same
number of rows (right-padded prompts), so attention is a batched product without such a loop. The compiled row ops have
none either: where they are, they serve as they are, on slots that are caches of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dspec_lab.kernels.rows import BLOCK, LayerCache, RowMarkers, TorchRows, native_pointers, row_ops
from dspec_lab.models.decoder import LeanDecoder, SequenceCache
from dspec_lab.models.family import ModelSpec
from dspec_lab.models.protocol import Taps


@dataclass(frozen=True, slots=True)
class BatchLayer(LayerCache):
    """Keys and values of one layer for all slots of a batch; `keys` and `values` are views of them."""

    key_BKSE: Tensor | None = None
    value_BKSE: Tensor | None = None


def _batch_layer(cache: LayerCache) -> BatchLayer:
    if not isinstance(cache, BatchLayer):
        raise TypeError(f"the rows of a batch are kept in a BatchLayer, got {type(cache).__name__}")
    return cache


class BatchCache(SequenceCache):
    """A cache of `num_slots` sequences of at most `capacity` tokens. Lengths are the caller's business."""

    def __init__(self, spec: ModelSpec, num_slots: int, capacity: int, device: torch.device) -> None:
        self.capacity = -(-capacity // BLOCK) * BLOCK
        self.length = 0
        self.layers, self.addresses_L2 = [], None
        for layer in range(spec.num_layers):
            shape = spec.attention_of(layer)
            size = (num_slots, shape.num_kv_heads, self.capacity, shape.head_dim)
            key, value = torch.zeros(size, device=device), torch.zeros(size, device=device)
            self.layers.append(BatchLayer([key], [value], None, key, value))

    def move(self, source: int, place: int) -> None:
        """Copy the sequence in slot `source` to slot `place`."""
        for layer in self.layers:
            for tensor in (layer.keys[0], layer.values[0]):
                tensor[place] = tensor[source]


class SlotCache(SequenceCache):
    """The same for the compiled row ops: each slot has keys and values as they take them."""

    def __init__(self, spec: ModelSpec, num_slots: int, capacity: int) -> None:
        slots = [SequenceCache(spec, capacity, torch.device("cpu")) for _ in range(num_slots)]
        self.capacity, self.length = slots[0].capacity, 0
        self.layers, self.addresses_L2 = [], np.stack([slot.addresses_L2 for slot in slots], -1)
        for layer in range(spec.num_layers):
            held = [slot.layers[layer] for slot in slots]
            joined = LayerCache([each.keys[0] for each in held], [each.values[0] for each in held])
            self.layers.append(LayerCache(joined.keys, joined.values, native_pointers(joined)))

    def move(self, source: int, place: int) -> None:
        """Copy the sequence in slot `source` to slot `place`."""
        for layer in self.layers:
            for tensors in (layer.keys, layer.values):
                tensors[place].copy_(tensors[source])


class BatchRows(TorchRows):
    """Ops over rows that are `slots` x `rows_each`, slot by slot. `owner_N` holds slots; there are no trees."""

    name = "batch"

    def __init__(self) -> None:
        self.slots_X = torch.empty(0, dtype=torch.int64)  # slots of this pass, rising
        self.rows_each = 1

    def rope_store(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache, markers: RowMarkers, heads: tuple[int, int, int]
    ) -> None:
        num_heads, num_kv, width = heads
        rows = qkv.view(qkv.shape[0], num_heads + 2 * num_kv, width)
        turned = rows[:, : num_heads + num_kv]
        low, high = turned.chunk(2, dim=-1)
        c, s = cos[:, None], sin[:, None]
        turned.copy_(torch.cat((low * c - high * s, high * c + low * s), dim=-1))
        cache = _batch_layer(cache)
        cache.key_BKSE[markers.owner_N, :, markers.place_N] = rows[:, num_heads : num_heads + num_kv]
        cache.value_BKSE[markers.owner_N, :, markers.place_N] = rows[:, num_heads + num_kv :]

    def attend(
        self, qkv: Tensor, cache: LayerCache, markers: RowMarkers, heads: tuple[int, int, int], scale: float
    ) -> Tensor:
        num_heads, num_kv, width = heads
        count, each, span = len(self.slots_X), self.rows_each, markers.span
        cache = _batch_layer(cache)
        if count == cache.key_BKSE.shape[0]:
            key_XKSE, value_XKSE = cache.key_BKSE[:, :, :span], cache.value_BKSE[:, :, :span]
        elif int(self.slots_X[-1]) - int(self.slots_X[0]) + 1 == count:
            part = slice(int(self.slots_X[0]), int(self.slots_X[-1]) + 1)
            key_XKSE, value_XKSE = cache.key_BKSE[part, :, :span], cache.value_BKSE[part, :, :span]
        else:
            key_XKSE, value_XKSE = cache.key_BKSE[self.slots_X, :, :span], cache.value_BKSE[self.slots_X, :, :span]
        query = qkv.view(count, each, -1)[..., : num_heads * width].view(count, each, num_kv, -1, width)
        # query heads of a key head, and the rows of a slot, become rows of one product
        query = query.permute(0, 2, 3, 1, 4).reshape(count, num_kv, -1, width)
        scores = (query @ key_XKSE.transpose(-1, -2)).mul_(scale).view(count, num_kv, -1, each, span)
        place_S = torch.arange(span, device=qkv.device)
        seen = (place_S < markers.prefix_N[:, None]) & (place_S >= markers.first_N[:, None])
        scores.masked_fill_(~seen.view(count, 1, 1, each, span), float("-inf"))
        weights = torch.softmax(scores, dim=-1).flatten(2, 3)
        out = (weights @ value_XKSE).view(count, num_kv, -1, each, width)
        return out.permute(0, 3, 1, 2, 4).reshape(count * each, num_heads * width)


class BatchDecoder:
    """A target that advances a batch of sequences, each in its own slot."""

    def __init__(self, target: LeanDecoder, num_slots: int, capacity: int, taps: Taps | None = None) -> None:
        if capacity > target.max_context:
            raise ValueError(f"{capacity} tokens do not fit {target.name}, which takes {target.max_context}")
        self.decoder = LeanDecoder(
            target.weights, target.spec, name=target.name, eos_ids=tuple(target.eos_ids), impl="torch"
        )
        if num_slots < 1 or capacity < 1:
            raise ValueError(f"a batch cache needs slots and room, got {num_slots} slots of {capacity} tokens")
        native = row_ops("auto" if target.ops.name == "native" else "torch", target.device)
        self.ops = BatchRows() if native.name == "torch" else None
        self.decoder.ops = native if self.ops is None else self.ops
        self.cache: BatchCache | SlotCache = (
            SlotCache(target.spec, num_slots, capacity)
            if self.ops is None
            else BatchCache(target.spec, num_slots, capacity, target.device)
        )
        self.num_slots, self._taps = num_slots, taps or Taps()

    @torch.inference_mode()
    def prefill(self, slots_X: Tensor, ids_XT: Tensor) -> tuple[Tensor, Tensor | None]:
        """(hidden states [X, T, D], tapped ones [X, T, F] or None) of right-padded prompts, now in `slots_X` (rising).

        Hidden states are after the final norm. Rows of padding carry no meaning.
        """
        count, length = ids_XT.shape
        place_N = torch.arange(length, device=ids_XT.device).repeat(count)
        hidden_ND, tapped_NF = self._pass(ids_XT.flatten(), slots_X, length, place_N)
        shape = (count, length, -1)
        return hidden_ND.view(shape), None if tapped_NF is None else tapped_NF.view(shape)

    @torch.inference_mode()
    def step(self, slots_X: Tensor, ids_X: Tensor, place_X: Tensor) -> tuple[Tensor, Tensor | None]:
        """The same [X, D] and [X, F] after one more token in each of `slots_X` (rising), at positions `place_X`."""
        return self._pass(ids_X, slots_X, 1, place_X)

    def logits(self, hidden_XD: Tensor) -> Tensor:
        """Logits [X, V]."""
        return self.decoder.logits(hidden_XD)

    def _pass(self, ids_N: Tensor, slots_X: Tensor, rows_each: int, place_N: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.ops is not None:
            self.ops.slots_X, self.ops.rows_each = slots_X, rows_each
        zeros_N = torch.zeros_like(place_N)
        span = min(-(-(int(place_N.max()) + 1) // BLOCK) * BLOCK, self.cache.capacity)
        markers = RowMarkers(
            owner_N=slots_X.repeat_interleave(rows_each),
            place_N=place_N,
            first_N=zeros_N,
            prefix_N=place_N + 1,
            ancestors_N=zeros_N,
            span=span,
        )
        return self.decoder.run_rows(ids_N, place_N, [self.cache], markers, self._taps)
