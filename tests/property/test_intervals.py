"""Intervals hold the true value as often as they claim, use the pairing, and answer or refuse degenerate input."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspec_lab.evaluation.intervals import (
    METHODS,
    Interval,
    paired_difference,
    paired_ratio_difference,
    pooled_ratio_interval,
)

# 400 repeats of a 95 % interval: the share found has a standard error of 0.011
REPEATS = 400

counts = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 7)), min_size=2, max_size=30)


def _contains(interval: Interval, value: float) -> bool:
    return interval.low <= value <= interval.high


def _share(hits: list[bool]) -> float:
    return float(np.mean(hits))


@pytest.mark.parametrize("method", METHODS)
def test_paired_difference_covers_the_true_mean(method: str) -> None:
    hits, widths = [], []
    for repeat in range(REPEATS):
        rng = np.random.default_rng([1, repeat])
        prompt = rng.normal(4.0, 3.0, size=40)  # what both drafters share, far larger than their difference
        a, b = prompt + rng.normal(0.3, 0.5, size=40), prompt
        interval = paired_difference(a, b, resamples=300, seed=repeat, method=method)
        hits.append(_contains(interval, 0.3))
        widths.append(interval.high - interval.low)
    # below 0.90 it is too short; from 0.99 on it is too long, as it is when the pairing is lost
    assert 0.90 <= _share(hits) < 0.99
    # normal theory: 2 x 1.96 x 0.5 / sqrt(40) = 0.310
    assert np.mean(widths) == pytest.approx(0.310, rel=0.06)


@pytest.mark.parametrize("method", METHODS)
def test_pooled_ratio_covers_the_pooled_truth_not_the_mean_of_ratios(method: str) -> None:
    # hard prompts take 60 rounds at 1.5 tokens, easy ones 20 at 4.5: pooled (60 * 1.5 + 20 * 4.5) / 80 = 2.25, mean 3
    hits_pooled, hits_mean = [], []
    for repeat in range(REPEATS):
        rng = np.random.default_rng([2, repeat])
        hard = rng.random(40) < 0.5
        rounds = np.where(hard, 60, 20)
        committed = rounds + rng.poisson(rounds * np.where(hard, 0.5, 3.5))
        interval = pooled_ratio_interval(committed, rounds, resamples=300, seed=repeat, method=method)
        hits_pooled.append(_contains(interval, 2.25))
        hits_mean.append(_contains(interval, 3.0))
    assert 0.90 <= _share(hits_pooled) < 0.99
    assert _share(hits_mean) < 0.3


@pytest.mark.parametrize("method", METHODS)
def test_paired_ratio_difference_covers_the_truth_and_gains_from_pairing(method: str) -> None:
    hits, shorter = [], []
    for repeat in range(REPEATS):
        rng = np.random.default_rng([3, repeat])
        ease = rng.uniform(0.2, 0.8, size=40)
        rounds_a, rounds_b = rng.integers(10, 30, size=(2, 40))
        committed_a = rounds_a + rng.binomial(7 * rounds_a, ease)
        committed_b = rounds_b + rng.binomial(7 * rounds_b, ease - 0.1)
        interval = paired_ratio_difference(
            committed_a, rounds_a, committed_b, rounds_b, resamples=300, seed=repeat, method=method
        )
        hits.append(_contains(interval, 0.7))
        shorter.append(interval.high - interval.low)
    assert 0.90 <= _share(hits) < 0.99
    # one drafter alone has sd 7 x 0.173 / sqrt(40) = 0.19, so two unpaired ones an interval of about 1.07
    assert np.mean(shorter) < 0.5


def test_confidence_sets_the_coverage() -> None:
    hits = []
    for repeat in range(REPEATS):
        values = np.random.default_rng([4, repeat]).normal(size=40)
        hits.append(_contains(paired_difference(values, np.zeros(40), confidence=0.5, resamples=300, seed=repeat), 0))
    assert 0.42 <= _share(hits) <= 0.58


@settings(max_examples=40, deadline=None)
@given(counts, st.integers(0, 2**31))
def test_ratio_estimates_are_pooled_and_inside(pairs: list[tuple[int, int]], seed: int) -> None:
    rounds = [r for r, _ in pairs]
    committed = [r * (1 + kept) for r, kept in pairs]
    interval = pooled_ratio_interval(committed, rounds, resamples=100, seed=seed, method="percentile")
    assert interval.estimate == pytest.approx(sum(committed) / sum(rounds), rel=1e-12)
    per_prompt = [c / r for c, r in zip(committed, rounds, strict=True)]
    assert min(per_prompt) - 1e-9 <= interval.low <= interval.high <= max(per_prompt) + 1e-9


@settings(max_examples=40, deadline=None)
@given(counts, st.sampled_from(METHODS))
def test_identical_drafters_give_exactly_zero(pairs: list[tuple[int, int]], method: str) -> None:
    rounds = [r for r, _ in pairs]
    values = [r * (1.1 + kept) for r, kept in pairs]
    zero = Interval(0.0, 0.0, 0.0)
    assert paired_difference(values, values, resamples=100, method=method) == zero
    assert paired_ratio_difference(values, rounds, values, rounds, resamples=100, method=method) == zero


@settings(max_examples=40, deadline=None)
@given(counts)
def test_swapping_the_drafters_flips_the_sign(pairs: list[tuple[int, int]]) -> None:
    a = [float(r) for r, _ in pairs]
    b = [float(kept) for _, kept in pairs]
    forth = paired_difference(a, b, resamples=200, method="percentile")
    back = paired_difference(b, a, resamples=200, method="percentile")
    np.testing.assert_allclose(
        [back.estimate, back.low, back.high], [-forth.estimate, -forth.high, -forth.low], atol=1e-9
    )


def test_same_seed_same_interval_and_other_seed_another() -> None:
    a, b = np.random.default_rng(5).normal(size=(2, 20))
    assert paired_difference(a, b, seed=3) == paired_difference(a, b, seed=3)
    assert paired_difference(a, b, seed=3) != paired_difference(a, b, seed=4)


@pytest.mark.parametrize("method", METHODS)
def test_constant_data_gives_a_point(method: str) -> None:
    # 0.1 is not exact in binary: the differences vary in the last bit
    b = np.linspace(1, 50, 23)
    shifted = paired_difference(b + 0.1, b, method=method)
    assert shifted.low == shifted.high == shifted.estimate == pytest.approx(0.1)
    assert shifted.excludes_zero
    tripled = pooled_ratio_interval(3 * b, b, method=method)
    assert tripled.low == tripled.high == tripled.estimate == pytest.approx(3.0)


@pytest.mark.parametrize("method", METHODS)
def test_small_spread_is_not_taken_for_constant(method: str) -> None:
    rng = np.random.default_rng(6)
    seconds, tokens = rng.uniform(1e-8, 2e-8, size=30), rng.uniform(1e6, 2e6, size=30)
    interval = pooled_ratio_interval(seconds, tokens, method=method)
    assert interval.low < interval.estimate < interval.high
    # scaling the unit scales the interval
    scaled = pooled_ratio_interval(1e15 * seconds, tokens, method=method)
    np.testing.assert_allclose([scaled.low, scaled.high], [1e15 * interval.low, 1e15 * interval.high], rtol=1e-9)


def test_bounds_that_bca_cannot_give_are_refused() -> None:
    # leaving out either prompt leaves a difference of 1, so BCa has no skewness to correct by; pooled it is 1.41
    samples = ([2, 30], [1, 10], [1, 2], [1, 1])
    with pytest.raises(ValueError, match="BCa interval of 2 prompts is .*nan.* use method='percentile'"):
        paired_ratio_difference(*samples)
    interval = paired_ratio_difference(*samples, method="percentile")
    np.testing.assert_allclose([interval.estimate, interval.low, interval.high], [32 / 11 - 1.5, 1.0, 32 / 11 - 1.5])


def test_sign_is_settled_only_when_zero_is_outside() -> None:
    assert Interval(1.0, 0.1, 2.0).excludes_zero and Interval(-1.0, -2.0, -0.1).excludes_zero
    assert not Interval(1.0, -0.1, 2.0).excludes_zero and not Interval(0.0, 0.0, 0.0).excludes_zero
    assert str(Interval(1.0, 0.25, 2.0)) == "1.000 [0.250, 2.000]"


def test_bad_input_is_named() -> None:
    good = [1.0, 2.0, 4.0]
    with pytest.raises(ValueError, match=r"values_b\[1\] is nan"):
        paired_difference(good, [1.0, math.nan, 2.0])
    with pytest.raises(ValueError, match=r"same prompts, got \{'values_a': 3, 'values_b': 2\}"):
        paired_difference(good, good[:2])
    with pytest.raises(ValueError, match="at least 2 prompts, got 1"):
        paired_difference([1.0], [2.0])
    with pytest.raises(ValueError, match="at least 2 prompts, got 0"):
        pooled_ratio_interval([], [])
    with pytest.raises(ValueError, match=r"numerators must hold one number per prompt, got shape \(1, 3\)"):
        pooled_ratio_interval(np.array([good]), good)
    with pytest.raises(ValueError, match=r"denominators\[2\] is 0; leave out prompts without rounds"):
        pooled_ratio_interval(good, [1.0, 2.0, 0.0])
    with pytest.raises(ValueError, match=r"denominators_b\[0\] is -1"):
        paired_ratio_difference(good, good, good, [-1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="confidence must lie between 0 and 1, got 95.0"):
        paired_difference(good, good, confidence=95.0)
    with pytest.raises(ValueError, match="resamples must be .* at least 100, got 10"):
        paired_difference(good, good, resamples=10)
    with pytest.raises(ValueError, match="seed must be .* got -1"):
        paired_difference(good, good, seed=-1)
    with pytest.raises(ValueError, match="method must be .* got 'basic'"):
        paired_difference(good, good, method="basic")
