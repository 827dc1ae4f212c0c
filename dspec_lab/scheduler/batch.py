"""Policies at work: on the requests of a ragged batch, and on single proposals for the audit."""

from __future__ import annotations

import itertools
import math
import operator
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal
from weakref import ReferenceType, WeakKeyDictionary, ref

import numpy as np

from dspec_lab.core.types import Proposal, RoundRecord
from dspec_lab.scheduler.bellman import ConfidenceChain, solve
from dspec_lab.scheduler.cost_table import CostTable
from dspec_lab.scheduler.gating import ProbePurse, asked_lengths
from dspec_lab.scheduler.history import HOLD, AcceptanceHistory, Standing, recalled
from dspec_lab.scheduler.policies import (
    Delayed,
    EarlyStop,
    FixedLength,
    FullBlock,
    Policy,
    RoundView,
    StaticThreshold,
)
from dspec_lab.verifier.request import Request

DELAY = 2  # rounds between the confidences that set a capacity and the round it holds for
Source = Literal["confidence", "history"]


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision, for the log."""

    requests: int
    drafted: int
    admitted: int
    longest: int
    source: Source | Literal["mixed"]
    seconds: float


@dataclass(slots=True)
class _Look:
    """What was found of the requests before they drafted. It holds for `HOLD` rounds, or until others take part."""

    requests: list[ReferenceType[Request]]
    memories: list[_Memory]
    expected_BG: list[list[float]]  # conditional acceptance
    hoped_BG: np.ndarray  # the same as survival
    context_tokens: float
    rounds: int = 0  # it was used for
    lengths: list[int] | None = None  # drafts that are worth asking for, where that was asked


@dataclass(frozen=True, slots=True)
class _Pending:
    """A round with drafts that may not be settled yet."""

    index: int  # of its record among the request's
    drafted: int
    chance_G: list[float] | None  # corrected confidences of its drafts, if it had any


@dataclass(slots=True)
class _Memory:
    """What is kept of one request."""

    standing: Standing  # one row
    number: int  # by which it is told from every other request, ended ones too
    rounds: list[RoundRecord]  # the request's own, which outlive it here until they are learned from
    past: deque[list[float]] = field(default_factory=lambda: deque(maxlen=DELAY))  # survival of its last rounds
    pending: list[_Pending] = field(default_factory=list)  # rounds that nothing was learned from yet
    skipped: float = math.inf  # rounds since it drafted


class BatchScheduler:
    """A `LengthPolicy` of the ragged batch that asks `policy`. One for each run: it remembers requests.

    Survival comes from a proposal's confidences, passed through `calibrate` if given and, with `learn`, shifted by what
    earlier verdicts said of them; a drafter without them is judged by how earlier rounds went. With `gate`,
    `draft_lengths` is to be asked before each round's drafting.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        gamma: int,
        table: CostTable | None = None,
        calibrate: Callable[[np.ndarray], np.ndarray] | None = None,
        gate: bool = False,
        learn: bool = True,
    ) -> None:
        if not policy.lossless:
            raise ValueError(f"the policy {policy.name} is not lossless; it must not decide on real requests")
        if gate and table is None:
            raise ValueError("gating weighs drafting against its cost and needs a cost table, got none")
        self.policy, self.gamma, self.table, self.gates = policy, gamma, table, gate
        self.decisions: list[Decision] = []
        self._calibrate, self._learn = calibrate, learn
        # such a policy looks at nothing that is learned
        self._blind = isinstance(policy, (FixedLength, FullBlock)) and not gate
        self._history, self._purse, self._gate_s = AcceptanceHistory(gamma), ProbePurse(), 0.0
        # the last choice of draft lengths, which holds while the requests are the same and nothing was learned
        self._chosen: tuple[tuple[int, ...], list[int]] | None = None
        # requests of which none drafts, while they are the same, and the rounds for which that has gone on
        self._resting: list[ReferenceType[Request]] = []
        self._rested = 0
        self._look: _Look | None = None
        self._told = True  # whether the last drafts came with confidences
        self._gated = False  # whether the gate has looked in this round, so that the decision need not
        self._numbers = itertools.count()
        self._memory: WeakKeyDictionary[Request, _Memory] = WeakKeyDictionary()

    def draft_lengths(self, requests: Sequence[Request]) -> list[int]:
        """Drafts to ask of each request's drafter this round; decided by earlier rounds, before anything is drafted."""
        if self.table is None:
            raise ValueError("draft lengths rest on a cost table, got none")
        start, self._gated = time.perf_counter(), False
        if _are(requests, self._resting) and self._purse.rest(len(requests), self.table):
            # nobody drafted, so nothing was learned, and nothing changes
            self._rested += 1
            self._gate_s = time.perf_counter() - start
            return [0] * len(requests)
        look, self._gated = self._look_at(requests), True
        if look.lengths is None:
            look.lengths = self._worth_asking(look)
        wanted = [min(length, self._room(request)) for length, request in zip(look.lengths, requests, strict=True)]
        for reference in self._resting:
            if (request := reference()) is not None and request in self._memory:
                self._memory[request].skipped += self._rested
        if all(wanted):
            self._purse.save(len(requests), self.table)
        else:
            may_B = np.array([self._room(request) for request in requests], dtype=np.int64)
            skipped_B = np.array([memory.skipped for memory in look.memories], dtype=float)
            probed = self._purse.add(np.array(wanted, dtype=np.int64), skipped_B, may_B, self.table).tolist()
            if probed != wanted:
                wanted, look.rounds = probed, HOLD  # a probe is made to learn from it, at once
        for memory, length in zip(look.memories, wanted, strict=True):
            memory.skipped = 0 if length else memory.skipped + 1
        self._resting = [] if any(wanted) else look.requests
        self._rested = 0
        self._gate_s = time.perf_counter() - start
        return wanted

    def _worth_asking(self, look: _Look) -> list[int]:
        """The choice of draft lengths, made anew where something was learned or the requests are others."""
        who = tuple(memory.number for memory in look.memories)
        if self._chosen is None or self._chosen[0] != who:
            lengths_B = asked_lengths(
                self.policy, look.hoped_BG, self.table, context_tokens=look.context_tokens, told=self._told  # type: ignore[arg-type]
            )  # fmt: skip
            self._chosen = who, lengths_B.tolist()
        return self._chosen[1]

    def __call__(self, requests: Sequence[Request]) -> list[int]:
        """Drafts of each request to verify this round."""
        start, B = time.perf_counter(), len(requests)
        if self._blind:
            offered_B = np.array([request.proposal.gamma for request in requests], dtype=np.int64)
            view = RoundView(survival_BG=np.ones((B, self.gamma)), lens_B=offered_B)
            lengths = self.policy.lengths(view).tolist()
            told = {request.proposal.confidence_G is not None for request in requests if request.proposal.gamma}
            seen: set[Source] = {"confidence" if known else "history" for known in told}
            self._log(requests, offered_B.tolist(), lengths, seen, time.perf_counter() - start)
            return lengths
        lens = [request.proposal.gamma for request in requests]
        if self._rested and not any(lens) and _are(requests, self._resting):
            self._log(requests, lens, [0] * B, set(), time.perf_counter() - start)
            return [0] * B
        look = self._look if self._gated and self._look is not None else self._look_at(requests)
        self._gated = False
        for memory in look.memories:
            if memory.pending and memory.pending[-1].index == len(memory.rounds):
                # that round was begun and never settled
                memory.pending.pop()
                memory.past.pop()
        if not any(lens):
            for memory in look.memories:
                memory.past.clear()
            self._log(requests, lens, [0] * B, set(), time.perf_counter() - start)
            return [0] * B
        survival_BG, past_BG, sources = [], [], set[Source]()
        for memory, length, told_G, expected_G, hoped_G in zip(
            look.memories, lens, self._confidences(requests), look.expected_BG, look.hoped_BG, strict=True
        ):
            chance_G = None
            if told_G is not None and length:
                own = memory.standing.shift_B[0]
                chance_G = self._history.corrected_row(told_G, float(own)) if self._learn else list(told_G)
            # a short proposal: what it does not hold is expected to go as before
            found_G = expected_G if chance_G is None else [*chance_G, *expected_G[length:]]
            survival_G = list(itertools.accumulate(found_G, operator.mul))
            survival_BG.append(survival_G)
            past_BG.append(memory.past[0] if len(memory.past) == DELAY else hoped_G)
            if length:
                sources.add("history" if chance_G is None else "confidence")
                memory.past.append(survival_G)
                memory.pending.append(_Pending(len(memory.rounds), length, chance_G))
            else:
                # what it told before is old by the time it drafts again
                memory.past.clear()
        self._told = "confidence" in sources
        # what was asked for and not what came: a drafter may stop short by what it has drawn
        asked = [min(request.gamma, self._room(request)) for request in requests]
        view = RoundView(
            survival_BG=np.array(survival_BG),
            lens_B=np.array(lens, dtype=np.int64),
            past_BG=recalled(np.array(past_BG), look.hoped_BG),
            asked_B=np.array(asked, dtype=np.int64),
            draft_s=self.table.draft.seconds(sum(length > 0 for length in asked), sum(asked)) if self.table else 0.0,
            context_tokens=look.context_tokens,
        )
        lengths = self.policy.lengths(view).tolist()
        self._log(requests, lens, lengths, sources, time.perf_counter() - start)
        return lengths

    def _confidences(self, requests: Sequence[Request]) -> Sequence[Sequence[float] | None]:
        """Each proposal's confidences, calibrated."""
        raw_BG = [request.proposal.confidence_G for request in requests]
        if self._calibrate is None:
            return raw_BG
        padded = [(*told_G, *[1.0] * (self.gamma - len(told_G))) for told_G in raw_BG if told_G is not None]
        found = iter(self._calibrate(np.array(padded)).tolist() if padded else ())
        return [None if told_G is None else next(found)[: len(told_G)] for told_G in raw_BG]

    def _log(
        self, requests: Sequence[Request], lens: list[int], lengths: list[int], sources: set[Source], seconds: float
    ) -> None:
        self.decisions.append(
            Decision(
                requests=len(requests),
                drafted=sum(lens),
                admitted=sum(lengths),
                longest=max(lengths),
                source="mixed" if len(sources) > 1 else next(iter(sources), "history"),
                seconds=seconds + self._gate_s,
            )
        )

    def _room(self, request: Request) -> int:
        left = request.config.max_new_tokens - len(request.result.token_ids) - 1
        return 0 if request.drafter is None else max(0, min(request.config.gamma, self.gamma, left))

    def _look_at(self, requests: Sequence[Request]) -> _Look:
        """What is known of the requests: found before, or anew where others take part or it has held long enough."""
        look = self._look
        if look is not None and look.rounds < HOLD and _are(requests, look.requests):
            look.rounds += 1
            return look
        memories = self._read(requests)
        standing = _stacked(memories)
        expected_BG = self._history.chances(standing)
        self._look = _Look(
            requests=[ref(request) for request in requests],
            memories=memories,
            expected_BG=expected_BG.tolist(),
            hoped_BG=np.cumprod(expected_BG, axis=1),
            context_tokens=_context(requests),
            rounds=1,
        )
        return self._look

    def _read(self, requests: Sequence[Request]) -> list[_Memory]:
        """The requests' memories, after taking in the rounds that were settled since, of ended requests too."""
        memories = []
        for request in requests:
            memory = self._memory.get(request)
            if memory is None:
                memory = _Memory(Standing.new(1, self.gamma), next(self._numbers), request.result.rounds)
                self._memory[request] = memory
            memories.append(memory)
        taught = memories if self._look is None else [*self._look.memories, *memories]
        rounds: list[list[tuple[_Memory, _Pending, RoundRecord]]] = []
        for memory in taught:
            # no round is under way here, so one that has no record was never settled; those taken are not taken again
            settled = [pending for pending in memory.pending if pending.index < len(memory.rounds)]
            if len(settled) < len(memory.pending):
                memory.past.pop()
            memory.pending.clear()
            for n, pending in enumerate(settled):
                if n == len(rounds):
                    rounds.append([])
                rounds[n].append((memory, pending, memory.rounds[pending.index]))
        for entries in rounds:
            # a round without drafts teaches nothing, one without confidences less
            self._learn_from([entry for entry in entries if entry[1].chance_G is not None])
            self._learn_from([entry for entry in entries if entry[1].chance_G is None])
        return memories

    def _learn_from(self, entries: Sequence[tuple[_Memory, _Pending, RoundRecord]]) -> None:
        if not entries:
            return
        self._chosen = None
        standing = _stacked([memory for memory, _, _ in entries])
        chances = [[*p.chance_G, *[1.0] * (self.gamma - p.drafted)] for _, p, _ in entries if p.chance_G is not None]
        self._history.settle(
            standing,
            np.array([pending.drafted for _, pending, _ in entries], dtype=np.int64),
            np.array([record.gamma for _, _, record in entries], dtype=np.int64),
            np.array([record.num_accepted for _, _, record in entries], dtype=np.int64),
            np.array(chances) if chances else None,
        )
        if len(entries) > 1:
            for i, (memory, _, _) in enumerate(entries):
                memory.standing = standing.rows(np.array([i]))


