"""Checks by sampling: the real random streams on a table target, whole texts and the tokens drawn by the verifier."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace

from dspec_lab.config import VERIFICATIONS
from dspec_lab.core.streams import RandomStreams
from dspec_lab.core.types import Generation
from dspec_lab.verifier.audit_report import AuditRow, Outcome, Seen
from dspec_lab.verifier.cases import SAMPLERS, TABLE_DRAFTERS, AuditCase, Scenario
from dspec_lab.verifier.exact_audit import scenario_named, seen_in
from dspec_lab.verifier.goodness import ChiSquare, EvidenceAgainst, chi_square
from dspec_lab.verifier.mutants import Mutant

ALPHA = 1e-4  # a check of a lossless loop fails by chance this often
EFFECT = 0.2  # the law that a check would miss differs by less; its total variation is below 0.1
SCENARIO = "order 2"
GROUPS = ("texts", "replacement tokens", "bonus tokens")


def stream_row(
    rule: str,
    *,
    samples: int,
    seed: int,
    plant: Callable[[AuditCase], AuditCase] | None = None,
    subject: str = "autoregressive",
    fault: str | None = None,
) -> AuditRow:
    """Texts of `samples` requests against the known law. A fault shows early, so sampling stops once it is proven.

    Three chi-square tests (texts; replacement and bonus tokens of first rounds, given what was drafted) at ALPHA / 3
    each, and the running evidence on the texts, which alone decides when to stop.
    """
    start, scenario = time.perf_counter(), scenario_named(SCENARIO)
    sampling = SAMPLERS["T=1"]
    case = scenario.case(TABLE_DRAFTERS["autoregressive"](scenario), sampling, rule)
    if plant is not None:
        case = plant(case)
    wanted = scenario.law(sampling)
    evidence, texts, seen = EvidenceAgainst(wanted), Counter[tuple[int, ...]](), Seen()
    extra: dict[str, dict[tuple[int, ...], Counter[int]]] = {name: defaultdict(Counter) for name in GROUPS[1:]}
    for index in range(samples):
        generation = case.generation(RandomStreams(seed, f"audit {index}"))
        text = tuple(generation.token_ids)
        texts[text] += 1
        evidence.add(text)
        seen += seen_in(generation)
        _note_extra(generation, extra)
        if evidence.exceeds(ALPHA):
            break
    tests = {"texts": chi_square([(texts, wanted)])}
    for name, groups in extra.items():
        tests[name] = chi_square((counts, _extra_law(scenario, key, name, rule)) for key, counts in groups.items())
    lowest = min(GROUPS, key=lambda name: tests[name].p_value)
    return AuditRow(
        check="random streams" if fault is None else "planted fault",
        subject=subject,
        settings=f"T=1, {rule}, {seen.runs} texts",
        verdict=_verdict(tests, evidence, seen),
        expected="pass" if fault is None else "FAIL",
        evidence=_words(tests, lowest, evidence),
        value=tests[lowest].p_value,
        limit=ALPHA / len(tests),
        seen=seen,
        details={
            "fault": fault,
            "alpha": ALPHA,
            "effect": EFFECT,
            "log10_e": evidence.log10_e,
            "tests": {name: _numbers(test, len(tests)) for name, test in tests.items()},
        },
        wall_s=time.perf_counter() - start,
    )


def mutant_stream_row(mutant: Mutant, rule: str, *, samples: int, seed: int) -> AuditRow:
    """A planted fault under the real streams, where numbers are shared without any address being drawn twice."""
    return stream_row(
        rule, samples=samples, seed=seed, plant=mutant.plant, subject=f"{mutant.name} (sampled)", fault=mutant.fault
    )


def batch_independence_row(*, seed: int) -> AuditRow:
    """A request's text must not change with what other requests or other purposes draw, before or in between."""
    start, scenario = time.perf_counter(), scenario_named(SCENARIO)
    changed, seen = 0, Seen()
    for rule in VERIFICATIONS:
        case = scenario.case(TABLE_DRAFTERS["autoregressive"](scenario), SAMPLERS["T=1"], rule)
        for index in range(20):
            alone = case.generation(RandomStreams(seed, str(index)))
            busy = replace(case, wrap_chooser=lambda chooser: _Busy(chooser, seed))
            among = busy.generation(RandomStreams(seed, str(index)))
            changed += alone.token_ids != among.token_ids
            seen += seen_in(alone)
    return AuditRow(
        check="neighbours change nothing",
        subject="autoregressive",
        settings="T=1, token and block",
        verdict="FAIL" if changed else "inconclusive" if seen.missing else "pass",
        evidence=f"{changed} of {seen.runs} texts changed by other requests' draws in between",
        value=float(changed),
        limit=0.0,
        seen=seen,
        wall_s=time.perf_counter() - start,
    )


