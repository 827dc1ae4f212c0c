"""The losslessness audit: does what is decoded with a drafter have the target's law, and would the audit notice if not?

On targets whose law is known it is exact: the real loop runs once for each path of random outcomes. The real random
streams are tested by sampling, with stated power. Planted faults go through the same checks and must fail.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from dspec_lab.config import VERIFICATIONS
from dspec_lab.drafters.protocol import Drafter
from dspec_lab.verifier.audit_report import AuditReport, AuditRow
from dspec_lab.verifier.batch_audit import ragged_row
from dspec_lab.verifier.cases import TABLE_DRAFTERS, Policy, Scenario
from dspec_lab.verifier.exact_audit import exact_rows, mutant_row
from dspec_lab.verifier.mutants import MUTANTS
from dspec_lab.verifier.stream_audit import batch_independence_row, mutant_stream_row, stream_row
from dspec_lab.verifier.tiny import NEURAL_DRAFTERS

DRAFTERS = (*TABLE_DRAFTERS, *NEURAL_DRAFTERS)
# sampled, too: these share numbers, which the streams' addresses would not show
SAMPLED_MUTANTS = ("accept with the draft's number", "replace with the accept's number")

Job = Callable[[], AuditRow]
Progress = Callable[[str, int, int], None]


def check_samples(samples: int) -> int:
    """`samples`, if a sampled check can say anything with so many texts."""
    if samples < 100:
        raise ValueError(f"a sampled check needs at least 100 texts, got {samples}")
    return samples


def audit(
    *,
    drafters: Sequence[str] = DRAFTERS,
    extra_drafters: Mapping[str, Callable[[Scenario], Drafter]] | None = None,
    policies: Mapping[str, Policy] | None = None,
    more: Iterable[Job] = (),
    seed: int = 0,
    samples: int | None = None,
    quick: bool = False,
    progress: Progress | None = None,
) -> AuditReport:
    """Every check on every drafter named, and every planted fault.

    `extra_drafters` are made for each table scenario and audited beside the built-in ones; `policies` choose how many
    drafts are verified; `more` are further checks (those of a real model). `samples` is the number of texts of each
    sampled check. Raises `ValueError` for an unknown drafter.
    """
    unknown = [name for name in drafters if name not in DRAFTERS]
    if unknown:
        raise ValueError(f"the audit knows no drafter {unknown[0]!r}; it has {', '.join(DRAFTERS)}")
    if seed < 0:
        raise ValueError(f"seed must be 0 or more, got {seed}")
    samples = check_samples(samples if samples is not None else 400 if quick else 2000)
    jobs = exact_rows(drafters=drafters, extra_drafters=extra_drafters or {}, policies=policies or {}, quick=quick)
    jobs += [lambda r=rule: stream_row(r, samples=samples, seed=seed) for rule in VERIFICATIONS]
    jobs += [lambda: batch_independence_row(seed=seed), lambda: ragged_row(seed=seed)]
    jobs += more
    for mutant in MUTANTS:
        rules = mutant.rules[:1] if quick else mutant.rules
        jobs += [lambda m=mutant, r=rule: mutant_row(m, r) for rule in rules]
        if mutant.name in SAMPLED_MUTANTS:
            jobs.append(lambda m=mutant: mutant_stream_row(m, "token", samples=samples, seed=seed))
    start, rows = time.perf_counter(), []
    for index, job in enumerate(jobs):
        row = job()
        rows.append(row)
        if progress is not None:
            progress(f"{row.check}: {row.subject}, {row.settings}: {row.verdict}", index + 1, len(jobs))
    return AuditReport(rows=tuple(rows), seed=seed, quick=quick, wall_s=time.perf_counter() - start)
