"""Maps that read the draft's entropy beside its confidence."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dspec_lab.calibration.calibration import fit_calibration, load_calibration
from dspec_lab.calibration.held_out import domain_scores, keeps_order
from dspec_lab.calibration.maps import EntropyMap, apply_maps, logit, sigmoid
from dspec_lab.calibration.score import mean_error
from dspec_lab.calibration.sts import fit_entropy
from dspec_lab.calibration.synthetic import synthetic_rounds


@pytest.fixture(scope="module")
def rounds():
    """The stated chance lacks what the entropy tells: z = logit(c) - 0.8 H + 1."""
    plain = synthetic_rounds(12_000, (1.0, 1.0, 1.0), prompts=120, level=0.0, seed=5)
    entropy_IG = np.random.default_rng(0).gamma(2.0, 1.0, size=plain.confidence_IG.shape)
    stated_IG = sigmoid(logit(plain.confidence_IG) + 0.8 * entropy_IG - 1.0)
    return replace(plain, confidence_IG=stated_IG, draft_entropy_IG=entropy_IG)


def test_known_numbers_come_back(rounds):
    for m in fit_entropy(rounds):
        assert (m.slope, m.weight, m.bias) == pytest.approx((1.0, 0.8, 1.0), abs=0.12)


def test_entropy_adds_what_one_input_cannot(rounds):
    judged = {m: fit_calibration(rounds, m, resamples=50) for m in ("platt", "entropy")}
    assert mean_error(list(judged["entropy"].after)) < 0.02
    areas = {m: fitted.after[0].auroc for m, fitted in judged.items()}
    assert areas["entropy"] > areas["platt"] + 0.05, areas
    # a map of one input cannot move the order, so the area stays
    assert areas["platt"] == pytest.approx(judged["platt"].before[0].auroc)
    found = {s.domain: s for s in domain_scores(rounds, "entropy", folds=3, resamples=50)}
    assert found["chat"].order_kept and found["chat"].after[0].auroc > found["chat"].before[0].auroc + 0.05


def test_a_file_keeps_them(rounds, tmp_path):
    fitted = fit_calibration(rounds.select(np.arange(len(rounds)) < 2000), "entropy", resamples=50)
    assert load_calibration(fitted.save(tmp_path / "c.json")) == fitted and fitted.reads_entropy
    with pytest.raises(ValueError, match="this calibration is entropy"):
        fitted.engine_table()


def test_missing_entropies_and_broken_maps_are_refused(rounds):
    blind = replace(rounds, draft_entropy_IG=np.full_like(rounds.confidence_IG, np.nan))
    with pytest.raises(ValueError, match="no draft_entropy_bits for every draft"):
        fit_entropy(blind)
    maps = (EntropyMap(1.0, 0.5, 0.0),)
    for entropy_IG in (None, np.array([[np.nan]])):
        with pytest.raises(ValueError, match="entropy map of position 1 needs the draft's entropy"):
            apply_maps(maps, np.array([[0.5]]), entropy_IG)
    np.testing.assert_allclose(apply_maps(maps, np.array([[0.5]]), np.array([[2.0]])), sigmoid(np.array([[-1.0]])))
    for values in ((-1.0, 0.0, 0.0), (1.0, -0.1, 0.0), (1.0, 0.0, np.inf)):
        with pytest.raises(ValueError, match="an entropy map needs"):
            EntropyMap(*values)


def test_few_verdicts_stay_near_the_position_before(rounds):
    few = rounds.select(np.arange(len(rounds)) < 60)
    first, second, third = fit_entropy(few)
    assert all(np.isfinite([m.slope, m.weight, m.bias]).all() for m in (first, second, third))
    cut = replace(rounds, num_accepted_I=np.minimum(rounds.num_accepted_I, 2))
    maps = fit_entropy(cut)
    assert maps[2] == maps[1] != maps[0]
    assert keeps_order(maps, rounds)
