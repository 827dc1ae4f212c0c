"""Checks by enumeration: the exact output law of the real loop against the law it must have."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dspec_lab.config import VERIFICATIONS, DecodeConfig
from dspec_lab.core.sampling import NonFiniteLogitsError
from dspec_lab.core.streams import Chooser, RandomStreams
from dspec_lab.core.types import Generation
from dspec_lab.drafters.protocol import Drafter
from dspec_lab.verifier.audit_report import AuditRow, Outcome, Seen
from dspec_lab.verifier.cases import (
    SAMPLERS,
    TABLE_DRAFTERS,
    AuditCase,
    Policy,
    Scenario,
    scenarios,
    with_confidence,
)
from dspec_lab.verifier.enumerate import SharedNoiseError, max_deviation, output_law, total_variation
from dspec_lab.verifier.faults import with_nan_rows
from dspec_lab.verifier.known_law import Sequences
from dspec_lab.verifier.mutants import Mutant
from dspec_lab.verifier.tiny import NEURAL_DRAFTERS, tiny_decoder

# float64 tables: sums of a few thousand rounded products
TABLE_LIMIT = 1e-12
# fp32 decoders: each probability is rounded at 6e-8, and a text is the product of a few
DECODER_LIMIT = 1e-6
TREE_WIDTH = 2
GREEDY_LENGTH = 24  # one run only, so texts can be long
QUICK_SCENARIOS = ("order 2", "end token in the block")
# a draft that is sampled and then read as one-hot accepts less surely, which multiplies the paths
MANY_PATHS: Mapping[str, tuple[str, ...]] = {"sampled_as_one_hot": ("order 2",)}


def exact_law(case: AuditCase, *, follow_shared: bool = False) -> tuple[Sequences, Seen]:
    """The law of the case's texts, and what was seen on the way."""
    seen = Seen()

    def run(chooser: Chooser) -> tuple[int, ...]:
        nonlocal seen
        generation = case.generation(chooser)
        seen += seen_in(generation)
        return tuple(generation.token_ids)

    return output_law(run, follow_shared=follow_shared), seen


def seen_in(generation: Generation) -> Seen:
    """Counts of one run."""
    return Seen(
        runs=1,
        proposed=generation.num_proposed,
        accepted=generation.num_accepted,
        rejected=sum(record.num_accepted < record.gamma for record in generation.rounds),
    )


def table_row(drafter: str, make: Callable[[Scenario], Drafter], sampler: str, rule: str, quick: bool) -> AuditRow:
    """One drafter, sampler and rule on all table targets."""
    start, sampling = time.perf_counter(), SAMPLERS[sampler]
    seen, worst, worst_at, gaps = Seen(), 0.0, "", {}
    for scenario in scenarios():
        if sampling.greedy:
            scenario = replace(scenario, length=GREEDY_LENGTH)
        elif scenario.name not in MANY_PATHS.get(drafter, (scenario.name,)):
            continue
        elif not scenario.core and sampler != "T=1":
            continue
        elif quick and scenario.name not in QUICK_SCENARIOS:
            continue
        found, here = exact_law(scenario.case(make(scenario), sampling, rule))
        gap, _ = max_deviation(found, scenario.law(sampling))
        seen, gaps[scenario.name] = seen + here, gap
        if gap >= worst:
            worst, worst_at = gap, scenario.name
    return AuditRow(
        check="exact law",
        subject=drafter,
        settings=f"{sampler}, {rule}",
        verdict=_verdict(worst, TABLE_LIMIT, seen),
        evidence=_evidence(worst, seen, f"worst: {worst_at}"),
        value=worst,
        limit=TABLE_LIMIT,
        seen=seen,
        details={"deviation_by_scenario": gaps},
        wall_s=time.perf_counter() - start,
    )


def neural_row(drafter: str, rule: str, plain: tuple[Sequences, Sequences]) -> AuditRow:
    """A random neural drafter on a random decoder, against plain decoding of it; sampled and greedy."""
    start = time.perf_counter()
    target = tiny_decoder()
    seen, gaps = Seen(), {}
    for config, wanted in zip(neural_configs(rule), plain, strict=True):
        case = AuditCase(target=target, drafter=NEURAL_DRAFTERS[drafter](target), prompt_ids=(0, 1), config=config)
        found, here = exact_law(case)
        seen, gaps[f"T={config.temperature:g}"] = seen + here, max_deviation(found, wanted)[0]
    worst = max(gaps.values())
    return AuditRow(
        check="exact law",
        subject=drafter,
        settings=f"random decoder, T=1 top-k 2 and T=0, {rule}",
        verdict=_verdict(worst, DECODER_LIMIT, seen),
        evidence=_evidence(worst, seen, "against plain decoding, fp32"),
        value=worst,
        limit=DECODER_LIMIT,
        seen=seen,
        details={"deviation_by_temperature": gaps},
        wall_s=time.perf_counter() - start,
    )


