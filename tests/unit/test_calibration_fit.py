"""Fits on rounds with known temperatures and biases; splits, files, refusals."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest

from dspec_lab.calibration.calibration import fit_calibration, load_calibration
from dspec_lab.calibration.drift import drift_warnings, stability_index
from dspec_lab.calibration.maps import IsotonicMap, PlattMap, TemperatureMap, logit, sigmoid
from dspec_lab.calibration.records import read_rounds, rounds_of_rows, survival, trace_paths
from dspec_lab.calibration.score import mean_error
from dspec_lab.calibration.split import refuse_leakage, split_by_prompt
from dspec_lab.calibration.sts import fit_maps, fit_platt, fit_temperatures, sparse_positions, survival_labels
from dspec_lab.calibration.synthetic import synthetic_rounds
from dspec_lab.checkpoints.identity import checkpoint_hash
from dspec_lab.verifier.trace import write_trace

TEMPERATURES = (2.0, 1.6, 0.6, 1.3, 2.4)


@pytest.fixture(scope="module")
def rounds():
    return synthetic_rounds(30_000, TEMPERATURES, prompts=200, seed=0)


@pytest.fixture(scope="module")
def fitted(rounds):
    return fit_calibration(rounds, seed=1, held_out=0.7, resamples=100)


def row(**changes):
    values = {
        "request_id": "r", "prompt_id": "p/0", "domain": "math", "drafter": "d", "temperature": 1.0, "round": 0,
        "context_tokens": 5, "gamma": 2, "draft_ids": [1, 2], "confidence": [0.9, 0.5], "accepted": [True, False],
        "num_accepted": 1, "accept_prob": [0.8, 0.4], "target_entropy_bits": [1.0, 2.0],
        "draft_entropy_bits": [1.5, 2.5], "draft_s": 0.1, "verify_s": 0.2, "overhead_s": 0.01,
    }  # fmt: skip
    return values | changes


# the fit


def test_known_temperatures_come_back_and_the_held_out_error_is_below_2_percent(fitted):
    found = [m.temperature for m in fitted.maps]
    np.testing.assert_allclose(found, TEMPERATURES, rtol=0.12)
    assert all(score.ece <= 0.02 for score in fitted.after), [score.ece for score in fitted.after]
    assert mean_error(list(fitted.after)) <= 0.5 * mean_error(list(fitted.before))


def test_the_search_is_sequential(rounds):
    """The temperature of k minimises the error of the product with the fitted c_1..c_{k-1}, not with the raw ones."""
    small = synthetic_rounds(4000, (3.0, 1.0), seed=2)
    grid = np.array([0.5, 1.0, 2.0, 3.0])
    first, second = fit_temperatures(small, grid=grid)
    assert (first.temperature, second.temperature) == (3.0, 1.0)
    alone = replace(small, confidence_IG=np.stack([first(small.confidence_IG[:, 0]), small.confidence_IG[:, 1]], 1))
    assert [m.temperature for m in fit_temperatures(alone, grid=grid)] == [1.0, 1.0]


def test_expected_labels_have_the_mean_of_outcomes_and_give_the_temperatures_too(rounds):
    outcome, expected = survival_labels(rounds), survival_labels(rounds, "expected")
    np.testing.assert_allclose(outcome.mean(0), expected.mean(0), atol=0.01)
    assert (expected.var(0) < outcome.var(0)).all()
    found = [m.temperature for m in fit_temperatures(rounds, labels="expected", grid=np.geomspace(0.4, 3, 40))]
    np.testing.assert_allclose(found, TEMPERATURES, rtol=0.12)


def test_equal_errors_go_to_temperature_1():
    # stated 1/2 stays 1/2 at any temperature
    half = replace(synthetic_rounds(400, (1.0,), seed=3), confidence_IG=np.full((400, 1), 0.5))
    assert fit_temperatures(half)[0].temperature == 1.0


def test_a_bias_defeats_temperatures_but_not_platt_or_isotonic_maps():
    biased = synthetic_rounds(20_000, (1.5, 1.5, 1.5), biases=(1.2, 1.2, 1.2), level=0.0, prompts=100, seed=4)
    errors = {m: mean_error(list(fit_calibration(biased, m, resamples=100).after)) for m in
              ("temperature", "platt", "isotonic")}  # fmt: skip
    assert errors["platt"] < 0.02 and errors["isotonic"] < 0.025
    assert errors["temperature"] > 2 * errors["platt"]
    for m in fit_platt(biased):
        # stated = 1.5 z + 1.2, so z = stated / 1.5 - 0.8
        assert m.slope == pytest.approx(1 / 1.5, abs=0.06) and m.bias == pytest.approx(-0.8, abs=0.08)


@pytest.mark.parametrize("method", ["temperature", "platt", "isotonic"])
def test_order_is_kept_at_each_position_and_survival_never_rises(method, rounds):
    few = rounds.select(np.arange(len(rounds)) < 3000)
    fitted = fit_calibration(few, method, resamples=100)
    line = np.repeat(np.linspace(0, 1, 201)[:, None], 5, axis=1)
    out = fitted.confidences(line)
    assert ((out >= 0) & (out <= 1)).all() and (np.diff(out, axis=0) >= 0).all()
    if method != "isotonic":
        assert (np.diff(out[1:-1], axis=0) > 0).all()
    assert (np.diff(survival(fitted.confidences(few.confidence_IG)), axis=1) <= 0).all()


def test_maps_by_hand():
    half = np.array([0.5, 0.9])
    np.testing.assert_allclose(TemperatureMap(2.0)(half), [0.5, 0.75])
    np.testing.assert_allclose(PlattMap(1.0, np.log(3.0))(half), [0.75, 27 / 28])
    np.testing.assert_allclose(IsotonicMap((0.4, 0.6), (0.0, 1.0))(np.array([0.1, 0.45, 0.9])), [0.0, 0.25, 1.0])
    np.testing.assert_allclose(sigmoid(logit(half)), half)
    assert np.isfinite(logit(np.array([0.0, 1.0]))).all()
    for make in (lambda: TemperatureMap(0.0), lambda: PlattMap(-1.0, 0.0), lambda: IsotonicMap((0.1,), (0.2, 0.3))):
        with pytest.raises(ValueError):
            make()
    with pytest.raises(ValueError, match="never fall"):
        IsotonicMap((0.1, 0.2), (0.5, 0.4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"calibrated": True}, "calibrated already"),
        ({"drafter": "dspark@0.5"}, "cut by a threshold"),
        ({"confidence_IG": np.full((30_000, 5), np.nan)}, "no confidence for every draft"),
        ({"gamma_I": np.full(30_000, 4), "num_accepted_I": np.zeros(30_000, dtype=np.int64)}, "only 0 rounds proposed"),
    ],
)
def test_rounds_that_cannot_be_fitted_are_refused(rounds, change, message):
    with pytest.raises(ValueError, match=message):
        fit_temperatures(replace(rounds, **change))


def test_platt_needs_both_verdicts(rounds):
    sure = replace(rounds, num_accepted_I=rounds.gamma_I)
    with pytest.raises(ValueError, match="position 1 was accepted 30000 and rejected 0 times"):
        fit_platt(sure)


# split and leakage


@pytest.mark.parametrize("method", ["platt", "isotonic"])
def test_a_position_with_too_few_verdicts_takes_the_map_before_it(method, rounds):
    # nothing past position 3 survives
    cut = replace(rounds, num_accepted_I=np.minimum(rounds.num_accepted_I, 3))
    assert sparse_positions(rounds) == () and sparse_positions(cut) == (3, 4)
    maps = fit_maps(cut, method)
    assert maps[4] == maps[3] == maps[2] != maps[1]
    with pytest.raises(ValueError, match="position 1 was accepted 0"):
        fit_maps(replace(rounds, num_accepted_I=0 * rounds.num_accepted_I), method)


def test_a_split_shares_no_prompt_and_has_every_domain_on_both_sides(rounds):
    fit, judge = split_by_prompt(rounds, held_out=0.3, seed=5)
    assert not set(fit.prompts) & set(judge.prompts) and len(fit) + len(judge) == len(rounds)
    assert fit.domains == judge.domains == ("chat", "code", "math")
    assert len(judge.prompts) == pytest.approx(0.3 * 200, abs=3)
    assert split_by_prompt(rounds, held_out=0.3, seed=5)[1].prompts == judge.prompts
    assert split_by_prompt(rounds, held_out=0.3, seed=6)[1].prompts != judge.prompts


def test_leakage_is_refused_also_after_loading(fitted, rounds, tmp_path):
    loaded = load_calibration(fitted.save(tmp_path / "sts.json"))
    with pytest.raises(ValueError, match="were used to fit and would be judged on"):
        loaded.judge(rounds)
    fit, judge = split_by_prompt(rounds, held_out=0.7, seed=1)
    assert loaded.judge(judge, resamples=100)[1][0].ece == pytest.approx(fitted.after[0].ece)
    with pytest.raises(ValueError, match="2 prompts .*a, b"):
        refuse_leakage(["a", "b", "c"], ["b", "a"])


def test_one_prompt_cannot_be_split():
    with pytest.raises(ValueError, match="'chat' has 1 prompt"):
        split_by_prompt(synthetic_rounds(300, (1.0,), prompts=1))
    with pytest.raises(ValueError, match="between 0 and 1, got 1.0"):
        split_by_prompt(synthetic_rounds(300, (1.0,)), held_out=1.0)


# file


def test_save_and_load_keep_everything(fitted, tmp_path):
    path = fitted.save(tmp_path / "sts.json")
    assert load_calibration(path) == fitted
    assert list(tmp_path.iterdir()) == [path]
    origin = fitted.provenance
    assert (origin.fit_rounds + origin.held_out_rounds, origin.drafter) == (30_000, "synthetic")
    assert origin.date_utc.endswith("+00:00") and sum(origin.domain_shares.values()) == pytest.approx(1)
    table = fitted.engine_table()
    assert len(table["temperatures"]) == len(table["ece_before"]) == len(table["ece_after"]) == 5
    assert table["num_samples"] == origin.fit_rounds


@pytest.mark.parametrize("method", ["platt", "isotonic"])
def test_other_methods_are_kept_too(rounds, method, tmp_path):
    few = fit_calibration(rounds.select(np.arange(len(rounds)) < 2000), method, resamples=100)
    assert load_calibration(few.save(tmp_path / "c.json")) == few
    with pytest.raises(ValueError, match=f"this calibration is {method}"):
        few.engine_table()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda c: c.update(format="other"), "its format is not"),
        (lambda c: c.pop("maps"), "broken calibration: KeyError"),
        (lambda c: c["maps"].__setitem__(0, -1.0), "above 0 and finite, got -1.0"),
        (lambda c: c.update(maps=[]), "at least one position"),
        (lambda c: c["provenance"].pop("seed"), "lacks or has too much: seed"),
        (lambda c: c.update(method="magic"), "no map of the method 'magic'"),
    ],
)
def test_a_spoilt_file_is_refused(fitted, tmp_path, spoil, message):
    path = fitted.save(tmp_path / "sts.json")
    content = json.loads(path.read_text())
    spoil(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        load_calibration(path)


def test_data_and_weights_are_hashed(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "a.parquet").write_bytes(b"rows")
    assert checkpoint_hash(tmp_path) == hashlib.sha256(b"weights").hexdigest()
    fitted = fit_calibration(synthetic_rounds(400, (1.0,), seed=1), resamples=100, data=[tmp_path / "a.parquet"])
    assert fitted.provenance.data == ("a.parquet",)
    assert fitted.provenance.data_hashes == (hashlib.sha256(b"rows").hexdigest(),)
    with pytest.raises(ValueError, match="no checkpoint"):
        checkpoint_hash(tmp_path / "none")


# applied once


def test_a_second_application_and_other_drafters_are_refused(fitted, rounds):
    once = fitted.apply(rounds)
    assert once.calibrated and not rounds.calibrated
    with pytest.raises(ValueError, match="a second time is wrong"):
        fitted.apply(once)
    with pytest.raises(ValueError, match="got rounds of 'other'"):
        fitted.apply(replace(rounds, drafter="other"))
    with pytest.raises(ValueError, match="calibrated for 5 positions, got 6"):
        fitted.confidences(np.full((1, 6), 0.5))


# drift


def test_traffic_like_the_fit_gives_no_warning_and_other_traffic_does(fitted, rounds):
    _, judge = split_by_prompt(rounds, held_out=0.7, seed=1)
    assert drift_warnings(fitted, judge) == []
    flat = synthetic_rounds(4000, TEMPERATURES, level=-1.0, seed=8)
    assert any("another shape" in text for text in drift_warnings(fitted, flat))
    colder = replace(judge, temperature=0.0)
    assert drift_warnings(fitted, colder) == ["sampling temperature 0, fitted at 1"]
    law = replace(judge, domain_I=np.full(len(judge), "law"))
    assert "100 % of the rounds are of the domain 'law'" in drift_warnings(fitted, law)[0]
    # the same confidences, but fewer drafts survive
    worse = replace(judge, num_accepted_I=judge.num_accepted_I // 2)
    assert any("above what survived" in text for text in drift_warnings(fitted, worse))
    with pytest.raises(ValueError, match="these are calibrated"):
        drift_warnings(fitted, fitted.apply(judge))


def test_stability_index():
    assert stability_index((0.5, 0.5), (0.5, 0.5)) == 0
    assert stability_index((0.5, 0.5), (0.9, 0.1)) == pytest.approx(0.4 * np.log(1.8) + -0.4 * np.log(0.2))


# records


def test_a_trace_file_becomes_rounds(tmp_path):
    rows = [
        row(),
        row(gamma=3, draft_ids=[1, 2, 3], confidence=[0.9, 0.8, 0.7], accepted=[True] * 3, num_accepted=3,
            accept_prob=[1.0, 0.9, 0.8], target_entropy_bits=[0.0] * 3, draft_entropy_bits=[], prompt_id="p/1"),
        row(gamma=0, draft_ids=[], confidence=[], accepted=[], num_accepted=0, accept_prob=[], target_entropy_bits=[],
            draft_entropy_bits=[]),
    ]  # fmt: skip
    path = write_trace(tmp_path / "t.parquet", rows)
    for found in (read_rounds([path]), rounds_of_rows(rows)):
        assert (found.drafter, found.temperature, len(found), found.widest) == ("d", 1.0, 3, 3)
        assert found.prompts == ("p/0", "p/1") and found.has_confidence
        np.testing.assert_allclose(found.confidence_IG[0], [0.9, 0.5, np.nan], rtol=1e-6)
        assert found.proposed_IG.tolist() == [[True, True, False], [True] * 3, [False] * 3]
        assert found.survived_IG.tolist() == [[True, False, False], [True] * 3, [False] * 3]
        assert found.reached_IG.tolist() == [[True, True, False], [True] * 3, [False] * 3]
        assert np.isnan(found.draft_entropy_IG[1]).all()


def test_recorded_traces_are_found_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("DSPEC_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="recorded are none"):
        trace_paths()
    (tmp_path / "traces").mkdir()
    made = [write_trace(tmp_path / "traces" / name, [row()]) for name in ("b.parquet", "a.parquet")]
    assert trace_paths() == made[::-1] and trace_paths(["b.parquet"]) == made[:1]
    assert trace_paths([str(made[0])]) == made[:1]
    with pytest.raises(FileNotFoundError, match="recorded are a.parquet, b.parquet"):
        trace_paths(["c.parquet"])


def test_a_mixed_trace_needs_a_choice(tmp_path):
    rows = [row(), row(drafter="e"), row(temperature=0.7), row(drafter="f+sts")]
    path = write_trace(tmp_path / "t.parquet", rows)
    with pytest.raises(ValueError, match="more than one drafter, name one of d, e, f"):
        read_rounds([path])
    with pytest.raises(ValueError, match="more than one temperature, name one of 0.7, 1.0"):
        read_rounds([path], drafter="d")
    assert len(read_rounds([path], drafter="d", temperature=0.7)) == 1
    assert read_rounds([path], drafter="f+sts").calibrated
    with pytest.raises(ValueError, match="no drafter 'x'; it has d, e"):
        read_rounds([path], drafter="x")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_accepted": 3}, "accepts 3 of 2 drafts"),
        ({"confidence": [0.9]}, "1 values of confidence for 2 drafts"),
        ({"confidence": [0.9, 1.5]}, "confidence holds 1.5"),
    ],
)
def test_a_broken_row_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        rounds_of_rows([row(**change)])
