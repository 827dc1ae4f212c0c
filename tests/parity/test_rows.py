"""The compiled row ops against the torch reference, off the block sizes, and row by row against themselves.

The reference multiplies in fp32 here (bf16 weights are widened first; where the CPU multiplies bf16 numbers, the
reference gets rounded rows too), so both sides do the same arithmetic in another order: the tolerance is that of fp32
sums of at most 1600 products.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dspec_lab.bench.products import WAYS, bench_products
from dspec_lab.kernels.native_rows import MANY_ROWS
from dspec_lab.kernels.rows import BLOCK, LayerCache, RowMarkers, TorchRows, native_status, row_ops

HEADS = (6, 2, 24)  # query heads, key/value heads, head width: not a multiple of 64
ROWS = [*range(1, 21), 64, 65, MANY_ROWS, MANY_ROWS + 1]

if not native_status()[0]:
    pytest.skip(f"the compiled row ops are not here: {native_status()[1]}", allow_module_level=True)

NATIVE, TORCH = row_ops("native"), TorchRows()


@pytest.fixture(autouse=True)
def nan_filled(monkeypatch):
    """What the ops allocate is NaN until they write it, work space included."""
    empty = torch.empty

    def filled(*size, **options):
        made = empty(*size, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", filled)
    monkeypatch.setattr(torch, "empty_like", lambda like: filled(like.shape, dtype=like.dtype))
    NATIVE._spaces.__dict__.clear()


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-6) -> None:
    assert got.shape == expected.shape
    torch.testing.assert_close(got, expected, rtol=0, atol=tolerance * max(1.0, float(expected.abs().max())))


def expected_product(x_NK: torch.Tensor, weight_OK: torch.Tensor, ops=None) -> torch.Tensor:
    if (ops or NATIVE).rounds and weight_OK.dtype == torch.bfloat16:
        x_NK = x_NK.bfloat16().float()
    return TORCH.linear(x_NK, weight_OK.float())


# the product


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("wide", "out"), [(7, 5), (8, 1), (43, 33), (576, 97), (1543, 7)])
def test_linear(dtype, wide, out):
    weight_OK = normal(out, wide, seed=1, dtype=dtype)
    for rows in ROWS:
        x_NK, residual_NO = normal(rows, wide, seed=rows), normal(rows, out, seed=rows + 100)
        expected = expected_product(x_NK, weight_OK)
        close(NATIVE.linear(x_NK, weight_OK), expected, 4e-6)
        close(NATIVE.linear(x_NK, weight_OK, residual_NO.clone()), expected + residual_NO, 4e-6)


def test_a_product_wider_than_the_unpacking_buffer():
    weight_OK, x_NK = normal(1536 * 2 + 5, 40, seed=1, dtype=torch.bfloat16), normal(MANY_ROWS + 6, 40)
    close(NATIVE.linear(x_NK, weight_OK), expected_product(x_NK, weight_OK))
    # the buffer, made under inference mode, must serve outside it too
    with torch.inference_mode():
        NATIVE._spaces.__dict__.clear()
        NATIVE.linear(x_NK, weight_OK)
    close(NATIVE.linear(x_NK, weight_OK), expected_product(x_NK, weight_OK))


# norm, gate, rotary embedding


@pytest.mark.parametrize("wide", [1, 8, 31, 576])
def test_rms_norm_and_silu(wide):
    weight_D = normal(wide, seed=1)
    for rows in (1, 2, 7, 20, 65):
        x_ND, gate_up_NM = 3 * normal(rows, wide, seed=rows), 6 * normal(rows, 2 * wide, seed=rows)
        close(NATIVE.rms_norm(x_ND, weight_D, 1e-6), TORCH.rms_norm(x_ND, weight_D, 1e-6))
        close(NATIVE.silu_mul(gate_up_NM), TORCH.silu_mul(gate_up_NM))


def test_silu_far_from_zero():
    gate = torch.tensor([-200.0, -100.0, -88.5, -87.0, -20.0, 0.0, 20.0, 87.0, 88.5, 200.0])
    gate_up_1M = torch.cat([gate, torch.ones(10)])[None]
    close(NATIVE.silu_mul(gate_up_1M), TORCH.silu_mul(gate_up_1M), 1e-6)


def places(owner: list[int], place: list[int], **other: list[int]) -> RowMarkers:
    """Markers of a chain, with fields replaced."""
    fields = {"owner": owner, "place": place, "first": [0] * len(place), "prefix": [at + 1 for at in place]}
    fields |= {"ancestors": [0] * len(place)} | other
    reach = max(p + int(a).bit_length() for p, a in zip(fields["prefix"], fields["ancestors"], strict=True))
    tensors = {name + "_N": torch.tensor(values) for name, values in fields.items()}
    return RowMarkers(**tensors, span=-(-reach // BLOCK) * BLOCK)


def caches(*capacities: int, filled: bool = True) -> LayerCache:
    _, kv, wide = HEADS
    keys = [normal(kv, wide, cap, seed=cap + i) for i, cap in enumerate(capacities)]
    values = [normal(kv, cap, wide, seed=2 * cap + i) for i, cap in enumerate(capacities)]
    if not filled:
        keys, values = [torch.zeros_like(k) for k in keys], [torch.zeros_like(v) for v in values]
    return LayerCache(keys, values)


def copies(cache: LayerCache) -> LayerCache:
    return LayerCache([k.clone() for k in cache.keys], [v.clone() for v in cache.values])


def qkv_rows(rows: int, seed: int = 0) -> torch.Tensor:
    return normal(rows, (HEADS[0] + 2 * HEADS[1]) * HEADS[2], seed=seed)


def test_rope_store_in_several_caches():
    markers = places([0, 2, 1, 2, 0], [31, 95, 0, 3, 5])
    cache, qkv = caches(32, 64, 96), qkv_rows(5)
    cos, sin = normal(5, HEADS[2] // 2, seed=1), normal(5, HEADS[2] // 2, seed=2)
    twin_cache, twin_qkv = copies(cache), qkv.clone()
    TORCH.rope_store(qkv, cos, sin, cache, markers, HEADS)
    NATIVE.rope_store(twin_qkv, cos, sin, twin_cache, markers, HEADS)
    split = (HEADS[0] + HEADS[1]) * HEADS[2]
    close(twin_qkv[:, :split], qkv[:, :split], 1e-6)
    for name in ("keys", "values"):
        for got, expected in zip(getattr(twin_cache, name), getattr(cache, name), strict=True):
            close(got, expected, 1e-6)


# attention

CHAIN = places([0] * 7, list(range(40, 47)))
WINDOW = places([0] * 7, list(range(40, 47)), first=[31, 32, 33, 40, 40, 0, 46])
# three requests, each a tree whose rows skip their siblings; request 1 has its nodes across a block border
TREE = places(
    [0, 0, 0, 1, 1, 1, 1, 2],
    [20, 21, 22, 30, 31, 32, 33, 0],
    prefix=[20, 20, 20, 30, 30, 30, 30, 0],
    ancestors=[0b1, 0b11, 0b101, 0b1, 0b11, 0b101, 0b1101, 0b1],
    first=[0, 0, 3, 0, 0, 0, 7, 0],
)
DEEP = places([0], [62], prefix=[0], ancestors=[1 << 62 | 1 << 40 | 1])
# the window ends behind the cached context: bits are seen all the same
NARROW = places([0, 0], [70, 71], prefix=[30, 30], first=[63, 64], ancestors=[1 << 40 | 1 << 5, 1 << 41 | 1])


@pytest.mark.parametrize(
    "markers",
    [CHAIN, WINDOW, TREE, DEEP, NARROW],
    ids=["chain", "window", "tree of three requests", "63 bits", "window shorter than the tree"],
)
def test_attention(markers):
    cache, qkv = caches(96, 64, 32), qkv_rows(len(markers.owner_N))
    close(NATIVE.attend(qkv, cache, markers, HEADS, 0.3), TORCH.attend(qkv, cache, markers, HEADS, 0.3))


@pytest.mark.parametrize("wide", [8, 16, 64, 72, 128])
def test_attention_head_widths(wide):
    heads, markers = (4, 4, wide), places([0] * 3, [33, 34, 35])
    cache = LayerCache([normal(4, wide, 64, seed=1)], [normal(4, 64, wide, seed=2)])
    qkv = normal(3, 12 * wide, seed=3)
    close(NATIVE.attend(qkv, cache, markers, heads, 0.2), TORCH.attend(qkv, cache, markers, heads, 0.2))


def test_attention_by_hand():
    """One head, three places of which a tree row sees the first and the last: softmax of two scores, written out."""
    heads, markers = (1, 1, 8), places([0], [2], prefix=[1], ancestors=[0b10])
    key, value = torch.zeros(1, 8, 32), torch.zeros(1, 32, 8)
    key[0, 0, :3] = torch.tensor([1.0, 50.0, 2.0])
    value[0, :3, 0] = torch.tensor([10.0, 1e9, 20.0])
    qkv = torch.zeros(1, 24)
    qkv[0, 0] = 1.0
    share = float(torch.sigmoid(torch.tensor(0.5)))  # e^1 against e^0.5
    for ops in (NATIVE, TORCH):
        out = ops.attend(qkv, LayerCache([key], [value]), markers, heads, 0.5)
        close(out[0, :1], torch.tensor([10 * (1 - share) + 20 * share]))


@pytest.mark.parametrize("ops", [NATIVE, TORCH], ids=["native", "torch"])
def test_unseen_places_may_hold_anything(ops):
    cache, qkv = caches(96, 64, 32), qkv_rows(len(TREE.owner_N))
    expected = ops.attend(qkv, cache, TREE, HEADS, 0.3)
    for request, first_unseen in ((0, 23), (1, 34), (2, 1)):
        cache.keys[request][:, :, first_unseen:] = float("nan")
        cache.values[request][:, first_unseen:] = float("nan")
    # place 21 is seen by its own row alone
    seen_by_one = [0, 2, 3, 4, 5, 6, 7]
    cache.keys[0][:, :, 21] = float("nan")
    cache.values[0][:, 21] = float("inf")
    got = ops.attend(qkv, cache, TREE, HEADS, 0.3)
    if ops is TORCH:  # the reference drops only what no row of the request sees
        seen_by_one = [3, 4, 5, 6, 7]
    assert torch.equal(got[seen_by_one], expected[seen_by_one])
    assert not torch.isfinite(got[1]).any()


# a number that is not finite is passed on, so that it can be noticed


@pytest.mark.parametrize("rows", [3, 65, MANY_ROWS + 1])
def test_nan_goes_through_the_product(rows):
    x_NK, weight_OK = normal(rows, 43), normal(9, 43, seed=1, dtype=torch.bfloat16)
    x_NK[1, 42] = float("nan")
    broken = torch.isnan(NATIVE.linear(x_NK, weight_OK)).all(-1)
    assert broken.tolist() == [row == 1 for row in range(rows)]
    weight_OK[3, 0] = float("nan")
    assert torch.isnan(NATIVE.linear(normal(rows, 43), weight_OK)).any(0).tolist() == [out == 3 for out in range(9)]


def test_nan_goes_through_norm_and_gate():
    x_ND = normal(3, 31)
    x_ND[1, 30] = float("nan")
    assert torch.isnan(NATIVE.rms_norm(x_ND, torch.ones(31), 1e-6)).all(-1).tolist() == [False, True, False]
    for column in (0, 12, 13, 25):  # gate and up, in a vector and in the rest
        gate_up_NM = normal(1, 26)
        gate_up_NM[0, column] = float("nan")
        assert torch.isnan(NATIVE.silu_mul(gate_up_NM))[0].nonzero().tolist() == [[column % 13]]


@pytest.mark.parametrize("where", ["query", "key", "value"])
def test_nan_goes_through_attention(where):
    cache, qkv = caches(96), qkv_rows(7)
    if where == "query":
        qkv[2, 5] = float("nan")  # head 0
        broken = [(2, 0)]
    elif where == "key":
        cache.keys[0][1, 3, 44] = float("nan")  # heads 3..5 of the rows that see place 44
        broken = [(row, head) for row in range(4, 7) for head in range(3, 6)]
    else:
        cache.values[0][0, 44, 3] = float("nan")
        broken = [(row, head) for row in range(4, 7) for head in range(3)]
    out = NATIVE.attend(qkv, cache, CHAIN, HEADS, 0.3).view(7, HEADS[0], HEADS[2])
    assert torch.isnan(out).any(-1).nonzero().tolist() == [list(pair) for pair in broken]


# markers and tensors that would lead out of memory are refused


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("owner_N", 2),
        ("owner_N", -1),
        ("first_N", -1),
        ("prefix_N", 65),
        ("prefix_N", 2**40),
        ("prefix_N", 0),  # sees nothing
        ("ancestors_N", 1 << 40),  # place 81 of 64
        ("span", 32),
    ],
)
def test_attention_refuses_markers_that_leave_the_cache(change, value):
    markers = places([0, 1, 0], [3, 40, 2])
    if change == "span":
        markers = RowMarkers(
            markers.owner_N, markers.place_N, markers.first_N, markers.prefix_N, markers.ancestors_N, value
        )
    else:
        getattr(markers, change)[1] = value
    with pytest.raises(ValueError, match="row 1 .*prefix"):
        NATIVE.attend(qkv_rows(3), caches(32, 64), markers, HEADS, 0.3)


def test_the_sign_bit_of_the_ancestors_is_not_a_place():
    zero_N = torch.zeros(1, dtype=torch.int64)
    markers = RowMarkers(zero_N, zero_N, zero_N, zero_N, torch.tensor([-(2**63)]), span=64)
    with pytest.raises(ValueError, match="row 0 sees nothing, or more"):
        NATIVE.attend(qkv_rows(1), caches(64), markers, HEADS, 0.3)


@pytest.mark.parametrize(("change", "value"), [("owner_N", 2), ("place_N", 64), ("place_N", -1)])
def test_storing_refuses_places_outside_the_cache(change, value):
    markers, cache = places([0, 1, 0], [3, 40, 2]), caches(32, 64)
    getattr(markers, change)[1] = value
    before = copies(cache)
    angles = torch.ones(3, HEADS[2] // 2)
    with pytest.raises(ValueError, match="row 1 has no place"):
        NATIVE.rope_store(qkv_rows(3), angles, angles, cache, markers, HEADS)
    assert all(torch.equal(a, b) for a, b in zip(cache.keys, before.keys, strict=True))


def test_a_capacity_off_the_block_is_refused():
    cache = LayerCache([normal(2, 24, 40)], [normal(2, 40, 24)])
    with pytest.raises(ValueError, match="capacities"):
        NATIVE.attend(qkv_rows(1), cache, places([0], [3]), HEADS, 0.3)


def test_tensors_of_the_wrong_kind_are_refused():
    good, weight = normal(2, 16), normal(4, 16)
    for x, w in ((good.half(), weight), (good, weight.half()), (good[:, :8].contiguous(), weight)):
        with pytest.raises(ValueError, match="native product"):
            NATIVE.linear(x, w)
    with pytest.raises(ValueError, match="contiguous"):
        NATIVE.linear(normal(16, 2).T, weight)
    with pytest.raises(ValueError, match="residual"):
        NATIVE.linear(good, weight, normal(2, 5))
    with pytest.raises(ValueError, match="native norm"):
        NATIVE.rms_norm(good, torch.ones(15), 1e-6)
    with pytest.raises(ValueError, match="do not fit rows"):
        NATIVE.attend(normal(1, 30), caches(32), places([0], [0]), (3, 1, 6), 0.3)
    with pytest.raises(ValueError, match="int64"):
        RowMarkers(*[torch.zeros(2)] * 5, span=32)
    with pytest.raises(ValueError, match="span"):
        RowMarkers(*[torch.zeros(2, dtype=torch.int64)] * 5, span=33)


# a row's result does not depend on its neighbours


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_of_a_product_are_batch_invariant(dtype):
    # 37 outputs: units of three or four weight rows at a time, and one row left over
    weight_OK, x_NK = normal(37, 149, seed=1, dtype=dtype), normal(MANY_ROWS, 149)
    residual_NO = normal(MANY_ROWS, 37, seed=3)
    each = range(MANY_ROWS)
    alone = torch.cat([NATIVE.linear(x_NK[n : n + 1], weight_OK) for n in each])
    added = torch.cat([NATIVE.linear(x_NK[n : n + 1], weight_OK, residual_NO[n : n + 1].clone()) for n in each])
    for rows in (*range(1, 66), 100, MANY_ROWS):
        assert torch.equal(NATIVE.linear(x_NK[:rows], weight_OK), alone[:rows]), rows
        assert torch.equal(NATIVE.linear(x_NK[:rows], weight_OK, residual_NO[:rows].clone()), added[:rows]), rows
    if NATIVE.products != "fp32, 8 lanes":
        # wider products have no limit
        many_NK = normal(3, MANY_ROWS, 149).flatten(0, 1)
        assert torch.equal(NATIVE.linear(many_NK, weight_OK)[:MANY_ROWS], NATIVE.linear(many_NK[:MANY_ROWS], weight_OK))


def test_rows_of_norm_gate_and_attention_are_batch_invariant():
    x_ND, weight_D, gate_up_NM = normal(64, 149), normal(149, seed=1), normal(64, 2 * 149, seed=2)
    markers = places([0] * 64, list(range(20, 84)), first=[max(0, at - 45) for at in range(20, 84)])
    cache, qkv = caches(96), qkv_rows(64)

    def some(rows: slice) -> tuple[torch.Tensor, ...]:
        fields = [f"{name}_N" for name in ("owner", "place", "first", "prefix", "ancestors")]
        part = replace(markers, **{field: getattr(markers, field)[rows] for field in fields})
        return (
            NATIVE.rms_norm(x_ND[rows], weight_D, 1e-6),
            NATIVE.silu_mul(gate_up_NM[rows]),
            NATIVE.attend(qkv[rows], cache, part, HEADS, 0.3),
        )

    alone = [torch.cat(parts) for parts in zip(*[some(slice(n, n + 1)) for n in range(64)], strict=True)]
    for rows in range(1, 65):
        for got, expected in zip(some(slice(0, rows)), alone, strict=True):
            assert torch.equal(got, expected[:rows]), rows


# this CPU runs one of the ways to multiply; the others, of older CPUs, are built for it here


@pytest.fixture(scope="module", params=list(WAYS))
def older(request, built_way):
    """The ops as an older CPU would have them, and as this one has."""
    return built_way(request.param)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_older_cpus_multiply_alike(older, dtype):
    for wide, out in ((576, 97), (149, 37), (7, 5)):
        weight_OK, x_NK = normal(out, wide, seed=1, dtype=dtype), normal(MANY_ROWS, wide)
        alone = torch.cat([older.linear(x_NK[n : n + 1], weight_OK) for n in range(MANY_ROWS)])
        close(alone, expected_product(x_NK, weight_OK, older), 4e-6)
        for rows in (*range(1, 27), 64, MANY_ROWS):
            assert torch.equal(older.linear(x_NK[:rows], weight_OK), alone[:rows]), rows
        many_NK = torch.cat([x_NK, x_NK[:3]])
        close(older.linear(many_NK, weight_OK), expected_product(many_NK, weight_OK, older), 4e-6)


def test_older_cpus_attend_and_gate_alike(older):
    cache, qkv = caches(96), qkv_rows(7)
    close(older.attend(qkv, cache, CHAIN, HEADS, 0.3), TORCH.attend(qkv, cache, CHAIN, HEADS, 0.3), 1e-5)
    gate_up_NM = normal(5, 62, seed=2)
    close(older.silu_mul(gate_up_NM), TORCH.silu_mul(gate_up_NM))


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_a_weight_row_of_odd_width_reads_nothing_of_the_next(older, rows):
    x_NK, weight_OK = normal(rows, 43), normal(40, 43, seed=1, dtype=torch.bfloat16)
    expected = older.linear(x_NK, weight_OK)
    weight_OK[1::2] = float("inf")
    assert torch.equal(older.linear(x_NK, weight_OK)[:, ::2], expected[:, ::2])


def test_torchs_own_products_of_bf16_are_left_as_they_were():
    """Both may use the CPU's tile registers, whose shapes are set for a thread."""
    a_NK, b_KO, weight_OK = normal(64, 576).bfloat16(), normal(576, 96).bfloat16(), normal(96, 576).bfloat16()
    expected = a_NK @ b_KO
    for rows in (1, 5, 40):
        NATIVE.linear(normal(rows, 576), weight_OK)
        assert torch.equal(a_NK @ b_KO, expected)


