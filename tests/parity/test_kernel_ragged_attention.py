"""Verification attention: kernel against torch twin, the twin against loops that walk the tree, and the markers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspec_lab.kernels import dispatch
from dspec_lab.kernels.markers import (
    ANCESTORS,
    FIRST,
    OWNER,
    PLACE,
    chain_markers,
    check_markers,
    from_row_markers,
    tree_markers,
    visible,
    with_filler,
)
from dspec_lab.kernels.ragged_attention import AttentionPlan, attention_plan, ragged_attention
from dspec_lab.kernels.rows import RowMarkers
from dspec_lab.kernels.rows import visible as rows_visible

TREES = [[0, 1, 1, 0, 2], [], [0, 1, 0]]
CONTEXTS = [70, 0, 33]
SLOTS = [41, 3, 4]  # not in the order of the requests, and not at the start of the pool


def make_plan(marker, slots, device="cpu", pool=125) -> AttentionPlan:
    return attention_plan(marker, torch.tensor(slots), pool_slots=pool, device=device)


def make_tensors(plan: AttentionPlan, heads: tuple[int, int, int], dtype: torch.dtype, pool: int = 125, seed: int = 0):
    """Query, keys and values; every slot that no marker reaches is NaN."""
    H, K, E = heads
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(len(plan.marker_NP), H, E, generator=generator)
    keys, values = (torch.randn(pool, K, E, generator=generator) for _ in range(2))
    reached = torch.zeros(pool, dtype=torch.bool)
    for b, (slot, start, count, end) in enumerate(
        zip(*(x.tolist() for x in (plan.slots_B, plan.starts_B, plan.counts_B, plan.ends_B)), strict=True)
    ):
        assert plan.marker_NP[start : start + count, OWNER].eq(b).all()
        reached[slot : slot + end] |= visible(plan.marker_NP[start : start + count].cpu(), end).any(0)
    keys[~reached], values[~reached] = float("nan"), float("nan")
    return query.to(dtype), keys.to(dtype), values.to(dtype)


def run_kernel(device: str, plan: AttentionPlan, tensors, split: int = 32):
    """The kernel with splits of 32 places, so that a context of 70 has three."""
    from dspec_kernels.ragged_attention import ragged_attention as kernel

    shapes = (plan.marker_NP, plan.slots_B, plan.starts_B, plan.counts_B, plan.ends_B)
    inputs = [x.to(device) for x in (*tensors, *shapes)]
    bounds = dict(max_rows=plan.max_rows, max_end=plan.max_end)
    return kernel(*inputs, scale=0.4, split=split, **bounds).cpu()


# fp32: sums of up to 80 terms in another order; 16 bit: the output is rounded once, by half a unit at size 2
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 2e-6), (torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)])
def test_kernel_equals_torch_on_trees(kernel_device, dtype, atol):
    marker, _ = tree_markers(TREES, CONTEXTS)
    marker[1, FIRST], marker[2, FIRST], marker[8, FIRST] = 66, 33, 30  # sliding windows of different rows
    # without the row of draft 4 nobody sees its place, and what lies there is NaN
    marker = with_filler(marker[[0, 1, 2, 3, 5, 6, 7, 8, 9, 10]], 12)
    plan = make_plan(marker, SLOTS)
    tensors = make_tensors(plan, (4, 2, 12), dtype)
    expected = ragged_attention(*tensors, plan, scale=0.4)
    torch.testing.assert_close(run_kernel(kernel_device, plan, tensors).float(), expected.float(), rtol=0, atol=atol)
    assert not expected.isnan().any() and bool((expected[-2:] == 0).all())


def test_kernel_equals_torch_on_chains_and_full_trees(kernel_device):
    """Three query heads a key/value head; 63 drafts, so the last bit counts and a request fills several tiles."""
    tree, _ = tree_markers([[draft // 2 for draft in range(63)]], [5])
    chain = chain_markers([2], [31])
    chain[:, OWNER] = 1
    plan = make_plan(torch.cat([tree, chain]), [0, 70])
    tensors = make_tensors(plan, (3, 1, 20), torch.float32)
    expected = ragged_attention(*tensors, plan, scale=0.4)
    got = run_kernel(kernel_device, plan, tensors, split=64)
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-6)


def test_dispatch_runs_the_kernel_with_its_own_split(kernel_device):
    plan = make_plan(tree_markers(TREES[1:], CONTEXTS[1:])[0], SLOTS[1:], kernel_device)
    tensors = [x.to(kernel_device) for x in make_tensors(plan, (2, 2, 8), torch.float32)]
    got = dispatch.ragged_attention(*tensors, plan, scale=0.4, impl="triton")
    torch.testing.assert_close(
        got, dispatch.ragged_attention(*tensors, plan, scale=0.4, impl="torch"), rtol=0, atol=2e-6
    )


# the interpreter's maximum of a row of NaN
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_a_request_does_not_feel_its_neighbours(kernel_device, impl):
    """The same bits alone and in a batch, even beside a request full of NaN."""

    def run(plan, tensors):
        return (
            run_kernel(kernel_device, plan, tensors)
            if impl == "triton"
            else ragged_attention(*tensors, plan, scale=0.4)
        )

    plan = make_plan(tree_markers(TREES, CONTEXTS)[0], SLOTS)
    query, keys, values = make_tensors(plan, (2, 1, 8), torch.float32)
    keys[SLOTS[2] : SLOTS[2] + 37], values[SLOTS[2] : SLOTS[2] + 37] = float("nan"), float("nan")
    together = run(plan, (query, keys, values))
    alone = run(make_plan(tree_markers(TREES[:1], CONTEXTS[:1])[0], SLOTS[:1]), (query[:6], keys, values))
    assert torch.equal(together[:6], alone)
    assert together[7:].isnan().all() and not together[:7].isnan().any()


def test_twin_follows_the_tree_in_float64():
    """Walk from each draft to the anchor by its parents; no bits, no masks."""
    plan = make_plan(tree_markers(TREES, CONTEXTS)[0], SLOTS)
    query, keys, values = make_tensors(plan, (4, 2, 12), torch.float32)
    got, row = ragged_attention(query, keys, values, plan, scale=0.4), 0
    for tree, context, slot in zip(TREES, CONTEXTS, SLOTS, strict=True):
        for draft in range(len(tree) + 1):
            seen, at = [], draft
            while at:
                seen.append(slot + context + at)
                at = tree[at - 1]
            seen += range(slot, slot + context + 1)
            for head in range(4):
                key, value = keys[seen, head // 2].double(), values[seen, head // 2].double()
                weight = torch.exp(0.4 * key @ query[row, head].double())
                expected = (weight / weight.sum()) @ value
                torch.testing.assert_close(got[row, head].double(), expected, rtol=0, atol=2e-6)
            row += 1
    assert row == len(got)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0, 0.999), max_size=63), st.integers(0, 5))
def test_tree_markers_name_exactly_the_path(fractions, context):
    parents = [int(fraction * draft) for draft, fraction in enumerate(fractions, start=1)]
    marker, positions = tree_markers([parents], [context])
    check_markers(marker, 1)
    seen = visible(marker, context + len(parents) + 1)
    for draft in range(len(parents) + 1):
        path, at = {context + draft}, draft
        while at:
            at = parents[at - 1]
            path.add(context + at)
        assert set(seen[draft].nonzero().flatten().tolist()) == path | set(range(context))
        assert int(positions[draft]) == context + len(path) - 1 == int(positions[0]) + len(path) - 1


def test_chain_is_the_tree_with_one_branch():
    chain, (tree, positions) = chain_markers([4, 0], [6, 2]), tree_markers([[0, 1, 2, 3], []], [6, 2])
    assert torch.equal(visible(chain[:5], 11), visible(tree[:5], 11))
    assert torch.equal(chain[:, PLACE], tree[:, PLACE]) and torch.equal(chain[:, PLACE], positions)


def test_the_rule_is_that_of_the_row_markers():
    marker, _ = tree_markers(TREES, CONTEXTS)
    marker[2, FIRST] = 40
    columns = [column.contiguous() for column in marker.unbind(1)]
    record = RowMarkers(*columns, span=96)
    assert torch.equal(from_row_markers(record), marker)
    seen = rows_visible(record, torch.arange(len(marker)))
    assert torch.equal(visible(marker, seen.shape[1]), seen)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        (OWNER, 7, "owners must ascend within 0..2, filler last; got 7"),
        (OWNER, -1, "owners must ascend"),
        (PLACE, 75, "the last place it sees must be its own, 75"),
        (FIRST, 71, "first and prefix must satisfy"),
        (ANCESTORS, -1, "ancestors must use bits 0..62 only"),
    ],
)
def test_broken_markers_are_refused(column, value, message):
    marker, _ = tree_markers(TREES, CONTEXTS)
    marker[3, column] = value
    with pytest.raises(ValueError, match=message):
        make_plan(marker, SLOTS)


def test_bad_trees_and_pools_are_refused():
    with pytest.raises(ValueError, match="request 0 has 64 drafts; a marker holds at most 63"):
        tree_markers([[0] * 64], [1])
    with pytest.raises(ValueError, match=r"the parent of draft 2 must lie in 0..1, got 2"):
        tree_markers([[0, 2]], [1])
    with pytest.raises(ValueError, match="request 1: the number of drafts must be 0 or more, got -1"):
        chain_markers([1, -1], [1, 1])
    with pytest.raises(ValueError, match="request 0: 76 places from slot 41 on leave the pool of 100 slots"):
        make_plan(tree_markers(TREES, CONTEXTS)[0], SLOTS, pool=100)
    with pytest.raises(ValueError, match="10 rows do not fit 9"):
        with_filler(chain_markers([9], [0]), 9)
    assert math.prod(with_filler(chain_markers([9], [0]), 10).shape) == 50
