"""The audit's parts: honest code passes, faults FAIL wherever they are, what shows nothing is inconclusive."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dspec_lab.cli.main import main
from dspec_lab.config import VERIFICATIONS
from dspec_lab.core.streams import Chooser
from dspec_lab.verifier.audit import DRAFTERS, SAMPLED_MUTANTS, audit
from dspec_lab.verifier.audit_report import AuditReport, AuditRow, Seen
from dspec_lab.verifier.cases import SAMPLERS, scenarios
from dspec_lab.verifier.enumerate import (
    EnumeratingChooser,
    SharedNoiseError,
    max_deviation,
    output_law,
    total_variation,
)
from dspec_lab.verifier.exact_audit import exact_rows, tree_row
from dspec_lab.verifier.goodness import EvidenceAgainst, chi_square
from dspec_lab.verifier.mutants import MUTANTS


@pytest.fixture(scope="module")
def scenes() -> dict[str, Any]:
    script = Path(__file__).with_name("audit_scenes.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_planted_fault_fails_and_changes_the_law(mutant, scenes) -> None:
    row = scenes["rows"][f"mutant/{mutant.name}"]
    assert row["verdict"] == "FAIL", row["evidence"]
    assert row["value"] > 1e-5, "the fault changes no law: it proves nothing"


@pytest.mark.parametrize(
    ("name", "verdict", "words"),
    [
        ("code/residual", "FAIL", ""),
        ("code/accept", "FAIL", ""),
        ("code/filter", "FAIL", ""),
        ("code/one stream for a batch", "FAIL", "texts differ"),
        ("honest/ragged", "pass", "0 of 16"),
        ("nothing/proposed", "inconclusive", "nothing was proposed"),
        ("nothing/rejected", "inconclusive", "no draft was rejected"),
        ("nan/honest", "pass", "raised"),
        ("nan/hidden", "FAIL", "committed from it"),
        ("streams/honest", "pass", "would show with chance"),
        ("streams/shared", "FAIL", ""),
    ],
)
def test_verdicts(name: str, verdict: str, words: str, scenes) -> None:
    row = scenes["rows"][name]
    assert row["verdict"] == verdict, row["evidence"]
    assert words in row["evidence"]


def test_the_sequential_test_stops_as_soon_as_a_fault_is_proven(scenes) -> None:
    assert 10 < scenes["rows"]["streams/shared"]["runs"] < 2000


def test_a_length_chosen_after_the_token_leaks_as_the_counterexample_says(scenes) -> None:
    assert scenes["look_ahead"] == pytest.approx({"leak": 0.85, "honest": 0.7}, abs=1e-12)


def test_the_law_of_a_shared_number_is_the_one_that_sampling_gives(scenes) -> None:
    assert scenes["followed"]["total"] == pytest.approx(1, abs=1e-12)
    assert scenes["followed"]["own"] > 1e-4 and scenes["followed"]["wanted"] < 1e-4


def test_planted_faults_have_names_of_their_own_and_say_what_they_are() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names) and set(SAMPLED_MUTANTS) <= set(names)
    assert all(mutant.fault and "faults." not in mutant.name for mutant in MUTANTS)


def test_scenarios_cover_what_they_say() -> None:
    found = {scenario.name: scenario for scenario in scenarios()}
    assert any(scenario.target.probs.ndim == 3 for scenario in found.values())
    assert {scenario.gamma for scenario in found.values()} == {1, 2, 3}
    assert found["end token in the block"].target.eos_ids
    disjoint, holes = found["p and q disjoint"], found["zeros in p and q"]
    assert float(torch.minimum(disjoint.target.probs, disjoint.draft.probs).sum()) == 0
    assert torch.equal(found["p equals q"].target.probs, found["p equals q"].draft.probs)
    assert bool((holes.target.probs == 0).any() and (holes.draft.probs == 0).any())


def test_policies_are_audited_under_every_sampler_and_rule() -> None:
    policies = {"one draft": lambda proposal: min(1, proposal.gamma)}
    jobs = exact_rows(drafters=(), extra_drafters={}, policies=policies, quick=False)
    rows = [row for row in (job() for job in jobs) if row.subject == "one draft"]
    drawn = [name for name, sampling in SAMPLERS.items() if not sampling.greedy]
    assert [row.settings for row in rows] == [
        f"draft length policy, {name}, {rule}" for name in drawn for rule in VERIFICATIONS
    ]
    assert {row.verdict for row in rows} == {"pass"}


def test_trees_of_a_drafter_with_fewer_tokens_are_audited_greedy_too() -> None:
    row = tree_row("dspark")
    assert row.verdict == "pass"
    assert any(settings.startswith("T=0,") for settings in row.details["deviation_by_settings"])


# the enumerating chooser


def two_draws(chooser: Chooser) -> tuple[bool, int]:
    first = chooser.bernoulli("accept", 0, 0, 0.25)
    weights = [1.0, 0.0, 3.0] if first else [2.0, 2.0, 0.0]
    return first, chooser.categorical("replacement", 0, 0, torch.tensor(weights))


def test_an_output_law_is_exact_and_skips_what_cannot_happen() -> None:
    law = output_law(two_draws)
    assert law == {(True, 0): 0.0625, (True, 2): 0.1875, (False, 0): 0.375, (False, 1): 0.375}
    chooser = EnumeratingChooser()
    assert [chooser.chance for _ in chooser.paths()] == [1.0]


def test_a_number_drawn_twice_is_refused_by_name_or_followed() -> None:
    def shared(chooser: Chooser) -> int:
        token = chooser.categorical("draft", 3, 1, torch.tensor([0.5, 0.5]))
        return token if chooser.bernoulli("draft", 3, 1, 0.5) else -1

    with pytest.raises(SharedNoiseError, match="draft, round 3, slot 1"):
        output_law(shared)
    # as the streams would: token 0 has u < 0.5, so it is always accepted, and token 1 never
    assert output_law(shared, follow_shared=True) == {0: 0.5, -1: 0.5}


def test_code_that_is_not_a_function_of_its_draws_is_refused() -> None:
    calls: list[int] = []

    def impure(chooser: Chooser) -> int:
        calls.append(0)
        return chooser.categorical("draft", len(calls), 0, torch.tensor([1.0, 1.0]))

    with pytest.raises(RuntimeError, match="not a function of its draws"):
        output_law(impure)


def test_too_many_paths_and_bad_chances_are_refused() -> None:
    def many(chooser: Chooser) -> int:
        return sum(chooser.categorical("draft", 0, slot, torch.ones(4)) for slot in range(5))

    with pytest.raises(ValueError, match="more than 50"):
        output_law(many, max_runs=50)
    for bad in (1.5, -0.1, float("nan")):
        with pytest.raises(ValueError, match="accept in round 0, slot 0"):
            output_law(lambda chooser, p=bad: chooser.bernoulli("accept", 0, 0, p))
    with pytest.raises(ValueError, match="sum to 0"):
        output_law(lambda chooser: chooser.categorical("bonus", 0, 0, torch.zeros(3)))


def test_distances_of_laws() -> None:
    assert max_deviation({1: 0.75, 2: 0.25}, {1: 0.5, 3: 0.5}) == (0.5, 3)
    assert total_variation({1: 0.75, 2: 0.25}, {1: 0.5, 3: 0.5}) == 0.5
    assert max_deviation({}, {}) == (0.0, None)


# tests of samples


def test_chi_square_against_numbers_worked_by_hand() -> None:
    test = chi_square([({"a": 30, "b": 70}, {"a": 0.5, "b": 0.5})])
    assert (test.statistic, test.dof, test.samples) == (16.0, 1, 100)
    assert test.p_value == pytest.approx(6.334e-5, rel=1e-3)
    # rare outcomes share a cell; an outcome without chance decides at once
    merged = chi_square([({"a": 99, "b": 1}, {"a": 0.95, "b": 0.02, "c": 0.01, "d": 0.02})])
    assert merged.dof == 1
    assert chi_square([({"a": 5, "z": 1}, {"a": 1.0})]).p_value == 0.0
    assert chi_square([({"a": 6}, {"a": 1.0})]).dof == 0
    # w = 0.2 in 100 samples of 2 cells: noncentrality 4
    assert test.power(0.2, 0.05) == pytest.approx(0.516, abs=2e-3)


def test_evidence_stays_low_under_the_law_and_grows_against_another() -> None:
    law = {0: 0.5, 1: 0.3, 2: 0.2}
    rejected = 0
    for seed in range(60):
        evidence = EvidenceAgainst(law)
        for outcome in np.random.default_rng(seed).choice(3, size=80, p=[0.5, 0.3, 0.2]).tolist():
            evidence.add(outcome)
            if evidence.exceeds(0.05):
                rejected += 1
                break
    assert rejected <= 9  # at most 3 in expectation, whatever the stopping
    other = EvidenceAgainst(law)
    for outcome in np.random.default_rng(0).choice(3, size=400, p=[0.3, 0.4, 0.3]).tolist():
        other.add(outcome)
    assert other.exceeds(1e-4)
    impossible = EvidenceAgainst({0: 1.0})
    impossible.add(1)
    assert impossible.exceeds(1e-300)


# the report and the command


def test_a_report_is_ok_only_if_every_row_is_as_expected() -> None:
    good = AuditRow(check="c", subject="s", settings="", verdict="pass")
    caught = replace(good, verdict="FAIL", expected="FAIL")
    for rows, ok in (
        ((good, caught), True),
        ((good, replace(caught, verdict="pass")), False),
        ((replace(good, verdict="inconclusive"), caught), False),
        ((replace(good, verdict="FAIL"), caught), False),
        ((good, replace(caught, verdict="inconclusive")), False),
        ((), False),
    ):
        report = AuditReport(rows=rows, seed=0, quick=True, wall_s=1.0)
        assert report.ok is ok
        assert report.summary.startswith("lossless:") is ok
    infinite = replace(good, value=float("inf"), details={"log10_e": float("nan")}, seen=Seen(runs=1))
    text = json.dumps(AuditReport(rows=(infinite,), seed=0, quick=True, wall_s=1.0).as_dict(), allow_nan=False)
    assert '"log10_e": null' in text


@pytest.mark.parametrize(("verdict", "status"), [("pass", 0), ("FAIL", 1), ("inconclusive", 1)])
def test_the_exit_status_is_that_of_the_rows(verdict: Any, status: int, monkeypatch, capsys) -> None:
    row = AuditRow(check="c", subject="a drafter", settings="", verdict=verdict, evidence="what was seen")
    report = AuditReport(rows=(row,), seed=0, quick=True, wall_s=1.0)
    monkeypatch.setattr("dspec_lab.verifier.audit.audit", lambda **_: report)
    assert main(["audit", "--quick", "--no-model", "--json", "-"]) == status
    shown = capsys.readouterr()
    assert json.loads(shown.out)["ok"] is (status == 0)
    assert "a drafter" in shown.err and "what was seen" in shown.err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--drafters", ","], "no drafter"),
        (["--json", "/nowhere/at/all.json"], "/nowhere/at"),
        (["--samples", "5", "--no-model"], "5"),
    ],
)
def test_bad_options_exit_2_and_are_named(options: list[str], named: str, capsys) -> None:
    assert main(["audit", *options]) == 2
    error = capsys.readouterr().err
    assert named in error and error.count("\n") == 1


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="'nonsense'"):
        audit(drafters=["nonsense"])
    with pytest.raises(ValueError, match="-3"):
        audit(drafters=DRAFTERS, seed=-3)
    with pytest.raises(ValueError, match="10"):
        audit(drafters=DRAFTERS, samples=10)
