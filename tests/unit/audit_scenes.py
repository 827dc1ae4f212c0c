"""Run by test_audit_parts.py in a process of its own, without type checks: enumerations are many times faster there.

Prints what the audit says about honest code, planted faults and faults put into the code itself, as JSON.
"""

from __future__ import annotations

import json
from dataclasses import replace
from unittest import mock

from dspec_lab.core import rejection, sampling
from dspec_lab.core.streams import RandomStreams
from dspec_lab.core.types import Proposal
from dspec_lab.drafters.autoregressive import AutoregressiveDrafter
from dspec_lab.verifier import exact_audit, faults, ragged
from dspec_lab.verifier.batch_audit import ragged_row
from dspec_lab.verifier.cases import SAMPLERS, TABLE_DRAFTERS, AuditCase, ChangedDrafter, table
from dspec_lab.verifier.exact_audit import exact_law, mutant_row, nan_row, scenario_named, table_row
from dspec_lab.verifier.goodness import chi_square
from dspec_lab.verifier.mutants import MUTANTS
from dspec_lab.verifier.stream_audit import mutant_stream_row, stream_row

AUTOREGRESSIVE = TABLE_DRAFTERS["autoregressive"]
NAMED = {mutant.name: mutant for mutant in MUTANTS}


def said(row) -> dict:
    return {"verdict": row.verdict, "as_expected": row.as_expected, "evidence": row.evidence, "value": row.value}


def silent(scenario) -> ChangedDrafter:
    return ChangedDrafter(AutoregressiveDrafter(scenario.draft), lambda *_: Proposal(()), name="silent")


def rows() -> dict[str, dict]:
    found = {f"mutant/{name}": said(mutant_row(m, rule)) for name, m in NAMED.items() for rule in m.rules[-1:]}
    # faults of the code itself, not of a case
    with mock.patch.object(rejection, "residual_weights", lambda target_V, draft_V: target_V):
        found["code/residual"] = said(table_row("autoregressive", AUTOREGRESSIVE, "top-k 2", "token", True))
    with mock.patch.object(rejection, "accept_chance", lambda p_t, p_d: min(1.0, 1.01 * p_t / p_d)):
        found["code/accept"] = said(table_row("autoregressive", AUTOREGRESSIVE, "T=1", "token", True))
    with mock.patch.object(sampling, "_keep_top_k", lambda scaled_NV, k: scaled_NV):
        # p and q agree about the missing filter; the known law is worked out apart and does not
        found["code/filter"] = said(table_row("one_hot", TABLE_DRAFTERS["one_hot"], "top-k 2", "token", True))
    with mock.patch.object(ragged, "RandomStreams", lambda seed, request_id: RandomStreams(seed)):
        found["code/one stream for a batch"] = said(ragged_row(seed=0))
    found["honest/ragged"] = said(ragged_row(seed=0))
    # runs that show nothing
    found["nothing/proposed"] = said(table_row("silent", silent, "T=1", "token", True))
    oracle = table_row("oracle", lambda scenario: AutoregressiveDrafter(scenario.target), "T=1", "token", True)
    found["nothing/rejected"] = said(oracle)
    # NaN rows: honest, and hidden by the loop
    found["nan/honest"] = said(nan_row("token", 1.0))

    def hidden(case: AuditCase, after: int) -> AuditCase:
        return faults.with_target(case, lambda session: faults.Repaired(faults.NotFinite(session, after)))

    with mock.patch.object(exact_audit, "with_nan_rows", hidden):
        found["nan/hidden"] = said(nan_row("token", 1.0))
    # the real streams
    found["streams/honest"] = said(stream_row("block", samples=400, seed=7))
    shared = mutant_stream_row(NAMED["accept with the draft's number"], "token", samples=2000, seed=1)
    found["streams/shared"] = said(shared) | {"runs": shared.seen.runs}
    return found


def look_ahead_law() -> dict[str, float]:
    """Chance that the first token of the round is 0: p = (0.7, 0.3), q = (0.5, 0.5), token 1 taken back once drawn."""
    base = scenario_named("order 2").case(None, SAMPLERS["T=1"])
    case = AuditCase(
        target=table([[7, 3], [7, 3]]), drafter=AutoregressiveDrafter(table([[5, 5], [5, 5]])), prompt_ids=(0,),
        config=replace(base.config, gamma=1, max_new_tokens=3),
    )  # fmt: skip
    cases = {"leak": faults.with_drafter(faults.look_ahead)(case), "honest": case}
    return {
        name: sum(chance for text, chance in exact_law(one)[0].items() if text[1] == 0) for name, one in cases.items()
    }


def followed() -> dict[str, float]:
    """p-values of sampled texts of a fault, against its own enumerated law and against the law it should have."""
    scenario = scenario_named("order 2")
    case = scenario.case(AUTOREGRESSIVE(scenario), SAMPLERS["T=1"])
    case = NAMED["accept with the draft's number"].plant(case)
    law, _ = exact_law(case, follow_shared=True)
    counts: dict[tuple[int, ...], int] = {}
    for index in range(600):
        text = tuple(case.generation(RandomStreams(11, str(index))).token_ids)
        counts[text] = counts.get(text, 0) + 1
    wanted = scenario.law(SAMPLERS["T=1"])
    own, other = (chi_square([(counts, one)]).p_value for one in (law, wanted))
    return {"total": sum(law.values()), "own": own, "wanted": other}


if __name__ == "__main__":
    print(json.dumps({"rows": rows(), "look_ahead": look_ahead_law(), "followed": followed()}))
