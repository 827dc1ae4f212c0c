"""The optimal stopping rule against the search of all rules, and draft gating against the search of all choices."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dspec_lab.scheduler import gating
from dspec_lab.scheduler.bellman import ConfidenceChain, fit_chain, solve
from dspec_lab.scheduler.cost_table import CostTable, DraftCost
from dspec_lab.scheduler.gating import CAUTION, ProbePurse, asked_lengths, draft_lengths
from dspec_lab.scheduler.policies import Delayed, EarlyStop, FixedLength, RoundView, spared_share

CHAIN = ConfidenceChain(
    np.array([0.3, 0.9]), np.array([0.4, 0.6]), np.array([[[0.7, 0.3], [0.2, 0.8]], [[0.6, 0.4], [0.1, 0.9]]])
)
# dear to begin with, cheap afterwards: what pays is to go all the way, or not at all
CLIFF = np.array([0.010, 0.0195, 0.0198, 0.0201])


def chance(path: tuple[int, ...]) -> float:
    """Chance that the confidences are these values."""
    found = CHAIN.start_M[path[0]]
    for k in range(1, len(path)):
        found *= CHAIN.next_GMM[k - 1, path[k - 1], path[k]]
    return float(found)


def rate_of(length_of, round_s: np.ndarray) -> float:
    """Tokens per second of a rule path -> length, over all paths of confidences."""
    tokens = seconds = 0.0
    for path in itertools.product(range(2), repeat=3):
        length = length_of(path)
        survival = np.cumprod(CHAIN.values_M[list(path)])
        tokens += chance(path) * (1 + survival[:length].sum())
        seconds += chance(path) * round_s[length]
    return tokens / seconds


def best_of_all_rules(round_s: np.ndarray) -> float:
    """Every rule that goes on or not by the confidences seen so far: one flag for each beginning of a path."""
    nodes = [p for n in (1, 2, 3) for p in itertools.product(range(2), repeat=n)]
    best = 0.0
    for flags in itertools.product((False, True), repeat=len(nodes)):
        go = dict(zip(nodes, flags, strict=True))

        def length_of(path, go=go):
            return next((k for k in range(3) if not go[path[: k + 1]]), 3)

        best = max(best, rate_of(length_of, round_s))
    return best


def decisions(rule):
    def length_of(path):
        survival = np.cumprod(CHAIN.values_M[list(path)])[None]
        return int(rule.lengths(RoundView(survival_BG=survival, lens_B=np.array([3])))[0])

    return length_of


def test_the_bellman_rule_is_the_best_of_all_that_do_not_look_ahead():
    best = best_of_all_rules(CLIFF)
    rule = solve(CHAIN, CLIFF)
    assert rule.rate_tok_per_s == pytest.approx(best, rel=1e-4)
    assert rate_of(decisions(rule), CLIFF) == pytest.approx(best, rel=1e-9)


def test_it_goes_over_a_cliff_at_which_early_stopping_halts():
    table = CostTable(rows=(1, 2, 3, 4), seconds=tuple(CLIFF.tolist()))
    early = decisions(EarlyStop(table))
    assert [early((1, 1, 1)), early((0, 0, 0))] == [0, 0]
    rule = decisions(solve(CHAIN, CLIFF))
    assert [rule((1, 1, 1)), rule((0, 0, 0))] == [3, 0]
    assert rate_of(rule, CLIFF) > 1.01 * rate_of(early, CLIFF)


def test_a_batch_is_refused():
    with pytest.raises(ValueError, match="one request, got a batch of 2"):
        solve(CHAIN, CLIFF).lengths(RoundView(survival_BG=np.ones((2, 3)), lens_B=np.array([3, 3])))


def test_a_chain_is_found_again_in_what_it_made():
    rng = np.random.default_rng(0)
    paths = []
    for _ in range(3000):
        path = [rng.choice(2, p=CHAIN.start_M)]
        for k in range(2):
            path.append(rng.choice(2, p=CHAIN.next_GMM[k, path[-1]]))
        paths.append(CHAIN.values_M[path].tolist())
    found = fit_chain(paths, 3, values=2)
    np.testing.assert_allclose(found.values_M, CHAIN.values_M, atol=1e-12)
    np.testing.assert_allclose(found.next_GMM, CHAIN.next_GMM, atol=0.05)
    with pytest.raises(ValueError, match="no round reaches position 3"):
        fit_chain([[0.5, 0.5]], 3)


def expected_rate(lengths: tuple[int, ...], predicted: np.ndarray, table: CostTable) -> float:
    tokens = len(lengths) + sum(predicted[r, :n].sum() for r, n in enumerate(lengths))
    drafting = [n for n in lengths if n]
    draft_s = table.draft.seconds(len(drafting), sum(drafting))
    return float(tokens / table.round_s_N(len(lengths), sum(lengths), draft_s=draft_s)[-1])


@pytest.mark.parametrize("seed", range(6))
def test_gating_comes_close_to_the_best_choice_and_never_below_no_drafts(seed):
    rng = np.random.default_rng(seed)
    predicted = np.cumprod(rng.uniform(0.2, 0.98, (3, 3)), 1)
    draft = DraftCost(
        fixed_s=0.001, per_request_s=float(rng.uniform(0, 0.006)), per_token_s=float(rng.uniform(0, 0.002))
    )
    table = CostTable(rows=(1, 16), seconds=(0.010, 0.030), draft=draft)
    best = max(expected_rate(n, predicted, table) for n in itertools.product(range(4), repeat=3))
    nothing = expected_rate((0, 0, 0), predicted, table)
    for caution, share in ((1.0, 0.97), (CAUTION, 0.9)):
        found = expected_rate(tuple(draft_lengths(predicted, table, caution=caution).tolist()), predicted, table)
        assert found >= share * best and found >= nothing


@pytest.mark.parametrize("per_token_s", [0.0, 0.0005, 0.002])
def test_the_short_way_for_one_request_finds_what_the_long_one_does(per_token_s):
    rng, found = np.random.default_rng(3), []
    for _ in range(300):
        predicted = np.cumprod(rng.uniform(0.1, 0.99, (1, 5)), 1)
        draft = DraftCost(joint=True, per_request_s=float(rng.uniform(0, 0.01)), per_token_s=per_token_s)
        table = CostTable(rows=(1, 3, 6), seconds=(0.010, 0.011, 0.020), context_tokens=64, context_s=1e-6, draft=draft)
        context, spared = float(rng.choice([30, 200])), float(rng.choice([0.0, 0.5]))
        found.append(int(gating._for_one(predicted[0], table, context, spared)[0]))
        assert found[-1] == gating._for_many(predicted, table, context, spared)[0]
    # drafts that cost nothing each come all or not at all
    assert 0 in found and max(found) > 2 and (per_token_s == 0) == (set(found) == {0, 5})


def test_where_drafting_just_pays_a_cautious_gate_drafts_nothing():
    """A gain of a tenth on paper is less than the requests that look best fall short of it by."""
    predicted = np.array([[0.5, 0.1], [0.4, 0.1]])
    table = CostTable(rows=(1, 8), seconds=(0.010, 0.0135), draft=DraftCost(joint=True, per_request_s=0.0020))
    sure = draft_lengths(predicted, table, caution=1.0)
    assert sure.any() and not draft_lengths(predicted, table).any()
    rates = [expected_rate(tuple(lengths), predicted, table) for lengths in (sure.tolist(), (0, 0))]
    assert 1 < rates[0] / rates[1] < 1.1
    # where it pays well it drafts
    assert draft_lengths(np.array([[0.9, 0.8], [0.9, 0.7]]), table).tolist() == [2, 2]


def test_more_is_drafted_where_the_policy_will_leave_some_unverified():
    """Drafts are cheap and rows are dear: the last drafts pay only if those that look bad can be left out."""
    predicted = np.cumprod(np.full((1, 5), 0.6), 1)
    table = CostTable(rows=(1, 6), seconds=(0.010, 0.020), draft=DraftCost(joint=True, per_token_s=0.0001))
    blind, seeing = (int(draft_lengths(predicted, table, spared=spared)[0]) for spared in (0.0, 0.5))
    assert 0 < blind < seeing <= 5
    # with all rejections spared a draft costs its own time and the rows of those that are kept
    gained = 1 + CAUTION * predicted[0].cumsum()
    rates = gained / (0.010 + 0.002 * (gained - 1) + 0.0001 * np.arange(1, 6))
    assert int(draft_lengths(predicted, table, spared=1.0)[0]) == 1 + int(rates.argmax())
    # two requests share the saving, and rows beyond the table's end stay out of reach
    assert draft_lengths(np.repeat(predicted, 2, 0), table, spared=1.0).sum() <= 4
    with pytest.raises(ValueError, match="1.5"):
        draft_lengths(predicted, table, spared=1.5)


def test_no_more_is_asked_for_than_a_policy_that_halts_at_a_step_will_verify():
    hoped = np.cumprod(np.full((4, 3), 0.9), 1)
    draft = DraftCost(joint=True, per_request_s=0.0005, per_token_s=0.0001)
    # the row after the eighth costs as much as four of them, those behind it nearly nothing
    step = CostTable(rows=(4, 8, 9, 16), seconds=(0.010, 0.0105, 0.0180, 0.0181), draft=draft)
    assert draft_lengths(hoped, step).tolist() == [3, 3, 3, 3]
    assert asked_lengths(Delayed(step), hoped, step).tolist() == [3, 3, 3, 3]
    assert asked_lengths(EarlyStop(step), hoped, step).tolist() == [1, 1, 1, 1]
    # and where the very first row is behind the step nothing is drafted
    steep = CostTable(rows=(4, 5, 16), seconds=(0.010, 0.0180, 0.0181), draft=draft)
    assert asked_lengths(Delayed(steep), hoped, steep).any()
    assert not asked_lengths(EarlyStop(steep), hoped, steep).any()


def test_what_the_policy_would_verify_must_pay_for_its_drafting():
    hoped = np.cumprod(np.full((4, 3), 0.9), 1)
    draft = DraftCost(joint=True, per_request_s=0.002125, per_token_s=0.0001)
    step = CostTable(rows=(4, 8, 9, 16), seconds=(0.010, 0.0105, 0.0140, 0.0141), draft=draft)
    # whole blocks pay for drafting, the four drafts before the step do not
    assert draft_lengths(hoped, step).all() and expected_rate((1, 1, 1, 1), hoped, step) < 4 / 0.010
    assert not asked_lengths(EarlyStop(step), hoped, step).any()


def test_without_confidences_nothing_is_spared():
    predicted = np.cumprod(np.full((1, 5), 0.6), 1)
    table = CostTable(rows=(1, 6), seconds=(0.010, 0.020), draft=DraftCost(joint=True, per_token_s=0.0001))
    told, untold = (asked_lengths(EarlyStop(table), predicted, table, told=told).tolist() for told in (True, False))
    assert untold == draft_lengths(predicted, table).tolist() != told


def test_rows_beyond_the_tables_end_cost_no_number():
    table = CostTable(rows=(1, 2), seconds=(0.010, 0.011), draft=DraftCost(per_token_s=0.0001))
    round_s_N = table.round_s_N(2, 4)
    found = gating._expected_s(round_s_N, np.array([0.0, 0.9]), np.array([0, 1]), 0.5)
    assert found.tolist() == [0.011, np.inf]


def test_early_stopping_spares_and_a_delayed_capacity_does_where_requests_compete():
    table = CostTable(rows=(1, 6), seconds=(0.010, 0.020))
    shares = [spared_share(policy, requests) for policy in (EarlyStop(table), Delayed(table)) for requests in (1, 8)]
    assert shares[0] == shares[1] > shares[3] > shares[2] == 0
    assert spared_share(FixedLength(3), 8) == 0


def test_block_drafters_draft_whole_blocks():
    predicted = np.array([[0.9, 0.8, 0.1], [0.05, 0.01, 0.0]])
    table = CostTable(rows=(1, 16), seconds=(0.010, 0.030), draft=DraftCost(per_request_s=0.002))
    assert draft_lengths(predicted, table).tolist() == [3, 0]
    dear = CostTable(rows=(1, 16), seconds=(0.010, 0.030), draft=DraftCost(per_request_s=0.1))
    assert draft_lengths(predicted, dear).tolist() == [0, 0]


JOINT = DraftCost(joint=True, request_probes=(1, 4), request_s=(0.012, 0.015))


def test_a_joint_pass_pays_in_a_batch_where_a_pass_for_each_does_not():
    predicted = np.tile([0.9, 0.8, 0.1], (4, 1))
    table = CostTable(rows=(1, 16), seconds=(0.0100, 0.0115), draft=JOINT)
    alone = table.with_draft(DraftCost(per_request_s=0.012))
    for priced, of_four in ((table, [3] * 4), (alone, [0] * 4)):
        assert draft_lengths(predicted[:1], priced, caution=1.0).tolist() == [3]
        assert draft_lengths(predicted, priced, caution=1.0).tolist() == of_four


def test_a_probe_beside_others_costs_what_it_adds_to_their_pass():
    table = CostTable(rows=(1, 16), seconds=(0.010, 0.025), draft=JOINT)
    skipped, room = np.array([0.0, 0.0, np.inf]), np.full(3, 3)
    counts = {}
    for name, wanted in (("alone", [0, 0, 0]), ("beside", [3, 3, 0])):
        purse = ProbePurse(0.02)
        found = [purse.add(np.array(wanted), skipped, room, table) for _ in range(400)]
        counts[name] = sum(int(lengths.sum()) - sum(wanted) for lengths in found)
    spent = 400 * 0.02 * float(table.round_s_N(3, 0)[0])
    assert counts["alone"] == pytest.approx(spent / (0.012 + 0.001), rel=0.1)
    assert counts["beside"] == pytest.approx(spent / (0.001 + 0.001), rel=0.1)


@pytest.mark.parametrize("draft_s", [0.001, 0.050])
def test_probes_take_their_share_of_the_time_whatever_they_cost(draft_s):
    table = CostTable(rows=(1, 16), seconds=(0.010, 0.025), draft=DraftCost(per_request_s=draft_s))
    purse, skipped = ProbePurse(0.02), np.array([np.inf, np.inf, 5.0])
    none, room, met, spent = np.zeros(3, dtype=np.int64), np.array([3, 3, 0]), [], 0.0
    for _ in range(2000):
        found = purse.add(none, skipped, room, table)
        assert found.sum() <= 1
        skipped = np.where(found > 0, 0, skipped + 1)
        met += np.flatnonzero(found).tolist()
        spent += found.sum() * (draft_s + 0.001)
    rounds_s = 2000 * float(table.round_s_N(3, 0)[0])
    assert spent == pytest.approx(0.02 * rounds_s, rel=0.1)
    # those that may draft take turns, and one without room never does
    assert met == [i % 2 for i in range(len(met))]
    assert purse.add(room, skipped, room, table) is room, "who drafts anyway is no probe"