def test_the_ways_to_multiply_are_timed_by_turns():
    found = bench_products((1, 3), repeats=2, shapes=((2, 40, 24), (1, 9, 24)))
    assert set(found["ms"]) | {text.split(":")[0] for text in found["missing"]} == set(WAYS)
    for times in found["ms"].values():
        assert set(times) == {"1", "3"} and all(0 < row["least"] <= row["median"] for row in times.values())
    with pytest.raises(ValueError, match=r"rows of at least 1, got 1 and \[0\]"):
        bench_products((0,), repeats=1)


@pytest.mark.model
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_forward_of_the_default_model_is_batch_invariant(default_model_dir, dtype):
    from dspec_lab.models.decoder import LeanDecoder

    decoder = LeanDecoder.from_folder(default_model_dir, dtype=dtype, impl="native")
    tokens = torch.randint(0, decoder.vocab_size, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    session = decoder.session(capacity=64)
    alone_JV = torch.cat([session.extend([token]).logits_JV for token in tokens])
    for rows in (2, 3, 8, 9, 17, 33, 64):
        session.truncate(0)
        assert torch.equal(session.extend(tokens[:rows]).logits_JV, alone_JV[:rows]), rows
    session.truncate(40)
    assert torch.equal(session.extend(tokens[40:52]).logits_JV, alone_JV[40:52])
