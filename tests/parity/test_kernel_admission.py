"""Top-K admission: kernel against torch twin, and the twin against a greedy choice one token at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dspec_lab.kernels import dispatch
from dspec_lab.kernels.faults import Fault, encode


def one_by_one(survival: list[list[float]], budget: int) -> list[int]:
    """Take the best next token `budget` times; ties go to the earlier request, then the earlier position."""
    taken = [0] * len(survival)
    for _ in range(budget):
        open_requests = [b for b, row in enumerate(survival) if taken[b] < len(row)]
        if not open_requests:
            break
        # a request offers its next token only, and an earlier token of the same survival goes before any later request
        best = max(open_requests, key=lambda b: (survival[b][taken[b]], -b))
        taken[best] += 1
    return taken


# few distinct values, so that ties within and across requests are the rule
chains = st.lists(st.lists(st.sampled_from([1.0, 0.75, 0.5, 0.0]), max_size=5), min_size=1, max_size=5)


@given(chains, st.integers(0, 30))
def test_twin_is_the_greedy_choice(conditional, budget):
    width = max(len(row) for row in conditional)
    survival = torch.ones(len(conditional), width)
    for b, row in enumerate(conditional):
        survival[b, : len(row)] = torch.tensor(row).cumprod(0)
        survival[b, len(row) :] = float("nan")
    lens = torch.tensor([len(row) for row in conditional])
    exact = [survival[b, : lens[b]].tolist() for b in range(len(conditional))]
    got = dispatch.admit_top_k(survival, lens, budget)
    assert got.tolist() == one_by_one(exact, budget)


@pytest.mark.parametrize("budget", [0, 1, 6, 11, 100])
def test_kernel_equals_torch(kernel_device, budget):
    from dspec_kernels.admission import admit_top_k as kernel

    steps = torch.tensor([1.0, 0.75, 0.5])
    choice = torch.randint(3, (5, 5), generator=torch.Generator().manual_seed(budget))
    survival = steps[choice].cumprod(-1)
    survival[0, 0] = survival[2, 0] = 1.0
    lens = torch.tensor([5, 0, 4, 5, 2])
    survival[2, 4], survival[1] = float("nan"), 7.0  # past the length: not there
    expected = dispatch.admit_top_k(survival, lens, budget)
    # 25 entries in blocks of 16
    admitted, fault = kernel(survival.to(kernel_device), lens.to(kernel_device), budget, block_n=16)
    assert admitted.tolist() == expected.tolist() and fault.tolist() == [0] * 5
    assert sum(expected.tolist()) == min(budget, 16)


def test_survival_that_rises_or_is_no_chance_is_refused(kernel_device):
    survival = torch.tensor(
        [[0.9, 0.5, 0.6], [0.9, float("nan"), 0.1], [1.1, 0.2, 0.1], [0.5, 0.2, -0.1], [0.5, 0.5, 0]]
    )
    lens = torch.tensor([3, 2, 3, 3, 4])
    want = [encode(2, Fault.SURVIVAL), encode(1, Fault.SURVIVAL), encode(0, Fault.SURVIVAL), encode(2, Fault.SURVIVAL)]
    want.append(encode(0, Fault.LENGTH))
    from dspec_kernels.admission import admit_top_k as kernel

    from dspec_lab.kernels.admission import admit_top_k as twin

    assert twin(survival, lens, 4).fault_B.tolist() == want
    assert kernel(survival.to(kernel_device), lens.to(kernel_device), 4)[1].tolist() == want
    with pytest.raises(ValueError, match=r"request 0, position 2: a survival .* got 0\.6"):
        dispatch.admit_top_k(survival, lens, 4)
    # no position at all: a length above 0 is out of range all the same
    for impl in ("torch", "triton"):
        none, three = torch.zeros(2, 0, device=kernel_device), torch.tensor([0, 3], device=kernel_device)
        with pytest.raises(ValueError, match="request 1, position 0: the number of drafts .* got 3"):
            dispatch.admit_top_k(none, three, 5, impl=impl)
        assert dispatch.admit_top_k(none, 0 * three, 5, impl=impl).tolist() == [0, 0]
    with pytest.raises(ValueError, match="budget must be 0 or more, got -1"):
        dispatch.admit_top_k(survival, lens, -1)
