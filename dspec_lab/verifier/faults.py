"""The parts that planted faults are made of: wrapped choosers, verdicts, drafters and targets that get one thing wrong.

The real loop runs around them. `verifier.mutants` lists the faults.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dspec_lab.config import DecodeConfig, SamplingConfig
from dspec_lab.core.rejection import LazyLaw, draft_rows, residual_probs, verify_greedy
from dspec_lab.core.sampling import law
from dspec_lab.core.streams import Chooser, DraftDraws, Purpose
from dspec_lab.core.types import Proposal, Verdict
from dspec_lab.drafters.protocol import DraftSession
from dspec_lab.models.protocol import Taps, Target, TargetRows, TargetSession
from dspec_lab.verifier.cases import AuditCase, ChangedDrafter, Propose, gains
from dspec_lab.verifier.request import PREFILL_ROUND, decide

Plant = Callable[[AuditCase], AuditCase]


# --- choosers -------------------------------------------------------------------------------------------------------


class Redirected:
    """A chooser that reads some purposes' numbers from another purpose's address."""

    def __init__(self, inner: Chooser, purposes: dict[Purpose, Purpose]) -> None:
        self._inner, self._purposes = inner, purposes

    def categorical(self, purpose: Purpose, round_index: int, slot: int, probs_V: Tensor) -> int:
        """Drawn with the number of the purpose it is redirected to."""
        return self._inner.categorical(self._to(purpose, round_index), round_index, slot, probs_V)

    def bernoulli(self, purpose: Purpose, round_index: int, slot: int, prob: float) -> bool:
        """Decided with the number of the purpose it is redirected to."""
        return self._inner.bernoulli(self._to(purpose, round_index), round_index, slot, prob)

    def _to(self, purpose: Purpose, round_index: int) -> Purpose:
        return purpose if round_index == PREFILL_ROUND else self._purposes.get(purpose, purpose)


class ByPosition:
    """A chooser whose draft numbers belong to text positions, not to rounds: a discarded draft's number comes again."""

    def __init__(self, inner: Chooser) -> None:
        self._inner = inner
        self._position, self._kept = 0, 0

    def categorical(self, purpose: Purpose, round_index: int, slot: int, probs_V: Tensor) -> int:
        """Draft slot k of any round draws with the number of its position in the text."""
        if purpose == "draft":
            return self._inner.categorical("draft", 0, self._position + slot, probs_V)
        token = self._inner.categorical(purpose, round_index, slot, probs_V)
        if purpose in ("replacement", "bonus") and round_index != PREFILL_ROUND:
            self._position += self._kept + 1
            self._kept = 0
        return token

    def bernoulli(self, purpose: Purpose, round_index: int, slot: int, prob: float) -> bool:
        """Unchanged; keeps count of the drafts that were accepted."""
        accepted = self._inner.bernoulli(purpose, round_index, slot, prob)
        if accepted:
            self._kept = slot + 1
        return accepted


class OtherExtra:
    """A chooser that draws the extra token of a round from `change(source, row, probs)` in place of its law."""

    def __init__(self, inner: Chooser, change: Callable[[str, int, Tensor], Tensor], gamma: int, rule: str) -> None:
        self._inner, self._change = inner, change
        # the row of the first rejection: token-wise the slot that fails, by blocks one past the longest that passes
        self._row = gamma if rule == "token" else 0
        self._rule = rule

    def categorical(self, purpose: Purpose, round_index: int, slot: int, probs_V: Tensor) -> int:
        """Drawn from the changed law."""
        row = self._row
        return self._inner.categorical(purpose, round_index, slot, self._change(purpose, row, probs_V))

    def bernoulli(self, purpose: Purpose, round_index: int, slot: int, prob: float) -> bool:
        """Unchanged; remembers where the block was cut."""
        accepted = self._inner.bernoulli(purpose, round_index, slot, prob)
        if self._rule == "token" and not accepted:
            self._row = slot
        if self._rule == "block" and accepted:
            self._row = slot + 1
        return accepted


def with_chooser(wrap: Callable[[Chooser], Chooser]) -> Plant:
    """Plants a wrapped chooser."""
    return lambda case: replace(case, wrap_chooser=wrap)


# --- verdicts -------------------------------------------------------------------------------------------------------