class _Busy:
    """A chooser between whose draws a neighbour's streams and the process-wide generators are drawn from."""

    def __init__(self, inner: RandomStreams, seed: int) -> None:
        self._inner, self._neighbour = inner, RandomStreams(seed, "neighbour")

    def categorical(self, purpose, round_index, slot, probs_V):  # type: ignore[no-untyped-def]
        self._disturb(purpose, round_index, slot)
        return self._inner.categorical(purpose, round_index, slot, probs_V)

    def bernoulli(self, purpose, round_index, slot, prob):  # type: ignore[no-untyped-def]
        self._disturb(purpose, round_index, slot)
        return self._inner.bernoulli(purpose, round_index, slot, prob)

    def _disturb(self, purpose, round_index, slot):  # type: ignore[no-untyped-def]
        import torch

        self._neighbour.uniforms(purpose, round_index, slot + 1)
        self._inner.uniforms("plain", round_index, slot + 7)
        torch.rand(3)


def _note_extra(generation: Generation, extra: dict[str, dict[tuple[int, ...], Counter[int]]]) -> None:
    record = generation.rounds[0]
    kind = "bonus tokens" if record.num_accepted == record.gamma else "replacement tokens"
    # what the law of the extra token depends on: the anchor, the drafts, and how many were kept
    key = (generation.token_ids[0], record.num_accepted, *record.draft_ids)
    extra[kind][key][record.next_token] += 1


def _extra_law(scenario: Scenario, key: tuple[int, ...], kind: str, rule: str) -> dict[int, float]:
    """p behind a whole block, else max(w p - q, 0) normalised; w is 1 token-wise. Plain Python on the tables."""
    anchor, kept, *drafts = key
    context, weight = [*scenario.prompt_ids, anchor], 1.0
    for token in drafts[:kept]:
        p, q = scenario.target.law_after(context).tolist(), scenario.draft.law_after(context).tolist()
        weight = min(1.0, weight * p[token] / q[token]) if rule == "block" else 1.0
        context.append(token)
    p, q = scenario.target.law_after(context).tolist(), scenario.draft.law_after(context).tolist()
    left = p if kind == "bonus tokens" else [max(weight * a - b, 0.0) for a, b in zip(p, q, strict=True)]
    return {token: mass / sum(left) for token, mass in enumerate(left)}


def _verdict(tests: dict[str, ChiSquare], evidence: EvidenceAgainst, seen: Seen) -> Outcome:
    if evidence.exceeds(ALPHA) or any(test.p_value < ALPHA / len(tests) for test in tests.values()):
        return "FAIL"
    return "inconclusive" if seen.missing or any(test.dof == 0 for test in tests.values()) else "pass"


def _words(tests: dict[str, ChiSquare], lowest: str, evidence: EvidenceAgainst) -> str:
    power = tests["texts"].power(EFFECT, ALPHA / len(tests))
    return (
        f"lowest p {tests[lowest].p_value:.2g} ({lowest}), evidence against 10^{evidence.log10_e:.1f}; "
        f"a law off by w = {EFFECT} would show with chance {power:.2f}"
    )


def _numbers(test: ChiSquare, tests: int) -> dict[str, float]:
    return {
        "statistic": test.statistic,
        "dof": test.dof,
        "samples": test.samples,
        "p_value": test.p_value,
        "power": test.power(EFFECT, ALPHA / tests),
    }
