"""All layers in one native call against the ops one by one, and the greedy walk against its slots: the same bits."""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from dspec_lab.bench.products import WAYS
from dspec_lab.core.sampling import NonFiniteLogitsError
from dspec_lab.drafters import block_rows
from dspec_lab.drafters.architecture import BlockArchitecture
from dspec_lab.drafters.backbone import BlockDraftModel
from dspec_lab.drafters.heads import SequentialHead
from dspec_lab.kernels.layer_stack import LayerStack, PlainLayer
from dspec_lab.kernels.rows import BLOCK, LayerCache, RowMarkers, joined_layers, native_pointers, native_status, row_ops
from dspec_lab.models.decoder import LeanDecoder
from dspec_lab.models.family import model_spec
from dspec_lab.models.protocol import Taps
from dspec_lab.verifier.ragged import extend_ragged
from dspec_lab.verifier.tiny import tiny_config, tiny_decoder

if not native_status()[0]:
    pytest.skip(f"the compiled row ops are not here: {native_status()[1]}", allow_module_level=True)

HEADS = (6, 2, 24)
HIDDEN, INNER, LAYERS = 40, 72, 3
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


@pytest.fixture(scope="module", params=["as built", *WAYS])
def ops(request, built_way):
    """The ops as this CPU has them, and as older ones would."""
    return row_ops("native") if request.param == "as built" else built_way(request.param)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def plain_layers(dtype: torch.dtype) -> list[PlainLayer]:
    heads, kv, wide = HEADS
    shapes = {"qkv": ((heads + 2 * kv) * wide, HIDDEN), "out": (HIDDEN, heads * wide), "gate_up": (2 * INNER, HIDDEN)}
    shapes["down"] = (HIDDEN, INNER)
    return [
        PlainLayer(
            norm_in=1 + normal(HIDDEN, seed=90 + n), norm_mid=1 + normal(HIDDEN, seed=80 + n),
            **{name: 0.2 * normal(*shape, seed=10 * n + i).to(dtype) for i, (name, shape) in enumerate(shapes.items())},
        )
        for n in range(LAYERS)
    ]  # fmt: skip


@dataclass
class Cache:
    """One request's keys and values with something in them."""

    layers: list[LayerCache]
    addresses_L2: np.ndarray | None

    @classmethod
    def of(cls, capacity: int, seed: int) -> Cache:
        _, kv, wide = HEADS
        pairs = [
            (normal(kv, wide, capacity, seed=seed + n), normal(kv, capacity, wide, seed=seed + n + 50))
            for n in range(LAYERS)
        ]
        held = [LayerCache([key], [value]) for key, value in pairs]
        held = [LayerCache(each.keys, each.values, native_pointers(each)) for each in held]
        return cls(held, np.array([(key.data_ptr(), value.data_ptr()) for key, value in pairs]))

    def contents(self) -> list[torch.Tensor]:
        return [tensor for layer in self.layers for tensor in (layer.keys[0], layer.values[0])]