def greedy_match(
    rows: TargetRows, proposal: Proposal, config: DecodeConfig, chooser: Chooser, round_index: int
) -> Verdict:
    """Keeps the drafts that equal the target's most likely token, at any temperature."""
    return verify_greedy(rows.logits_JV, proposal)


def other_extra(change: Callable[[str, Tensor, Tensor, Tensor], Tensor]) -> Plant:
    """Plants `change(source, p row, q row or last q row, probs)` as the law of the extra token."""

    def decide_with(
        rows: TargetRows, proposal: Proposal, config: DecodeConfig, chooser: Chooser, round_index: int
    ) -> Verdict:
        target_JV = LazyLaw(rows.logits_JV, config.sampling).dense()
        draft_GV = draft_rows(proposal, target_JV[: proposal.gamma])

        def changed(source: str, row: int, probs_V: Tensor) -> Tensor:
            if proposal.gamma == 0:
                return probs_V
            return change(source, target_JV[row], draft_GV[min(row, proposal.gamma - 1)], probs_V)

        wrapped = OtherExtra(chooser, changed, proposal.gamma, config.verification)
        return decide(rows, proposal, config, wrapped, round_index)

    return lambda case: replace(case, decide_with=decide_with)


def p_itself(source: str, target_V: Tensor, draft_V: Tensor, probs_V: Tensor) -> Tensor:
    """p where the residual belongs."""
    return target_V if source == "replacement" else probs_V


def unclipped(source: str, target_V: Tensor, draft_V: Tensor, probs_V: Tensor) -> Tensor:
    """|p - q| where max(p - q, 0) belongs."""
    return (target_V - draft_V).abs() if source == "replacement" else probs_V


def not_renormalised(source: str, target_V: Tensor, draft_V: Tensor, probs_V: Tensor) -> Tensor:
    """max(p - q, 0) as if it had mass 1 already."""
    # a uniform beyond the residual's mass falls off the end of the cumulative sum, onto the last token
    if source != "replacement":
        return probs_V
    left_V = (target_V - draft_V).clamp_min(0)
    left_V[-1] += 1 - left_V.sum()
    return left_V


def token_residual(source: str, target_V: Tensor, draft_V: Tensor, probs_V: Tensor) -> Tensor:
    """max(p - q, 0) where block verification's weight on p belongs."""
    return residual_probs(target_V[None], draft_V[None])[0] if source == "replacement" else probs_V


def bonus_from_q(source: str, target_V: Tensor, draft_V: Tensor, probs_V: Tensor) -> Tensor:
    """The drafter's last row where p belongs."""
    return draft_V if source == "bonus" else probs_V


# --- drafters -------------------------------------------------------------------------------------------------------


def with_drafter(propose: Propose) -> Plant:
    """Plants a drafter that proposes through `propose`."""

    def plant(case: AuditCase) -> AuditCase:
        if case.drafter is None:
            raise ValueError("plain decoding has no drafter to plant a fault in")
        return replace(case, drafter=ChangedDrafter(case.drafter, propose, name=f"{case.drafter.name} (faulty)"))

    return plant


def unfiltered_q(session: DraftSession, gamma: int, sampling: SamplingConfig, draws: DraftDraws) -> Proposal:
    """Sampled under the filters, handed over without them."""
    proposal = session.propose(gamma, sampling, draws)
    if proposal.draft_logits_GV is None:
        return proposal
    return replace(proposal, draft_probs_GV=torch.softmax(proposal.draft_logits_GV, -1))


def argmax_with_dense_q(session: DraftSession, gamma: int, sampling: SamplingConfig, draws: DraftDraws) -> Proposal:
    """The most likely tokens, with the law as if they had been sampled."""
    proposal = session.propose(gamma, SamplingConfig(temperature=0.0), draws)
    if proposal.draft_logits_GV is None:
        return proposal
    return replace(proposal, draft_probs_GV=law(proposal.draft_logits_GV, sampling))


class _RoundedDraws(DraftDraws):
    """Draws from bf16-rounded rows; the rows handed to the verifier are not rounded."""

    __slots__ = ("_inner",)

    def __init__(self, inner: DraftDraws) -> None:
        self._inner = inner

    def categorical(self, slot: int, probs_V: Tensor) -> int:
        return self._inner.categorical(slot, torch.softmax(probs_V.log().bfloat16().float(), -1))


