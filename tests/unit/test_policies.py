"""Policies against brute force, against the kernel's admission, on cliffs, with k = 0, and fast."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from dspec_lab.bench.scheduling import NAMES, bench_decisions
from dspec_lab.kernels.admission import admit_top_k
from dspec_lab.scheduler.admission import best_budget, early_stop_budget, falling, present, rates, top_k_lengths
from dspec_lab.scheduler.cost_table import CostTable
from dspec_lab.scheduler.policies import (
    Delayed,
    EarlyStop,
    FixedLength,
    FullBlock,
    Oracle,
    Retrospective,
    RoundView,
    StaticThreshold,
    policy_from_name,
)

LINE = CostTable(rows=(1, 64), seconds=(0.010, 0.040))


def random_view(rng, B, G, *, ties=False, ragged=True) -> RoundView:
    chances = rng.choice([0.25, 0.5, 1.0], (B, G)) if ties else rng.uniform(0, 1, (B, G))
    return RoundView(
        survival_BG=np.cumprod(chances, 1),
        lens_B=rng.integers(0, G + 1, B) if ragged else np.full(B, G),
        past_BG=np.cumprod(rng.uniform(0, 1, (B, G)), 1),
    )


def greedy_by_hand(view: RoundView, table: CostTable) -> list[int]:
    """Algorithm 1 as the paper writes it, one draft at a time."""
    order = sorted(
        ((r, j) for r in range(view.requests) for j in range(view.lens_B[r])),
        key=lambda rj: -np.float32(view.survival_BG[rj]),
    )
    tau, rows, lengths = float(view.requests), view.requests, [0] * view.requests
    best = tau / float(table.round_s_N(view.requests, 0)[0])
    for r, j in order:
        tau, rows = tau + float(np.float32(view.survival_BG[r, j])), rows + 1
        rate = tau / float(table.round_s_N(view.requests, rows - view.requests)[-1])
        if rate <= best:
            break
        best, lengths[r] = rate, j + 1
    return lengths


@pytest.mark.parametrize("seed", range(30))
def test_early_stop_is_algorithm_1(seed):
    rng = np.random.default_rng(seed)
    view = random_view(rng, int(rng.integers(1, 9)), int(rng.integers(1, 6)))
    jumps = rng.exponential(0.001, 48) * (rng.random(48) < 0.4)
    table = CostTable(rows=tuple(range(1, 49)), seconds=tuple((0.004 + jumps.cumsum()).tolist()))
    assert EarlyStop(table).lengths(view).tolist() == greedy_by_hand(view, table)


@pytest.mark.parametrize("seed", range(10))
def test_a_global_search_finds_the_best_of_all_sets_of_prefixes(seed):
    rng = np.random.default_rng(seed)
    view = random_view(rng, 3, 3)
    table = CostTable(rows=(1, 4, 5, 6, 12), seconds=(0.01, *np.sort(rng.uniform(0.01, 0.03, 4)).tolist()))

    def rate(lengths) -> float:
        tau = 3 + sum(np.float32(view.survival_BG[r, :n]).sum() for r, n in enumerate(lengths))
        return float(tau) / float(table.round_s_N(3, sum(lengths))[-1])

    best = max(rate(lengths) for lengths in itertools.product(*(range(n + 1) for n in view.lens_B)))
    assert rate(Retrospective(table).lengths(view).tolist()) == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("ties", [False, True])
def test_top_k_is_the_kernel_contract_to_the_last_tie(ties):
    rng = np.random.default_rng(5)
    for _ in range(40):
        view = random_view(rng, int(rng.integers(1, 7)), int(rng.integers(1, 6)), ties=ties)
        budget = int(rng.integers(0, view.survival_BG.size + 2))
        found = top_k_lengths(present(view.survival_BG, view.lens_B), budget)
        wanted = admit_top_k(
            torch.from_numpy(view.survival_BG).float(), torch.from_numpy(view.lens_B), budget
        ).num_admitted_B  # fmt: skip
        assert found.tolist() == wanted.tolist()


def test_every_policy_keeps_within_what_was_drafted_and_can_choose_nothing():
    rng = np.random.default_rng(0)
    dear = CostTable(rows=(1, 2, 64), seconds=(0.001, 10.0, 1000.0))
    for _ in range(10):
        view = random_view(rng, 5, 4)
        for policy in (EarlyStop(LINE), Delayed(LINE), FullBlock(), FixedLength(2), StaticThreshold(0.4)):
            lengths = policy.lengths(view)
            assert ((lengths >= 0) & (lengths <= view.lens_B)).all(), policy.name
        single = random_view(rng, 1, 4, ragged=False)
        for policy in (EarlyStop(dear), Delayed(dear), FixedLength(0), StaticThreshold(1.0)):
            assert policy.lengths(single).tolist() == [0], policy.name


def test_early_stop_halts_at_a_cliff_that_the_delayed_search_crosses():
    # 2 rows cost 1.9 times 1 row, 2 to 8 rows the same: the first draft does not pay, seven of them do
    table = CostTable(rows=(1, 2, 8), seconds=(0.010, 0.019, 0.0195))
    sure = np.full((1, 7), 0.95).cumprod(1)
    halved = sure * 0.9
    view = RoundView(survival_BG=halved, lens_B=np.array([7]), past_BG=halved)
    assert EarlyStop(table).lengths(view).tolist() == [0]
    assert Delayed(table).lengths(view).tolist() == [7]


def test_the_delayed_capacity_comes_from_the_past_and_the_ranking_from_now():
    now, past = np.array([[0.9, 0.8], [0.3, 0.2]]), np.array([[0.1, 0.05], [0.9, 0.85]])
    view = RoundView(survival_BG=now, lens_B=np.array([2, 2]), past_BG=past)
    policy = Delayed(CostTable(rows=(1, 4, 5, 6), seconds=(0.010, 0.012, 0.030, 0.050)))
    assert policy.capacity(view) == 2
    assert policy.lengths(view).tolist() == [2, 0]
    with pytest.raises(ValueError, match="two rounds ago"):
        policy.lengths(RoundView(survival_BG=now, lens_B=np.array([2, 2])))


def test_the_capacity_does_not_see_where_a_drafter_stopped_by_itself():
    past = np.full((1, 3), 0.9).cumprod(1)
    table = CostTable(rows=(1, 2, 4), seconds=(0.010, 0.0104, 0.012))
    capacities = {
        Delayed(table).capacity(RoundView(survival_BG=past, lens_B=np.array([n]), past_BG=past)) for n in range(4)
    }
    assert capacities == {3}


def test_threshold_on_survival_and_on_confidence():
    view = RoundView(survival_BG=np.array([[0.8, 0.64, 0.6]]), lens_B=np.array([3]))
    assert StaticThreshold(0.7).lengths(view).tolist() == [1]
    assert StaticThreshold(0.79, on="confidence").lengths(view).tolist() == [3]
    assert StaticThreshold(0.81, on="confidence").lengths(view).tolist() == [0]


def test_the_oracle_says_that_it_is_lossy_and_needs_to_be_told():
    view = RoundView(survival_BG=np.ones((2, 3)), lens_B=np.array([3, 1]), accepted_B=np.array([2, 3]))
    assert Oracle().lengths(view).tolist() == [2, 1] and not Oracle().lossless
    with pytest.raises(ValueError, match="oracle must be told"):
        Oracle().lengths(RoundView(survival_BG=np.ones((1, 1)), lens_B=np.array([1])))


def test_names_on_the_command_line():
    for name, shown in (("full", "full block"), ("mtp-3", "fixed-3"), ("fixed-0", "fixed-0"), ("delayed", "delayed")):
        assert policy_from_name(name, LINE).name == shown
    flat = CostTable(rows=(1, 64), seconds=(0.010, 0.010))
    for name, table, words in (
        ("best", LINE, "unknown policy 'best'"),
        ("threshold-x", LINE, "needs a number"),
        ("threshold-2", LINE, "needs a number in 0..1"),
        ("delayed", None, "needs a cost table"),
        ("early-stop", flat, "can trim nothing"),
        ("retrospective", LINE, "not lossless"),
        ("oracle", LINE, "not lossless"),
    ):
        with pytest.raises(ValueError, match=words):
            policy_from_name(name, table)
    assert not policy_from_name("oracle", None, lossy=True).lossless


def test_the_decision_benchmark_times_real_decisions():
    result = bench_decisions(64, 3, repeats=5)
    assert set(result["us"]) == set(NAMES)
    assert all(0 < times["min"] <= times["median"] <= times["max"] for times in result["us"].values())
    # all drafts for the full block, some for the policies that weigh them
    assert result["admitted"]["full"] == 64 * 3
    assert 0 < result["admitted"]["early-stop"] <= 64 * 3
    with pytest.raises(ValueError, match="requests, gamma >= 1"):
        bench_decisions(0)


@pytest.mark.parametrize("ties", [False, True])
def test_the_short_way_for_one_request_decides_as_the_search_does(ties):
    rng, cut = np.random.default_rng(8), set()
    for _ in range(300):
        rows = tuple(range(1, 9))
        table = CostTable(rows=rows, seconds=tuple(np.cumsum(rng.uniform(0.0, 0.01, 8)) + 0.01))
        view = random_view(rng, 1, 7, ties=ties)
        chances_BG = present(view.survival_BG, view.lens_B)
        falling_N = falling(chances_BG)
        found_N = rates(falling_N, 1, table.round_s_N(1, len(falling_N)))
        early = EarlyStop(table).lengths(view)
        assert early.tolist() == [early_stop_budget(found_N)] and early.dtype == np.int64
        past_N = falling(view.past_BG.astype(np.float32))
        capacity = best_budget(rates(past_N, 1, table.round_s_N(1, len(past_N))))
        assert Delayed(table).capacity(view) == capacity
        assert Delayed(table).lengths(view).tolist() == top_k_lengths(chances_BG, capacity).tolist()
        cut.add(int(early[0]))
    assert len(cut) > 4