def markers_of(owner: list[int], place: list[int]) -> RowMarkers:
    fields = [owner, place, [0] * len(owner), [at + 1 for at in place], [0] * len(owner)]
    return RowMarkers(*(torch.tensor(field) for field in fields), span=-(-(max(place) + 1) // BLOCK) * BLOCK)


def one_by_one(ops, layers, x_ND, angles, caches, markers, taps):
    """What `layer_rows` stands for: the ops, layer by layer, and copies of the tapped rows."""
    joined, tapped = joined_layers(caches), []
    for number, layer in enumerate(layers):
        qkv = ops.linear(ops.rms_norm(x_ND, layer.norm_in, 1e-5), layer.qkv)
        ops.rope_store(qkv, *angles, joined[number], markers, HEADS)
        x_ND = ops.linear(ops.attend(qkv, joined[number], markers, HEADS, 0.2), layer.out, x_ND)
        gate_up = ops.linear(ops.rms_norm(x_ND, layer.norm_mid, 1e-5), layer.gate_up)
        x_ND = ops.linear(ops.silu_mul(gate_up), layer.down, x_ND)
        if number in taps:
            tapped.append(x_ND.clone())
    return x_ND, torch.cat(tapped, -1)


@DTYPES
@pytest.mark.parametrize("rows", [1, 4, 9, 33])
def test_layers_in_one_call_give_the_bits_of_the_ops(ops, dtype, rows):
    layers, owners = plain_layers(dtype), 1 if rows == 1 else 3
    owner = [n % owners for n in range(rows)]
    place = [20 + n // owners for n in range(rows)]
    markers, x_ND = markers_of(owner, place), normal(rows, HIDDEN, seed=7)
    angles = normal(rows, HEADS[2] // 2, seed=8), normal(rows, HEADS[2] // 2, seed=9)
    mine, others = ([Cache.of(64 + 32 * n, seed=100 * n) for n in range(owners)] for _ in range(2))
    wanted_ND, wanted_NF = one_by_one(ops, layers, x_ND.clone(), angles, others, markers, (0, 2))
    tapped_NF = torch.full((rows, 2 * HIDDEN), float("nan"))
    ops.layer_rows(LayerStack(layers, HEADS), x_ND, angles, mine, markers, 0.2, 1e-5, tapped_NF, (0, 2))
    assert torch.equal(x_ND, wanted_ND) and torch.equal(tapped_NF, wanted_NF)
    for got, wanted in zip(mine, others, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got.contents(), wanted.contents(), strict=True))


@DTYPES
def test_context_in_one_call_gives_the_bits_of_the_ops(ops, dtype):
    layers, (heads, kv, wide) = plain_layers(dtype), HEADS
    markers, context_ND = markers_of([0, 1, 1, 0, 1], [3, 0, 1, 4, 2]), normal(5, HIDDEN, seed=3)
    angles = normal(5, wide // 2, seed=8), normal(5, wide // 2, seed=9)
    mine, others = ([Cache.of(64, seed=n) for n in range(2)] for _ in range(2))
    for layer, held in zip(layers, joined_layers(others), strict=True):
        ops.rope_store(ops.linear(context_ND, layer.qkv[heads * wide :]), *angles, held, markers, (0, kv, wide))
    ops.context_rows(LayerStack(layers, HEADS), context_ND, angles, mine, markers)
    before = [Cache.of(64, seed=n) for n in range(2)]
    for got, wanted, old in zip(mine, others, before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got.contents(), wanted.contents(), strict=True))
        assert not any(torch.equal(a, b) for a, b in zip(got.contents(), old.contents(), strict=True))


@pytest.mark.parametrize(("owner", "place"), [([0, 1], [3, 64]), ([0, 2], [3, 4]), ([0, -1], [3, 4])])
def test_bad_markers_are_refused_before_anything_is_written(owner, place):
    ops, stack = row_ops("native"), LayerStack(plain_layers(torch.float32), HEADS)
    caches, x_ND = [Cache.of(64, seed=n) for n in range(2)], normal(2, HIDDEN, seed=1)
    angles, before = (torch.ones(2, 12), torch.zeros(2, 12)), x_ND.clone()
    fields = [owner, place, [0, 0], [1, 1], [0, 0]]
    markers = RowMarkers(*(torch.tensor(field) for field in fields), span=96)
    with pytest.raises(ValueError, match="row 1"):
        ops.layer_rows(stack, x_ND, angles, caches, markers, 0.2, 1e-5)
    with pytest.raises(ValueError, match="row 1"):
        ops.context_rows(stack, x_ND, angles, caches, markers)
    assert torch.equal(x_ND, before)
    fresh = [tensor for n in range(2) for tensor in Cache.of(64, seed=n).contents()]
    assert all(
        torch.equal(a, b)
        for a, b in zip([tensor for cache in caches for tensor in cache.contents()], fresh, strict=True)
    )


def test_parts_that_do_not_fit_are_named():
    ops, layers = row_ops("native"), plain_layers(torch.float32)
    stack, markers = LayerStack(layers, HEADS), markers_of([0], [3])
    good = (torch.ones(1, 12), torch.zeros(1, 12))
    for x_ND, angles, cache, said in (
        (torch.zeros(2, HIDDEN), good, Cache.of(64, seed=0), "1 fp32 rows of 40"),
        (torch.zeros(1, HIDDEN).double(), good, Cache.of(64, seed=0), "fp32 rows"),
        (torch.zeros(1, HIDDEN), (torch.ones(1, 11), good[1]), Cache.of(64, seed=0), "cosines"),
        (torch.zeros(1, HIDDEN), good, Cache([], None), "3 layers"),
    ):
        with pytest.raises(ValueError, match=said):
            ops.layer_rows(stack, x_ND, angles, [cache], markers, 0.2, 1e-5)
    with pytest.raises(ValueError, match="2 tapped layers"):
        ops.layer_rows(stack, torch.zeros(1, HIDDEN), good, [Cache.of(64, seed=0)], markers, 0.2, 1e-5, None, (0, 1))
    mixed = [
        PlainLayer(**{**{n: getattr(layers[0], n) for n in PlainLayer.__slots__}, "down": layers[0].down.bfloat16()})
    ]
    with pytest.raises(ValueError, match="down of a layer"):
        LayerStack(mixed, HEADS)


@DTYPES
def test_a_large_pass_keeps_no_work_space(dtype, monkeypatch):
    """The work space of a pass over many rows would stay with its thread for ever."""
    monkeypatch.setattr("dspec_lab.kernels.native_rows.MOST_KEPT", 8000)
    ops, stack, caches = copy.copy(row_ops("native")), LayerStack(plain_layers(dtype), HEADS), [Cache.of(64, seed=0)]
    ops._spaces, found = threading.local(), []
    for rows in (8, 40):
        markers = markers_of([0] * rows, list(range(rows)))
        x_ND = normal(40, HIDDEN, seed=1)[:rows].clone()
        ops.layer_rows(stack, x_ND, (torch.ones(rows, 12), torch.zeros(rows, 12)), caches, markers, 0.2, 1e-5)
        found.append(x_ND[:8])
        assert ops._spaces.layers.numel() <= 8000
    assert torch.equal(*found)


# the decoder and the block drafter


def tiny(dtype: torch.dtype) -> LeanDecoder:
    decoder = tiny_decoder(41, seed=3)
    matrices = ("qkv", "out", "gate_up", "down")
    layers = tuple(
        replace(layer, **{name: getattr(layer, name).to(dtype) for name in matrices})
        for layer in decoder.weights.layers
    )
    held = decoder.weights
    weights = replace(held, embedding=held.embedding.to(dtype), head=held.head.to(dtype), layers=layers)
    return LeanDecoder(weights, decoder.spec, name=f"tiny {dtype}")


@DTYPES
def test_a_decoder_gives_the_same_bits_either_way(dtype, monkeypatch):
    decoder = tiny(dtype)

    def run() -> list[torch.Tensor]:
        sessions = [decoder.session(capacity=40, taps=Taps(layers=(-1, 0), last_hidden=True)) for _ in range(3)]
        rows = [session.extend([1 + n, 2, 3, 4 * n], logit_rows=2) for n, session in enumerate(sessions)]
        rows += extend_ragged(sessions, [[5, 6], [7], [8, 9, 10]])
        return [t for row in rows for t in (row.logits_JV, row.features.tapped_NF, row.features.last_ND)]

    assert decoder._stack() is not None
    once = run()
    monkeypatch.setattr(LeanDecoder, "_stack", lambda self: None)
    assert all(torch.equal(a, b) for a, b in zip(once, run(), strict=True))


def test_layers_that_are_not_plain_run_op_by_op():
    decoder = tiny(torch.float32)
    spec, weights = decoder.spec, decoder.weights
    family = spec.family
    first = replace(weights.layers[0], scalar=0.5)
    for other in (
        (weights, replace(spec, family=replace(family, qk_norm=True))),
        (weights, replace(spec, family=replace(family, value_norm=True))),
        (weights, replace(spec, activation="gelu_pytorch_tanh")),
        (replace(weights, layers=(first, *weights.layers[1:])), spec),
    ):
        assert LeanDecoder(*other, name="other")._stack() is None
    assert LeanDecoder(weights, spec, name="torch", impl="torch")._stack() is None
    assert LeanDecoder(weights, spec, name="same")._stack() is not None


def test_a_decoder_whose_weights_move_is_read_where_they_are():
    decoder = tiny(torch.float32)
    session = decoder.session(capacity=8)
    session.extend([1, 2], logit_rows=1)
    first, weight = decoder._stack(), decoder.weights.layers[1].down
    assert decoder._stack() is first
    # other numbers in other memory, behind the same tensor: until a request begins the old ones are read, and are there
    other = decoder.session(capacity=8)
    other.extend([1, 2], logit_rows=1)
    before = session.extend([3], logit_rows=1).logits_JV
    weight.data = weight.data * 2
    spoilt = torch.full((1 << 16,), float("nan"))  # what lay there might be given away
    assert torch.equal(other.extend([3], logit_rows=1).logits_JV, before) and spoilt.isnan().all()
    plain = LeanDecoder(decoder.weights, decoder.spec, name="torch", impl="torch")
    rows = [each.session(capacity=8).extend([1, 2, 3], logit_rows=1).logits_JV for each in (decoder, plain)]
    assert decoder._stack() is not first
    assert torch.allclose(*rows, atol=1e-4)


def test_weights_of_several_dtypes_or_in_pieces_run_op_by_op():
    decoder = tiny(torch.float32)
    first, *others = decoder.weights.layers
    mixed = replace(first, qkv=first.qkv.bfloat16(), out=first.out.bfloat16())
    other = LeanDecoder(replace(decoder.weights, layers=(mixed, *others)), decoder.spec, name="mixed")
    assert other._stack() is None
    assert torch.isfinite(other.session(capacity=8).extend([1, 2, 3], logit_rows=1).logits_JV).all()
    layers = plain_layers(torch.float32)
    assert LayerStack.of(layers, HEADS) is not None
    for name, part in (("down", layers[0].down.T.contiguous().T), ("out", layers[0].out.bfloat16())):
        swapped = PlainLayer(**{**{n: getattr(layers[0], n) for n in PlainLayer.__slots__}, name: part})
        assert LayerStack.of([swapped, *layers[1:]], HEADS) is None


def test_drafters_of_several_dtypes_draft_as_before():
    model, counts, anchors = walked_model(torch.float32), [2, 2], [4, 40]
    base_NW = normal(sum(counts), model.draft_vocab_size, seed=5)
    with torch.inference_mode():
        assert block_rows.greedy_walk(model, base_NW.clone(), anchors, counts) is not None
        head = model.markov_head
        head.markov_w2.weight.data = head.markov_w2.weight.data.bfloat16()
        assert block_rows.greedy_walk(model, base_NW.clone(), anchors, counts) is None
        head.markov_w2.weight.data = head.markov_w2.weight.data.float().T.contiguous().T
        assert block_rows.greedy_walk(model, base_NW.clone(), anchors, counts) is None
        for name in ("qkv_proj", "o_proj"):
            part = getattr(model.layers[0].self_attn, name)
            part.weight.data = part.weight.data.bfloat16()
        assert block_rows._stack(model, 4) is None


def test_drafters_in_a_dtype_that_no_native_call_takes_draft_as_before():
    model, counts, anchors = walked_model(torch.float32), [2, 2], [4, 40]
    base_NW, table_VD = normal(sum(counts), model.draft_vocab_size, seed=5), normal(41, 16, seed=6)
    model.share(embedding=lambda: table_VD)
    with torch.inference_mode():
        whole_RGD = block_rows.block_rows(model, [model.new_cache(8) for _ in anchors], anchors)
        head = model.markov_head
        for table in (head.markov_w1, head.markov_w2):
            table.weight.data = table.weight.data.half()
        assert block_rows.greedy_walk(model, base_NW.clone(), anchors, counts) is None
        for layer in model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            for part in (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj):
                part.weight.data = part.weight.data.half()
        assert block_rows._stack(model, 4) is None
        half_RGD = block_rows.block_rows(model, [model.new_cache(8) for _ in anchors], anchors)
    # fp16 has 11 bits
    torch.testing.assert_close(half_RGD, whole_RGD, atol=0.05, rtol=0.05)


def walked_model(dtype: torch.dtype, *, rank: int = 5, kept: int | None = 23) -> BlockDraftModel:
    arch = BlockArchitecture(
        spec=model_spec(tiny_config(41, 2)), target_hidden_size=16, num_target_layers=3, target_layer_ids=(0, 1),
        block_size=4, mask_token_id=0, markov_head_type="vanilla" if rank else None, markov_rank=rank,
        draft_vocab_size=kept,
    )  # fmt: skip
    model = BlockDraftModel(arch).eval()
    with torch.no_grad():
        for n, parameter in enumerate(model.parameters()):
            if parameter.dim() > 1:
                parameter.copy_(normal(*parameter.shape, seed=n))
    if kept is not None:
        model.keep_tokens(torch.randperm(41, generator=torch.Generator().manual_seed(1))[:kept].sort().values)
    model.cast_matrices(dtype)
    return model


@DTYPES
@pytest.mark.parametrize(("rank", "kept"), [(5, 23), (5, None), (0, 23)])
def test_the_greedy_walk_gives_the_bits_of_slot_by_slot(dtype, rank, kept):
    model = walked_model(dtype, rank=rank, kept=kept)
    counts, anchors = [3, 2, 2, 1], [4, 40, 0]
    base_NW = normal(sum(counts), model.draft_vocab_size, seed=5)
    with torch.inference_mode():
        found = block_rows.greedy_walk(model, (once_NW := base_NW.clone()), anchors, counts)
        assert found is not None
        tokens, embedded, previous, at = [], [], torch.tensor(anchors), 0
        for count in counts:
            rows_BW, previous = base_NW[at : at + count].clone(), previous[:count]
            if rank:
                e_BR = model.markov_head.embed(previous)
                rows_BW = model.markov_head.bias(e_BR).add_(rows_BW)
                embedded.append(e_BR)
            previous = model.to_target_ids(rows_BW.argmax(-1))
            tokens += previous.tolist()
            assert torch.equal(once_NW[at : at + count], rows_BW)
            at += count
    assert found[0] == tokens and len(set(tokens)) > 1
    assert torch.equal(found[1], torch.cat(embedded)) if rank else found[1] is None


def test_the_walk_takes_the_first_of_equals_and_refuses_what_is_not_finite():
    model = walked_model(torch.float32, rank=0, kept=None)
    base_NW = torch.zeros(3, 41)
    base_NW[1, [7, 30]], base_NW[2, 40] = 2.0, 1.0
    with torch.inference_mode():
        assert block_rows.greedy_walk(model, base_NW, [3], [1, 1, 1]) == ([0, 7, 40], None)
        for bad in (float("nan"), float("inf")):
            for place in (0, 5, 40):
                broken_NW = base_NW.clone()
                broken_NW[1, place] = bad
                with pytest.raises(NonFiniteLogitsError, match="draft"):
                    block_rows.greedy_walk(model, broken_NW, [3], [1, 1, 1])
        with pytest.raises(NonFiniteLogitsError):
            block_rows.greedy_walk(model, torch.full((1, 41), -float("inf")), [3], [1])
        # one entry of -inf is a token that cannot be drawn, and no fault
        assert block_rows.greedy_walk(model, base_NW.index_fill(1, torch.tensor([7]), -float("inf")), [3], [1, 1, 1])[0]


def test_the_walk_refuses_counts_and_tokens_that_do_not_fit():
    ops, logits_NW = row_ops("native"), torch.zeros(3, 23)
    head = torch.zeros(41, 5), torch.zeros(23, 5)
    for counts, anchors, said in (
        ([2, 2], [1, 1], "do not fit"),
        ([1, 2], [1], "may not rise"),
        ([3, 0], [1] * 3, "rise"),
    ):
        with pytest.raises(ValueError, match=said):
            ops.greedy_walk(logits_NW, counts, anchors, head)
    for anchor in (-1, 41):
        with pytest.raises(ValueError, match="leaves the table of 41 rows"):
            ops.greedy_walk(logits_NW, [1, 1, 1], [anchor], head)
    with pytest.raises(ValueError, match="do not fit"):
        ops.greedy_walk(logits_NW, [3], [1] * 3, (head[0], torch.zeros(22, 5)))


def test_a_drafter_whose_weights_move_is_read_where_they_are():
    model = walked_model(torch.float32)
    first = block_rows._stack(model, 4)
    assert first is block_rows._stack(model, 4) and not first.half
    model.cast_matrices(torch.bfloat16)
    assert block_rows._stack(model, 4).half
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    moved = block_rows._stack(model, 4)
    assert moved._lies_at[0] == model.layers[0].input_layernorm.weight.data_ptr() != first._lies_at[0]
    assert type(model.markov_head) is SequentialHead