def tree_row(drafter: str) -> AuditRow:
    """Two candidates per position of a random drafter on a random decoder, verified as a tree; sampled and greedy."""
    start, target = time.perf_counter(), tiny_decoder()
    made = NEURAL_DRAFTERS[drafter](target)
    deep, greedy = neural_configs("token")
    # one position with all three tokens, two positions with two of them, and the greedy text
    configs = [replace(deep, gamma=1, top_k=0, max_new_tokens=3), deep, greedy]
    seen, gaps = Seen(), {}
    for config in configs:
        honest = AuditCase(target=target, drafter=None, prompt_ids=(0, 1), config=config)
        wanted, _ = exact_law(honest)
        found, here = exact_law(replace(honest, drafter=made, width=TREE_WIDTH))
        what = f"T={config.temperature:g}, top-k {config.top_k}, gamma {config.gamma}"
        seen, gaps[what] = seen + here, max_deviation(found, wanted)[0]
    worst = max(gaps.values())
    return AuditRow(
        check="exact law",
        subject=drafter,
        settings=f"random decoder, T=1 and T=0, tree of width {TREE_WIDTH}",
        verdict=_verdict(worst, DECODER_LIMIT, seen),
        evidence=_evidence(worst, seen, "against plain decoding, fp32"),
        value=worst,
        limit=DECODER_LIMIT,
        seen=seen,
        details={"deviation_by_settings": gaps},
        wall_s=time.perf_counter() - start,
    )


def neural_configs(rule: str) -> tuple[DecodeConfig, DecodeConfig]:
    """The settings a neural drafter is enumerated under."""
    sampled = DecodeConfig(gamma=2, temperature=1.0, top_k=2, max_new_tokens=4, verification=rule)  # type: ignore[arg-type]
    return sampled, replace(sampled, temperature=0.0, top_k=0, max_new_tokens=GREEDY_LENGTH)


def plain_laws() -> tuple[Sequences, Sequences]:
    """Plain decoding of the random decoder under `neural_configs`."""
    target = tiny_decoder()
    cases = [AuditCase(target=target, drafter=None, prompt_ids=(0, 1), config=c) for c in neural_configs("token")]
    return exact_law(cases[0])[0], exact_law(cases[1])[0]


def policy_row(name: str, policy: Policy, sampler: str, rule: str) -> AuditRow:
    """How many drafts are verified is chosen by `policy` from their confidences."""
    start, sampling = time.perf_counter(), SAMPLERS[sampler]
    scenario = scenario_named("confidence varies")
    case = scenario.case(with_confidence(TABLE_DRAFTERS["autoregressive"](scenario)), sampling, rule)
    found, seen = exact_law(replace(case, policy=policy))
    wanted = scenario.law(sampling)
    gap = max_deviation(found, wanted)[0]
    return AuditRow(
        check="exact law",
        subject=name,
        settings=f"draft length policy, {sampler}, {rule}",
        verdict=_verdict(gap, TABLE_LIMIT, seen),
        evidence=_evidence(gap, seen, f"on {scenario.name!r}"),
        value=gap,
        limit=TABLE_LIMIT,
        seen=seen,
        wall_s=time.perf_counter() - start,
    )


