"""Block drafting on the compiled row ops: the rows of one request or of many in each product, marked by owner.

The same arithmetic as `BlockDraftModel`'s own torch code in another order, and every row as if it were alone: a request
gets its proposal bit for bit whoever drafts with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from dspec_lab.drafters.cache import RowCache
from dspec_lab.drafters.layers import DraftLayer, linear
from dspec_lab.kernels.rows import BLOCK, LayerCache, RowMarkers, RowOps, joined_layers, row_ops
from dspec_lab.models.family import FULL

if TYPE_CHECKING:
    from dspec_lab.drafters.backbone import BlockDraftModel


def rows_serve(model: BlockDraftModel) -> bool:
    """Whether this model can draft on the compiled row ops: fp32 activations on a CPU, a family without head norms."""
    spec, weight = model.spec, model.fc.weight
    shape, family = spec.attention[FULL], spec.family
    return (
        weight.device.type == "cpu"
        and weight.dtype in (torch.bfloat16, torch.float32)
        and model.activation_dtype == torch.float32
        and not (family.qk_norm or family.value_norm or shape.keys_as_values or shape.head_dim % 8)
        and row_ops("auto").name == "native"
    )


@torch.inference_mode()
def append_rows(model: BlockDraftModel, caches: Sequence[RowCache], features: Sequence[Float[Tensor, "_ F"]]) -> None:
    """Add the keys and values of each request's newly committed tokens to its cache."""
    fresh: list[tuple[RowCache, Tensor]] = []
    for cache, features_NF in zip(caches, features, strict=True):
        unseen = cache.make_room(features_NF.shape[0])
        if unseen < features_NF.shape[0]:
            fresh.append((cache, features_NF[unseen:]))
    if not fresh:
        return
    caches, counts = [cache for cache, _ in fresh], [rows_NF.shape[0] for _, rows_NF in fresh]
    context_ND = model.context(torch.cat([rows_NF for _, rows_NF in fresh]) if len(fresh) > 1 else fresh[0][1])
    markers, cos_NP, sin_NP = _markers(model, caches, counts)
    joined = caches[0].layers if len(caches) == 1 else joined_layers(caches)
    for layer, held in zip(model.layers, joined, strict=True):
        projection = layer.self_attn.qkv_proj
        width, shape = layer.self_attn.query_width, layer.self_attn.shape
        bias_X = None if projection.bias is None else projection.bias[width:]
        kv_NX = linear(context_ND, projection.weight[width:], bias_X)
        _native().rope_store(kv_NX, cos_NP, sin_NP, held, markers, (0, shape.num_kv_heads, shape.head_dim))
    for cache, count in zip(caches, counts, strict=True):
        cache.advance(count)


@torch.inference_mode()
def block_rows(model: BlockDraftModel, caches: Sequence[RowCache], anchors: Sequence[int]) -> Float[Tensor, "R G D"]:
    """Normed hidden states of each request's block: its anchor at the context's length, then mask tokens.

    The caches are left as they were; the blocks' own keys and values are scratch.
    """
    size, count = model.arch.block_size, len(caches)
    ids_RG = torch.full((count, size), model.arch.mask_token_id)
    ids_RG[:, 0] = torch.tensor(anchors)
    x_ND = model.embed(ids_RG.flatten())
    markers, cos_NP, sin_NP = _markers(model, caches, [size] * count, whole=True)
    joined = caches[0].layers if count == 1 else joined_layers(caches)
    for layer, held in zip(model.layers, joined, strict=True):
        x_ND = layer.finish(x_ND, _attended(layer, x_ND, cos_NP, sin_NP, held, markers))
    return model.norm(x_ND).view(count, size, -1)


def _attended(
    layer: DraftLayer, x_ND: Tensor, cos_NP: Tensor, sin_NP: Tensor, held: LayerCache, markers: RowMarkers
) -> Tensor:
    shape, ops = layer.self_attn.shape, _native()
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
    qkv_NX = layer.self_attn.qkv_proj(layer.input_layernorm(x_ND))
    ops.rope_store(qkv_NX, cos_NP, sin_NP, held, markers, heads)
    return ops.attend(qkv_NX, held, markers, heads, shape.score_scale)


def _markers(
    model: BlockDraftModel, caches: Sequence[RowCache], counts: Sequence[int], *, whole: bool = False
) -> tuple[RowMarkers, Tensor, Tensor]:
    """(markers, cosines, sines) of each request's next `counts[r]` positions; `whole` rows see all of their block."""
    owner, place, first, prefix, position = [], [], [], [], []
    for request, (cache, count) in enumerate(zip(caches, counts, strict=True)):
        start = cache.place(0, count)
        owner += [request] * count
        place += range(start, start + count)
        first += [cache.first_seen] * count
        prefix += [start + count] * count if whole else range(start + 1, start + count + 1)
        position += range(cache.length, cache.length + count)
    place_N = torch.tensor(place)
    markers = RowMarkers(
        owner_N=torch.tensor(owner),
        place_N=place_N,
        first_N=torch.tensor(first),
        prefix_N=torch.tensor(prefix),
        ancestors_N=torch.zeros_like(place_N),
        span=-(-max(prefix) // BLOCK) * BLOCK,
    )
    cos_NP, sin_NP = model.rotary.halves(torch.tensor(position), model.norm.weight)
    return markers, cos_NP, sin_NP


def _native() -> RowOps:
    return row_ops("native")
