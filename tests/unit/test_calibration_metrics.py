"""Calibration error, AUROC, Brier and reliability bins against values worked out by hand or by scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn import metrics as reference

from dspec_lab.calibration.metrics import auroc, bin_edges, brier, calibration_error, check, error_floor, reliability
from dspec_lab.calibration.score import resampled, score_survival
from dspec_lab.calibration.synthetic import synthetic_rounds


def test_the_error_of_two_bins_by_hand():
    stated, seen = np.array([0.1, 0.3, 0.9, 0.7]), np.array([0.0, 1.0, 1.0, 1.0])
    # bins of width 1/2: |0.2 - 0.5| and |0.8 - 1|, half of the cases each
    assert calibration_error(stated, seen, bins=2) == pytest.approx(0.25)
    table = reliability(stated, seen, bins=2)
    assert table.count_C.tolist() == [2, 2] and table.observed_C.tolist() == [0.5, 1.0]
    np.testing.assert_allclose(table.predicted_C, [0.2, 0.8])


def test_equal_mass_bins_hold_equally_many_and_ties_share_one():
    generator = np.random.default_rng(0)
    stated = generator.random(1000) ** 4
    table = reliability(stated, np.zeros(1000), bins=10, binning="mass")
    assert table.count_C.tolist() == [100] * 10
    assert reliability(stated, np.zeros(1000), bins=10).count_C[0] > 400
    tied = reliability(np.array([0.5] * 90 + [0.9] * 10), np.zeros(100), bins=10, binning="mass")
    assert tied.count_C.sum() == 100 and len(tied.count_C) <= 3


def test_empty_bins_are_left_out_and_one_belongs_to_the_last():
    table = reliability(np.array([0.0, 1.0]), np.array([0.0, 1.0]), bins=20)
    np.testing.assert_allclose(table.low_C, [0.0, 0.95])
    assert table.error == 0.0 and table.count_C.tolist() == [1, 1]


def test_equal_mass_does_not_hide_an_error_that_wide_bins_cancel():
    # within one wide bin the two halves err in opposite ways
    stated = np.array([0.51] * 500 + [0.54] * 500)
    seen = np.array([0.0] * 500 + [1.0] * 500)
    assert calibration_error(stated, seen, bins=20) == pytest.approx(0.025)
    assert calibration_error(stated, seen, bins=20, binning="mass") == pytest.approx(0.5 * (0.51 + 0.46))


def test_auroc_and_brier_agree_with_scikit_learn_ties_included():
    generator = np.random.default_rng(1)
    score = generator.integers(0, 12, size=400) / 12
    outcome = (generator.random(400) < score).astype(float)
    assert auroc(score, outcome) == pytest.approx(reference.roc_auc_score(outcome, score), abs=1e-12)
    assert brier(score, outcome) == pytest.approx(reference.brier_score_loss(outcome, score), abs=1e-12)
    assert np.isnan(auroc(score, np.ones(400)))
    # a map that keeps the order keeps the area
    assert auroc(score**3, outcome) == pytest.approx(auroc(score, outcome), abs=1e-12)


def test_the_floor_is_what_perfect_chances_show():
    generator = np.random.default_rng(2)
    stated = generator.random(800)
    shown = [calibration_error(stated, (generator.random(800) < stated).astype(float)) for _ in range(40)]
    assert error_floor(stated) == pytest.approx(np.mean(shown), rel=0.1)
    assert error_floor(generator.random(80_000)) < 0.2 * error_floor(stated)


@pytest.mark.parametrize(
    ("stated", "seen", "message"),
    [
        ([0.5], [1.0, 0.0], "1 predictions for 2 outcomes"),
        ([], [], "0 predictions"),
        ([1.2], [1.0], "predictions must lie in 0..1, got 1.2"),
        ([float("nan")], [1.0], "got nan"),
        ([0.5], [-1.0], "outcomes must lie in 0..1, got -1.0"),
    ],
)
def test_bad_cases_are_refused(stated, seen, message):
    with pytest.raises(ValueError, match=message):
        check(np.array(stated), np.array(seen))
    with pytest.raises(ValueError, match="outcomes 0 or 1"):
        auroc(np.array([0.1, 0.2]), np.array([0.5, 1.0]))
    with pytest.raises(ValueError, match="at least 1 bin, got 0"):
        bin_edges(np.array([0.1]), 0)


def test_resampling_with_every_prompt_once_gives_the_estimates():
    rounds = synthetic_rounds(600, [1.3, 1.3], prompts=12, seed=3)
    stated, kept = rounds.confidence_IG[:, 0], rounds.survived_IG[:, 0].astype(float)
    index, count = rounds.prompt_index()
    draws = resampled(stated, kept, index, count, resamples=300, seed=1)
    assert np.median(draws["auroc"]) == pytest.approx(auroc(stated, kept), abs=0.02)
    assert np.median(draws["brier"]) == pytest.approx(brier(stated, kept), abs=0.02)
    # one prompt has only itself to draw
    alone = resampled(stated, kept, np.zeros(600, dtype=np.int64), 1, resamples=5)
    assert alone["auroc"] == pytest.approx(np.full(5, auroc(stated, kept)), abs=1e-12)
    assert alone["ece"] == pytest.approx(np.full(5, calibration_error(stated, kept)), abs=1e-12)


def test_score_covers_positions_and_pool_and_its_bounds_hold_the_estimate():
    rounds = synthetic_rounds(900, [2.0, 2.0, 2.0], prompts=20, seed=4)
    scores = score_survival(rounds, rounds.confidence_IG, resamples=200)
    assert [score.position for score in scores] == [1, 2, 3, None]
    assert scores[-1].cases == 2700
    for score in scores:
        assert 0 <= score.ece_low < score.ece < score.ece_high
        assert score.auroc_low < score.auroc < score.auroc_high and score.brier_low < score.brier < score.brier_high
        assert score.ece > 2 * score.ece_floor  # twice too sure of itself is seen


def test_one_prompt_has_no_interval():
    rounds = synthetic_rounds(200, [1.0], prompts=1, seed=5)
    (score, pooled) = score_survival(rounds, rounds.confidence_IG, resamples=100)
    assert score.ece_low is score.auroc_high is pooled.brier_low is None
