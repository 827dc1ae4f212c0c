"""Planted faults: ways of decoding that look right and are not. The audit must give each of them the verdict FAIL.

Each is a change of an `AuditCase`: the real loop runs, with a wrapped target, drafter or chooser, or with another
verdict. What is wrong with each is told in `Mutant.fault`; all have been seen in real engines.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dspec_lab.config import Verification
from dspec_lab.verifier import faults
from dspec_lab.verifier.cases import with_confidence


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """One planted fault, and where it shows."""

    name: str
    fault: str
    plant: faults.Plant
    scenario: str = "order 2"
    sampler: str = "T=1"
    rules: tuple[Verification, ...] = ("token", "block")
    nan_after: int | None = None  # the target gives NaN after this token


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="accept with the draft's number",
        fault="the accept test uses the uniform that drew the draft token",
        plant=faults.with_chooser(lambda chooser: faults.Redirected(chooser, {"accept": "draft"})),
    ),
    Mutant(
        name="replace with the accept's number",
        fault="the replacement is drawn with the uniform of slot 0's accept test",
        plant=faults.with_chooser(lambda chooser: faults.Redirected(chooser, {"replacement": "accept"})),
    ),
    Mutant(
        name="draft numbers by position",
        fault="a discarded draft's uniform is used again in a later round, though block verification has looked at it",
        plant=faults.with_chooser(faults.ByPosition),
        rules=("block",),
    ),
    Mutant(
        name="unfiltered q",
        fault="the draft is sampled under top-k, the verifier is given q without the filter",
        plant=faults.with_drafter(faults.unfiltered_q),
        sampler="top-k 2",
    ),
    Mutant(
        name="rounded q",
        fault="the draft is sampled from bf16 logits, the verifier is given q from unrounded ones",
        plant=faults.with_drafter(faults.rounded_q),
    ),
    Mutant(
        name="argmax draft with dense q",
        fault="the draft takes the most likely token, the verifier is told that it was sampled",
        plant=faults.with_drafter(faults.argmax_with_dense_q),
    ),
    Mutant(
        name="greedy match",
        fault="drafts are compared with the target's most likely token though the temperature is above 0",
        plant=lambda case: replace(case, decide_with=faults.greedy_match),
    ),
    Mutant(
        name="residual without q",
        fault="the replacement is drawn from p, q is not subtracted",
        plant=faults.other_extra(faults.p_itself),
    ),
    Mutant(
        name="residual by absolute value",
        fault="|p - q| in place of max(p - q, 0)",
        plant=faults.other_extra(faults.unclipped),
    ),
    Mutant(
        name="residual not renormalised",
        fault="the uniform is compared with the residual's own mass, the rest falls to the last token",
        plant=faults.other_extra(faults.not_renormalised),
    ),
    Mutant(
        name="token residual in a block",
        fault="block verification's prefix with the token-wise residual",
        plant=faults.other_extra(faults.token_residual),
        scenario="zeros in p and q",
        rules=("block",),
    ),
    Mutant(
        name="bonus from q",
        fault="the bonus token is drawn from the drafter's last row",
        plant=faults.other_extra(faults.bonus_from_q),
    ),
    Mutant(
        name="look-ahead",
        fault="a drafted token is verified or not depending on that very token",
        plant=faults.with_drafter(faults.look_ahead),
    ),
    Mutant(
        name="retrospective search",
        fault="the draft length with the best gain of all lengths, found behind a drop",
        plant=lambda case: replace(case, policy=faults.retrospective, drafter=with_confidence(case.drafter)),  # type: ignore[arg-type]
        scenario="confidence varies",
    ),
    Mutant(
        name="KV off by one",
        fault="after a rejection one rejected token stays in the target's cache",
        plant=lambda case: faults.with_target(case, faults.LateRollback),
    ),
    Mutant(
        name="NaN row committed",
        fault="a row of NaN is turned into zeros and a token is committed from it",
        plant=lambda case: faults.with_target(case, faults.Repaired),
        nan_after=1,
    ),
)
