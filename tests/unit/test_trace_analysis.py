"""Entropy bins, position decay and the threshold sweep against counts made by hand and known laws."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dspec_lab.calibration.drafters import kept_length
from dspec_lab.calibration.records import rounds_of_rows
from dspec_lab.calibration.synthetic import synthetic_rounds
from dspec_lab.evaluation.decay import autocorrelation, decay_rows
from dspec_lab.evaluation.entropy import around, entropy_bins, entropy_bits, rank_correlation
from dspec_lab.evaluation.thresholds import (
    RoundCost,
    best_threshold,
    kept_lengths,
    recorded_cost,
    threshold_sweep,
)
from dspec_lab.scheduler.cost_table import CostTable
from dspec_lab.serving.presets import recorded_cpu_table


def trace_row(confidence, num_accepted, *, entropy=None, prompt="p/0", domain="math", accept_prob=None):
    gamma = len(confidence)
    return {
        "prompt_id": prompt, "domain": domain, "drafter": "d", "temperature": 1.0, "gamma": gamma,
        "num_accepted": num_accepted, "confidence": confidence, "accept_prob": accept_prob or [0.5] * gamma,
        "target_entropy_bits": entropy or [1.0] * gamma, "draft_entropy_bits": [2.0] * gamma,
        "draft_s": 0.01, "verify_s": 0.04, "overhead_s": 0.002,
    }  # fmt: skip


ROUNDS = rounds_of_rows(
    [
        trace_row([0.9, 0.8, 0.5], 3, entropy=[0.1, 0.2, 0.3]),
        trace_row([0.9, 0.3, 0.9], 1, entropy=[0.1, 3.0, 9.0], prompt="p/1"),
        trace_row([0.4, 0.9, 0.9], 0, entropy=[4.0, 9.0, 9.0], prompt="p/2"),
    ]
)


# entropy


def test_the_worked_example():
    assert entropy_bits([0.9, 0.1]) == pytest.approx(0.469, abs=5e-4)
    assert entropy_bits([0.1] * 10) == pytest.approx(3.3219, abs=5e-5)
    assert entropy_bits([1.0, 0.0]) == 0.0
    with pytest.raises(ValueError, match="sum to 1"):
        entropy_bits([0.5, 0.4])


def test_only_drafts_that_the_verifier_reached_are_counted():
    low, high = entropy_bins(ROUNDS, bins=2)
    # reached: 0.1 0.2 0.3 (kept), 0.1 (kept), 3.0 (not), 4.0 (not); the three of 9.0 lie behind a rejection
    assert low.cases + high.cases == 6 and high.high < 5
    assert (low.accepted, high.accepted) == (1.0, pytest.approx(1 / 3))
    assert low.accept_prob == 0.5


def test_the_bins_of_a_known_law_hold_it():
    rounds = synthetic_rounds(6000, (1.0,) * 4, seed=1)
    # entropy falls as the chance rises
    rounds = replace(rounds, target_entropy_IG=5 * (1 - rounds.accept_prob_IG))
    found = entropy_bins(rounds, bins=6)
    assert len(found) == 6
    for row in found:
        assert row.accepted == pytest.approx(row.accept_prob, abs=0.04)
        assert row.accepted_low <= row.accepted <= row.accepted_high
    assert all(a.accepted > b.accepted for a, b in zip(found, found[1:], strict=False))
    assert rank_correlation(rounds) == pytest.approx(-1)
    near = around(rounds, 2.5, width=0.2)
    assert near.accepted == pytest.approx(0.5, abs=0.08) and near.low == pytest.approx(2.4)
    assert around(rounds, 50.0) is None


def test_a_trace_without_entropies_is_refused():
    rounds = synthetic_rounds(50, (1.0,))
    with pytest.raises(ValueError, match="does not hold the target's entropy"):
        entropy_bins(rounds)
    with pytest.raises(ValueError, match="at least 1 bin, got 0"):
        entropy_bins(ROUNDS, bins=0)


# decay


def test_positions_by_hand():
    first, second, third = decay_rows(ROUNDS)
    assert (first.survival, second.survival, third.survival) == pytest.approx((2 / 3, 1 / 3, 1 / 3))
    assert (first.conditional, second.conditional, third.conditional) == pytest.approx((2 / 3, 1 / 2, 1.0))
    assert (second.geometric, third.geometric) == pytest.approx((4 / 9, 8 / 27))
    assert (third.independent, third.reached, third.proposed) == (0.125, 1, 3)
    assert len(decay_rows(ROUNDS, longest=2)) == 2
    with pytest.raises(ValueError, match="in 1..3, got 4"):
        decay_rows(ROUNDS, longest=4)


def test_errors_that_go_together_lift_survival_above_the_independent_product():
    together = synthetic_rounds(8000, (1.0,) * 5, spread=2.0, seed=2)
    apart = synthetic_rounds(8000, (1.0,) * 5, spread=0.0, seed=2)
    assert autocorrelation(together).low > 0.3
    for rounds, least, most in ((together, 0.05, 1.0), (apart, -0.02, 0.02)):
        last = decay_rows(rounds)[-1]
        assert least < last.survival - last.independent < most


def test_autocorrelation_is_the_plain_correlation():
    rounds = synthetic_rounds(500, (1.0, 1.0), seed=3)
    wanted = np.corrcoef(rounds.accept_prob_IG[:, 0], rounds.accept_prob_IG[:, 1])[0, 1]
    found = autocorrelation(rounds)
    assert found.estimate == pytest.approx(wanted, abs=1e-12) and found.low < wanted < found.high
    with pytest.raises(ValueError, match="in 1..1, got 2"):
        autocorrelation(rounds, 2)


# thresholds


def test_a_sweep_by_hand():
    cost = RoundCost(draft_s=1.0, overhead_s=0.0, verify_s_J=np.array([1.0, 2.0, 3.0, 4.0]))
    whole, half, most = threshold_sweep(ROUNDS, (0.0, 0.5, 0.95), cost=cost)
    assert (whole.verified, whole.accepted, whole.rejected) == pytest.approx((3.0, 7 / 3, 5 / 3))
    assert (whole.accept_rate, whole.verify_rate) == pytest.approx((4 / 9, 7 / 12))
    assert whole.tokens_per_s == pytest.approx(7 / 15)
    # survivals: 0.9 0.72 0.36 / 0.9 0.27 / 0.4
    assert (half.verified, half.accepted, half.rejected) == pytest.approx((1.0, 2.0, 0.0))
    assert half.tokens_per_s == pytest.approx(6 / (4 + 3 + 2))
    assert (most.verified, most.accepted, most.accept_rate, most.verify_rate) == (0.0, 1.0, None, 1.0)
    assert best_threshold([whole, half, most]).threshold == 0.5
    with pytest.raises(ValueError, match="no row has a speed"):
        best_threshold(threshold_sweep(ROUNDS, (0.0,)))


def test_the_sweep_cuts_where_the_drafter_would():
    rounds = synthetic_rounds(300, (1.4,) * 6, seed=4)
    for threshold in (0.0, 0.2, 0.5, 0.9):
        wanted = [kept_length(tuple(row), threshold) for row in rounds.confidence_IG.tolist()]
        assert kept_lengths(rounds, threshold).tolist() == wanted


def test_a_higher_threshold_never_sends_more():
    rows = threshold_sweep(synthetic_rounds(500, (1.0,) * 5, seed=5))
    for a, b in zip(rows, rows[1:], strict=False):
        assert a.verified >= b.verified and a.accepted >= b.accepted and a.rejected >= b.rejected


def test_costs_come_from_the_trace_and_the_shape_from_the_profile():
    table = CostTable(rows=(1, 2, 4, 8), seconds=(0.2, 0.3, 0.4, 0.5))
    cost = recorded_cost(ROUNDS, table)
    assert (cost.draft_s, cost.overhead_s) == (0.01, 0.002)
    np.testing.assert_allclose(cost.verify_s_J, [0.02, 0.03, 0.035, 0.04])
    for rows in ((1, 2), (2, 8)):
        with pytest.raises(ValueError, match=rf"1..4 rows are needed, the table has {rows[0]}..{rows[1]}"):
            recorded_cost(ROUNDS, CostTable(rows=rows, seconds=(0.2, 0.3)))
    with pytest.raises(ValueError, match="a pass over 5 rows was not measured"):
        cost.seconds(np.array([5]))


def test_the_recorded_table_has_passes_for_a_block_of_seven():
    table = recorded_cpu_table()
    assert table.verify_s_N[1] < table.verify_s_N[8] < 1
    # a few rows cost as good as the same on a CPU that waits for memory, so one may come out a little cheaper
    verify_s_J = recorded_cost(ROUNDS, table).verify_s_J
    assert verify_s_J[0] < 1.05 * verify_s_J.min()


@pytest.mark.parametrize(
    ("change", "thresholds", "message"),
    [
        ({"confidence_IG": np.full((3, 3), np.nan)}, (0.5,), "no confidence for every draft"),
        ({"drafter": "d@0.5"}, (0.5,), "were cut already"),
        ({}, (1.5,), "in 0..1, got 1.5"),
    ],
)
def test_a_sweep_that_cannot_be_made_is_refused(change, thresholds, message):
    with pytest.raises(ValueError, match=message):
        threshold_sweep(replace(ROUNDS, **change), thresholds)