def mutant_row(mutant: Mutant, rule: str) -> AuditRow:
    """A planted fault on the table targets. It fails by a number drawn twice, or by its law."""
    start, sampling = time.perf_counter(), SAMPLERS[mutant.sampler]
    scenario = scenario_named(mutant.scenario)
    case = scenario.case(TABLE_DRAFTERS["autoregressive"](scenario), sampling, rule)
    if mutant.nan_after is not None:
        case = with_nan_rows(case, mutant.nan_after)
    case = mutant.plant(case)
    refused = ""
    try:
        found, seen = exact_law(case)
    except SharedNoiseError as error:
        refused = str(error)
        found, seen = exact_law(case, follow_shared=True)
    wanted = scenario.law(sampling)
    gap, variation = max_deviation(found, wanted)[0], total_variation(found, wanted)
    notes = [f"total variation {variation:.2g}", *([refused] if refused else [])]
    return AuditRow(
        check="planted fault",
        subject=mutant.name,
        settings=f"{mutant.sampler}, {rule}",
        verdict="FAIL" if refused else _verdict(gap, TABLE_LIMIT, seen),
        expected="FAIL",
        evidence=_evidence(gap, seen, "; ".join(notes)),
        value=gap,
        limit=TABLE_LIMIT,
        seen=seen,
        details={"fault": mutant.fault, "total_variation": variation, "drawn_twice": refused or None},
        wall_s=time.perf_counter() - start,
    )


def nan_row(rule: str, temperature: float) -> AuditRow:
    """A target that gives NaN after one token: the honest loop must raise, and name the row."""
    start, scenario = time.perf_counter(), scenario_named("order 2")
    sampling = SAMPLERS["T=0" if temperature == 0 else "T=1"]
    case = with_nan_rows(scenario.case(TABLE_DRAFTERS["autoregressive"](scenario), sampling, rule), NAN_AFTER)
    raised, committed, messages = 0, 0, set()
    for seed in range(20):
        try:
            ids = case.generation(RandomStreams(seed)).token_ids
        except NonFiniteLogitsError as error:
            raised += 1
            messages.add(str(error))
        else:
            committed += NAN_AFTER in ids[:-1]
    verdict: Outcome = "FAIL" if committed else "pass" if raised else "inconclusive"
    return AuditRow(
        check="NaN rows raise",
        subject="autoregressive",
        settings=f"T={temperature:g}, {rule}",
        verdict=verdict,
        evidence=f"{raised} of 20 runs met such a row and raised, {committed} committed from it",
        value=float(committed),
        limit=0.0,
        details={"messages": sorted(messages)},
        wall_s=time.perf_counter() - start,
    )


NAN_AFTER = 1


def scenario_named(name: str) -> Scenario:
    """The scenario of that name."""
    return next(scenario for scenario in scenarios() if scenario.name == name)


def exact_rows(
    *,
    drafters: Sequence[str],
    extra_drafters: Mapping[str, Callable[[Scenario], Drafter]],
    policies: Mapping[str, Policy],
    quick: bool,
) -> list[Callable[[], AuditRow]]:
    """The honest checks by enumeration, to be called one by one."""
    jobs: list[Callable[[], AuditRow]] = []
    makers = {**{name: make for name, make in TABLE_DRAFTERS.items() if name in drafters}, **extra_drafters}
    samplers = ("T=1", "top-k 2", "T=0") if quick else tuple(SAMPLERS)
    # drafters are run under both rules in any case
    rules = VERIFICATIONS[:1] if quick else VERIFICATIONS
    for name, make in makers.items():
        for sampler in samplers:
            for rule in VERIFICATIONS:
                jobs.append(lambda n=name, m=make, s=sampler, r=rule: table_row(n, m, s, r, quick))
    for name, policy in policies.items():
        # a greedy draft has no law whose largest chance could serve as its confidence
        for sampler in (s for s in samplers if not SAMPLERS[s].greedy):
            jobs += [lambda n=name, p=policy, s=sampler, r=rule: policy_row(n, p, s, r) for rule in rules]
    neural = [name for name in NEURAL_DRAFTERS if name in drafters]
    if neural:
        held: list[Any] = []

        def plain() -> tuple[Sequences, Sequences]:
            held[:] = held or [plain_laws()]
            return held[0]

        jobs += [lambda n=name, r=rule: neural_row(n, r, plain()) for name in neural for rule in rules]
        jobs += [lambda n=name: tree_row(n) for name in (neural[:1] if quick else neural)]
    jobs += [lambda r=rule, t=t: nan_row(r, t) for rule in VERIFICATIONS for t in (0.0, 1.0)]
    return jobs


def _verdict(gap: float, limit: float, seen: Seen) -> Outcome:
    if not gap <= limit:
        return "FAIL"
    return "inconclusive" if seen.missing else "pass"


def _evidence(gap: float, seen: Seen, note: str) -> str:
    missing = f"; {seen.missing}" if seen.missing else ""
    return f"largest difference of a text's chance {gap:.1e} over {seen.runs} paths; {note}{missing}"
