"""Cross-fitted scores by domain, their bounds and goals, and the AUROC of other signals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dspec_lab.calibration.held_out import domain_scores, held_out_confidences, keeps_order, prompt_folds
from dspec_lab.calibration.maps import IsotonicMap, PlattMap, TemperatureMap, apply_maps
from dspec_lab.calibration.metrics import calibration_error
from dspec_lab.calibration.records import survival
from dspec_lab.calibration.score import mean_error, mean_error_bounds, score_survival
from dspec_lab.calibration.signals import signal_areas
from dspec_lab.calibration.sts import fit_maps
from dspec_lab.calibration.synthetic import synthetic_rounds


@pytest.fixture(scope="module")
def rounds():
    made = synthetic_rounds(2400, (2.5, 2.5), prompts=24, biases=(1.0, 1.0), seed=0)
    return replace(made, draft_entropy_IG=4 * (1 - made.accept_prob_IG))


def test_each_prompt_is_judged_once_by_maps_of_other_prompts_and_folds_mix_the_domains(rounds):
    judged_I = np.zeros(len(rounds), dtype=int)
    after_IG, kept = held_out_confidences(rounds, "platt", folds=4, seed=3)
    for fit, away_I in prompt_folds(rounds, folds=4, seed=3):
        judge = rounds.select(away_I)
        assert not set(fit.prompts) & set(judge.prompts)
        assert judge.domains == rounds.domains and len(judge.prompts) == 6
        np.testing.assert_array_equal(after_IG[away_I], apply_maps(fit_maps(fit, "platt"), judge.confidence_IG))
        judged_I += away_I
    assert (judged_I == 1).all() and kept
    for folds in (1, 25):
        with pytest.raises(ValueError, match=rf"folds must lie in 2\.\.24, the number of prompts, got {folds}"):
            next(prompt_folds(rounds, folds=folds))


def test_domain_scores_are_those_of_the_domain_alone(rounds):
    found = {s.domain: s for s in domain_scores(rounds, "platt", resamples=100)}
    assert list(found) == ["all", *rounds.domains]
    chat = rounds.of_domain("chat")
    assert found["chat"].rounds == len(chat) and found["chat"].prompts == len(chat.prompts)
    by_hand = [
        calibration_error(survival(chat.confidence_IG)[:, k], chat.survived_IG[:, k].astype(float)) for k in (0, 1)
    ]
    assert found["chat"].mean_before.estimate == pytest.approx(np.mean(by_hand))
    assert found["all"].mean_after.estimate < 0.5 * found["all"].mean_before.estimate
    (own,) = domain_scores(rounds, "platt", fitted_on="chat", resamples=100)
    assert own.domain == own.fitted_on == "chat" and own.mean_before == found["chat"].mean_before
    assert own.mean_after.estimate != found["chat"].mean_after.estimate


def test_what_is_missed_is_told(rounds):
    platt = domain_scores(rounds, "platt", resamples=100)[0]
    # chance alone leaves 2 to 3 % with so few rounds
    platt = replace(platt, mean_after=replace(platt.mean_after, estimate=0.015))
    assert platt.unmet() == []
    raised = replace(platt, mean_after=replace(platt.mean_after, estimate=0.03), order_kept=False)
    assert "mean ECE after is 3.0 %, more than 2 %" in raised.unmet()
    assert raised.unmet()[-1] == "the order at a position is not kept"
    blind = replace(platt.after[0], auroc=0.7), replace(platt.after[1], auroc=None)
    assert replace(platt, after=blind).unmet() == [
        "AUROC below 0.75 at position 1: 0.700",
        "AUROC unknown at position 2, where no draft survived",
    ]
    small = replace(platt, mean_before=replace(platt.mean_before, estimate=platt.mean_after.estimate * 1.25))
    assert small.unmet() == ["mean ECE after is 0.80 of before, more than 0.5"]


def test_a_map_that_swaps_two_confidences_does_not_keep_the_order(rounds):
    class Falling(PlattMap):
        def __call__(self, chance):
            return 1 - chance

    rising = (TemperatureMap(2.0), IsotonicMap((0.0, 1.0), (0.2, 0.2)))
    assert keeps_order(rising, rounds)
    assert not keeps_order((TemperatureMap(2.0), Falling(1.0, 0.0)), rounds)


def test_bounds_of_the_mean_error_hold_it_and_narrow_with_more_prompts(rounds):
    widths = []
    for prompts in (6, 96):
        made = synthetic_rounds(40 * prompts, (2.5, 2.5), prompts=prompts, seed=1)
        low, high = mean_error_bounds(made, made.confidence_IG)
        estimate = mean_error(score_survival(made, made.confidence_IG, resamples=2))
        assert 0 <= low <= estimate <= high <= 1
        widths.append(high - low)
    assert widths[1] < 0.6 * widths[0]
    with pytest.raises(ValueError, match="at least 2 prompts, got 1"):
        mean_error_bounds(rounds.select(rounds.prompt_I == rounds.prompts[0]), rounds.confidence_IG[:1])


def test_a_signal_that_knows_more_scores_higher_and_the_chance_is_the_ceiling(rounds):
    noise = np.random.default_rng(0).random(rounds.confidence_IG.shape)
    # a confidence that knows little beside an entropy that knows the chance
    dull = replace(rounds, confidence_IG=0.5 * rounds.confidence_IG + 0.5 * noise)
    found = {(a.domain, a.position, a.signal): a for a in signal_areas(dull, resamples=100)}
    for k in (1, 2):
        areas = {name: found["all", k, name].auroc for name in ("confidence", "draft_entropy", "both", "chance")}
        assert areas["confidence"] < areas["both"] - 0.03 and areas["draft_entropy"] == pytest.approx(areas["chance"])
        # the fitted chances of four folds are not quite on one scale
        assert abs(areas["both"] - areas["chance"]) < 0.02
        one = found["chat", k, "confidence"]
        assert one.low < one.auroc < one.high and one.cases == int(rounds.of_domain("chat").reached_IG[:, k - 1].sum())
    with pytest.raises(ValueError, match="no draft_entropy_bits for every draft"):
        signal_areas(replace(rounds, draft_entropy_IG=np.full_like(rounds.draft_entropy_IG, np.nan)))
