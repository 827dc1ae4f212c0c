"""Block drafting on the compiled row ops: the rows of one request or of many in each product, marked by owner.

The same arithmetic as `BlockDraftModel`'s own torch code in another order, and every row as if it were alone: a request
gets its proposal bit for bit whoever drafts with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor

from dspec_lab.core.sampling import greedy_ids
from dspec_lab.drafters.cache import RowCache
from dspec_lab.drafters.heads import SequentialHead
from dspec_lab.drafters.layers import DraftLayer, linear
from dspec_lab.kernels.layer_stack import LayerStack, PlainLayer, fields
from dspec_lab.kernels.native_rows import NativeRows
from dspec_lab.kernels.rows import BLOCK, LayerCache, RowMarkers, joined_layers, row_ops
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
    stack = _stack(model, context_ND.shape[0])
    if stack is not None:
        _native().context_rows(stack, context_ND, (cos_NP, sin_NP), caches, markers)
        for cache, count in zip(caches, counts, strict=True):
            cache.advance(count)
        return
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
    stack = _stack(model, count * size)
    if stack is not None:
        spec = model.spec
        scale = spec.attention[FULL].score_scale
        _native().layer_rows(stack, x_ND, (cos_NP, sin_NP), caches, markers, scale, spec.norm_eps)
        return model.norm(x_ND).view(count, size, -1)
    joined = caches[0].layers if count == 1 else joined_layers(caches)
    for layer, held in zip(model.layers, joined, strict=True):
        x_ND = layer.finish(x_ND, _attended(layer, x_ND, cos_NP, sin_NP, held, markers))
    return model.norm(x_ND).view(count, size, -1)


def greedy_walk(
    model: BlockDraftModel, base_NW: Float[Tensor, "N W"], anchors: Sequence[int], counts: Sequence[int]
) -> tuple[list[int], Tensor | None] | None:
    """(target ids [N], embedded previous tokens [N, R]) of blocks that draft greedily; None where that is not for here.

    Rows lie slot by slot, the first `counts[k]` blocks at slot k; they get the sequential head's bias in place.
    """
    head = model.markov_head
    if type(head) not in (type(None), SequentialHead) or base_NW.dtype != torch.float32 or not rows_serve(model):
        return None
    ids_W = model.target_ids_W
    # the largest entry of a row without a finite one is looked for again, by what says which it is
    tables = None if head is None else (head.markov_w1.weight, head.markov_w2.weight)
    if tables is not None:
        dtypes = {table.dtype for table in tables}
        if dtypes not in ({torch.bfloat16}, {torch.float32}) or not all(table.is_contiguous() for table in tables):
            return None
    tokens, embedded_NR, bad = _native().greedy_walk(base_NW, counts, anchors, tables, ids_W)
    if bad is not None:
        greedy_ids(base_NW[bad : bad + 1], what="draft")
    return tokens, embedded_NR


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
    # one tensor for all: making one takes longer than a layer's smaller ops
    owner_N, place_N, first_N, prefix_N, none_N, position_N = torch.tensor(
        [owner, place, first, list(prefix), [0] * len(owner), position]
    )
    markers = RowMarkers(
        owner_N=owner_N,
        place_N=place_N,
        first_N=first_N,
        prefix_N=prefix_N,
        ancestors_N=none_N,
        span=-(-max(prefix) // BLOCK) * BLOCK,
    )
    cos_NP, sin_NP = model.rotary.halves(position_N, model.norm.weight)
    return markers, cos_NP, sin_NP


def _native() -> NativeRows:
    return row_ops("native")  # type: ignore[return-value]


# the layers of a model as one native call takes them; None where they are no plain layers
_STACKS: WeakKeyDictionary[BlockDraftModel, LayerStack | None] = WeakKeyDictionary()


def _stack(model: BlockDraftModel, rows: int) -> LayerStack | None:
    """The model's layers for one call over `rows` rows; None where the ops must run one by one."""
    most, layers = _native().most_rows, [_plain(layer) for layer in model.layers]
    if any(layer is None for layer in layers) or (most is not None and rows > most):
        return None
    plain = [layer for layer in layers if layer is not None]
    held = _STACKS.get(model)
    if held is None or held.moved(fields(plain)):
        shape = model.spec.attention[FULL]
        _STACKS.pop(model, None)  # it keeps alive what it reads
        held = LayerStack.of(plain, (shape.num_heads, shape.num_kv_heads, shape.head_dim))
        if held is not None:
            _STACKS[model] = held
    return held


def _plain(layer: DraftLayer) -> PlainLayer | None:
    """The layer's tensors as they are now; None where the family has more than a plain layer does."""
    # past the look-up of modules and parameters by attribute, which takes longer than the layers' smaller ops
    parts = layer._modules
    attention, mlp = parts["self_attn"], parts["mlp"]
    products = [
        attention._modules["qkv_proj"],
        attention._modules["o_proj"],
        mlp._modules["gate_up_proj"],
        mlp._modules["down_proj"],
    ]  # type: ignore[union-attr]
    if layer.sandwich or mlp.activation != "silu" or any(p._parameters["bias"] is not None for p in products):  # type: ignore[union-attr]
        return None
    if layer._buffers["layer_scalar"] is not None:
        return None
    norms = [parts[name]._parameters["weight"] for name in ("input_layernorm", "post_attention_layernorm")]  # type: ignore[union-attr]
    matrices = [product._parameters["weight"] for product in products]  # type: ignore[union-attr]
    if any(norm.dtype != torch.float32 for norm in norms) or len({matrix.dtype for matrix in matrices}) > 1:  # type: ignore[union-attr]
        return None
    return PlainLayer(*norms, *matrices)  # type: ignore[arg-type]