def _are(requests: Sequence[Request], references: Sequence[ReferenceType[Request]]) -> bool:
    """Whether these are the requests of before, in their order."""
    return len(requests) == len(references) and all(
        reference() is request for reference, request in zip(references, requests, strict=True)
    )


def _stacked(memories: Sequence[_Memory]) -> Standing:
    """The memories' rows: a copy, save of one alone."""
    if len(memories) == 1:
        return memories[0].standing
    return Standing(
        np.concatenate([memory.standing.counts_B2G for memory in memories]),
        np.concatenate([memory.standing.shift_B for memory in memories]),
    )


def _context(requests: Sequence[Request]) -> float:
    return sum(len(r.result.prompt_ids) + len(r.result.token_ids) for r in requests) / len(requests)


class ProposalPolicy:
    """A policy on one request, as the audit asks for it: drafts of a proposal to verify. `fresh` starts it anew."""

    def __init__(self, policy: Policy, *, draft_s: float = 0.0) -> None:
        self._policy, self._draft_s = policy, draft_s
        self._past: deque[np.ndarray] = deque(maxlen=DELAY)

    def fresh(self) -> ProposalPolicy:
        """The same without memory of earlier rounds: one for each text."""
        return ProposalPolicy(self._policy, draft_s=self._draft_s)

    def __call__(self, proposal: Proposal) -> int:
        """Drafts to verify. A proposal without confidences counts as certain."""
        gamma = proposal.gamma
        survival_1G = np.cumprod(np.asarray(proposal.confidence_G or [1.0] * gamma, dtype=np.float64))[None]
        past_1G = np.ones((1, gamma))
        if len(self._past) == DELAY:
            old_G = self._past[0][:gamma]
            past_1G[0, : len(old_G)] = old_G
        self._past.append(survival_1G[0])
        if gamma == 0:
            return 0
        past_1G = np.minimum.accumulate(past_1G, axis=1)
        view = RoundView(
            survival_BG=survival_1G, lens_B=np.array([gamma]), past_BG=past_1G, draft_s=self._draft_s
        )  # fmt: skip
        return int(self._policy.lengths(view)[0])


def audit_policies(gamma: int = 2) -> dict[str, ProposalPolicy]:
    """Every lossless policy that verifies something, for the audit's targets: rows 1 to 4 take 1, 1.67, 1.92, 2 s.

    On these costs the policies cut often, and not always at the same place.
    """
    seconds = tuple(1 / rate for rate in (1.0, 0.6, 0.52, 0.5))
    table = CostTable(rows=(1, 2, 3, 4), seconds=seconds, name="audit")
    chain = ConfidenceChain(
        np.array([0.5, 0.9]), np.array([0.5, 0.5]), np.tile([[0.7, 0.3], [0.2, 0.8]], (gamma - 1, 1, 1))
    )
    policies: tuple[Policy, ...] = (
        FixedLength(1),
        StaticThreshold(0.7),
        StaticThreshold(0.7, on="confidence"),
        EarlyStop(table),
        Delayed(table),
        solve(chain, table.round_s_N(1, gamma)),
    )
    return {policy.name: ProposalPolicy(policy) for policy in policies}