def rounded_q(session: DraftSession, gamma: int, sampling: SamplingConfig, draws: DraftDraws) -> Proposal:
    """Sampled from bf16-rounded rows, handed over unrounded."""
    return session.propose(gamma, sampling, _RoundedDraws(draws))


def look_ahead(session: DraftSession, gamma: int, sampling: SamplingConfig, draws: DraftDraws) -> Proposal:
    """Cut before the first token that is not the drafter's favourite, once it is known."""
    # whether token k is verified depends on x_k: an unlikely token is taken back and drawn anew by the target
    proposal = session.propose(gamma, sampling, draws)
    if proposal.draft_probs_GV is None:
        return proposal
    favourites = proposal.draft_probs_GV.argmax(-1).tolist()
    pairs = zip(proposal.token_ids, favourites, strict=True)
    keep = next((k for k, (token, favourite) in enumerate(pairs) if token != favourite), proposal.gamma)
    return proposal.prefix(keep)


# --- targets --------------------------------------------------------------------------------------------------------


class ChangedTarget:
    """A target whose sessions are wrapped; all else is the inner target's."""

    def __init__(self, inner: Target, wrap: Callable[[TargetSession], TargetSession]) -> None:
        self._inner, self._wrap = inner, wrap

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def session(self, *, capacity: int, taps: Taps | None = None) -> TargetSession:
        """The inner session, wrapped; with room for what a faulty rollback leaves behind."""
        return self._wrap(self._inner.session(capacity=min(4 * capacity, self._inner.max_context), taps=taps))


class LateRollback:
    """A session that keeps one rejected token too many in its cache."""

    def __init__(self, inner: TargetSession) -> None:
        self._inner = inner

    @property
    def length(self) -> int:
        """Tokens held."""
        return self._inner.length

    def extend(self, token_ids: Sequence[int], *, logit_rows: int | None = None) -> TargetRows:
        """Handed on."""
        return self._inner.extend(token_ids, logit_rows=logit_rows)

    def truncate(self, length: int) -> None:
        """One token short of the rollback asked for."""
        self._inner.truncate(min(length + 1, self._inner.length))


class NotFinite:
    """A session whose law after token `after` is NaN."""

    def __init__(self, inner: TargetSession, after: int) -> None:
        self._inner, self._after = inner, after

    @property
    def length(self) -> int:
        """Tokens held."""
        return self._inner.length

    def extend(self, token_ids: Sequence[int], *, logit_rows: int | None = None) -> TargetRows:
        """The inner rows, NaN where they follow the token."""
        rows = self._inner.extend(token_ids, logit_rows=logit_rows)
        fed = list(token_ids)[len(token_ids) - rows.logits_JV.shape[0] :]
        bad_J = torch.tensor([token == self._after for token in fed], device=rows.logits_JV.device)
        return replace(rows, logits_JV=rows.logits_JV.masked_fill(bad_J[:, None], float("nan")))

    def truncate(self, length: int) -> None:
        """Handed on."""
        self._inner.truncate(length)


class Repaired(LateRollback):
    """A session that turns NaN into 0, so that a broken row looks like a flat law and is committed from."""

    def extend(self, token_ids: Sequence[int], *, logit_rows: int | None = None) -> TargetRows:
        """Rows without a trace of what was wrong with them."""
        rows = self._inner.extend(token_ids, logit_rows=logit_rows)
        return replace(rows, logits_JV=rows.logits_JV.nan_to_num(0.0))

    def truncate(self, length: int) -> None:
        """Handed on."""
        self._inner.truncate(length)


def with_target(case: AuditCase, wrap: Callable[[TargetSession], TargetSession]) -> AuditCase:
    """The case with every session of its target wrapped."""
    return replace(case, target=ChangedTarget(case.target, wrap))


def with_nan_rows(case: AuditCase, after: int) -> AuditCase:
    """The case with a target that gives NaN after one token."""
    return with_target(case, lambda session: NotFinite(session, after))


def retrospective(proposal: Proposal) -> int:
    """The length with the largest gain of all, behind a drop too: the confidence at k + 1 knows the token at k.

    Ref: DSpark (arXiv:2607.05147), non-anticipation: the search must stop at the first drop.
    """
    found = gains(proposal)
    return max(range(len(found)), key=lambda length: found[length])
