"""What is learned from settled rounds: acceptance by position, and how far confidences are off."""

from __future__ import annotations

import numpy as np
import pytest

from dspec_lab.scheduler.history import PRIOR, AcceptanceHistory, Standing, recalled


def settle(history, standing, lens, verified, accepted, chance=None):
    counts = (np.array([value]) for value in (lens, verified, accepted))
    history.settle(standing, *counts, None if chance is None else np.array([chance]))


def test_a_position_counts_only_where_it_was_reached_and_verified():
    history, own = AcceptanceHistory(3), Standing.new(1, 3)
    assert history.average().tolist() == [PRIOR] * 3
    for _ in range(400):
        settle(history, own, 3, 2, 1)
    average = history.average()
    assert average[0] > 0.95 and average[1] < 0.05 and average[2] == average[1]
    settle(history, Standing.new(1, 3), 3, 0, 0)
    np.testing.assert_array_equal(history.average(), average)
    np.testing.assert_allclose(history.chances(Standing.new(1, 3))[0], average)
    with pytest.raises(ValueError, match=r"\[2\] of \[1\] verified"):
        settle(history, own, 3, 1, 2)


def test_a_request_goes_its_own_way_from_the_average():
    history, good, bad = AcceptanceHistory(2), Standing.new(1, 2), Standing.new(1, 2)
    for _ in range(30):
        settle(history, good, 2, 2, 2)
        settle(history, bad, 2, 2, 0)
    assert history.chances(good)[0, 0] > 0.8 > 0.2 > history.chances(bad)[0, 0]
    before = bad.counts_B2G.copy()
    settle(history, bad, 0, 0, 0)
    np.testing.assert_array_equal(bad.counts_B2G, before)


def test_drafts_that_a_policy_cut_count_by_their_confidence():
    """A policy verifies only what is likely; the mean over what it verified would be far too high."""
    rng, history, own = np.random.default_rng(0), AcceptanceHistory(1), Standing.new(1, 1)
    chances = rng.choice([0.2, 0.9], 3000)
    for chance in chances.tolist():
        verified = int(chance > 0.5)
        settle(history, own, 1, verified, verified * int(rng.random() < chance), [chance])
    assert history.average()[0] == pytest.approx(chances.mean(), abs=0.03)


def test_confidences_that_are_off_by_a_bias_are_set_right():
    rng, history = np.random.default_rng(1), AcceptanceHistory(2)
    own, other = Standing.new(1, 2), Standing.new(1, 2)
    raw = np.array([[0.9, 0.8]])
    np.testing.assert_array_equal(history.corrected(raw, own), raw)
    np.testing.assert_array_equal(history.corrected(np.array([[1.0, 0.0]]), own), [[1.0, 0.0]])
    found = []
    for _ in range(400):
        told = history.corrected(raw, own)
        accepted = 0 if rng.random() > 0.5 else 1 if rng.random() > 0.4 else 2
        settle(history, own, 2, 2, accepted, told[0].tolist())
        found.append(told[0])
    np.testing.assert_allclose(np.mean(found[100:], axis=0), [0.5, 0.4], atol=0.1)
    # another request learns of it too, in part
    assert 0.5 < history.corrected(raw, other)[0, 0] < 0.9


@pytest.mark.parametrize("told", [True, False])
def test_few_requests_are_settled_as_many_are(told, monkeypatch):
    rng, gamma = np.random.default_rng(5), 5
    few, many = AcceptanceHistory(gamma), AcceptanceHistory(gamma)
    own_few, own_many = Standing.new(3, gamma), Standing.new(3, gamma)
    for _ in range(60):
        lens_B = rng.integers(0, gamma + 1, 3)
        verified_B = rng.integers(0, lens_B + 1)
        accepted_B = rng.integers(0, verified_B + 1)
        raw_BG = rng.choice([0.0, 1.0, 0.3, 0.8, 0.99], (3, gamma))
        for history, own, limit in ((few, own_few, 4), (many, own_many, 0)):
            monkeypatch.setattr("dspec_lab.scheduler.history.FEW", limit)
            chance_BG = history.corrected(raw_BG, own)
            history.settle(own, lens_B, verified_B, accepted_B, chance_BG if told else None)
        np.testing.assert_allclose(own_few.counts_B2G, own_many.counts_B2G, rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(own_few.shift_B, own_many.shift_B, rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(few.average(), many.average(), rtol=1e-12)
        monkeypatch.setattr("dspec_lab.scheduler.history.FEW", 4)
        alike = few.corrected(raw_BG[:, :3], own_few)
        monkeypatch.setattr("dspec_lab.scheduler.history.FEW", 0)
        np.testing.assert_allclose(alike, many.corrected(raw_BG[:, :3], own_many), rtol=1e-12)


def test_old_chances_of_one_request_count_half_and_those_of_many_nearly_whole():
    old_BG, expected_BG = np.array([[1.0, 0.5]]), np.array([[0.5, 0.0]])
    assert recalled(old_BG, expected_BG).tolist() == [[0.75, 0.25]]
    many = recalled(np.repeat(old_BG, 9, 0), np.repeat(expected_BG, 9, 0))
    assert np.allclose(many, [[0.95, 0.45]])
