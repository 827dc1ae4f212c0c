"""Policies at work: on the requests of a ragged batch, and on single proposals for the audit."""

from __future__ import annotations

import itertools
import math
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
from dspec_lab.scheduler.gating import ProbePurse, draft_lengths
from dspec_lab.scheduler.history import AcceptanceHistory, Standing
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


@dataclass(frozen=True, slots=True)
class _Look:
    """What was found of the requests before they drafted; it holds until their round is settled."""

    memories: list[_Memory]
    standing: Standing
    expected_BG: np.ndarray  # conditional acceptance
    context_tokens: float


@dataclass(slots=True)
class _Memory:
    """What is kept of one request."""

    standing: Standing  # one row
    number: int  # by which it is told from every other request, ended ones too
    past: deque[np.ndarray] = field(default_factory=lambda: deque(maxlen=DELAY))  # survival of its last rounds
    rounds_read: int = 0
    drafted: int = 0  # in the round that is not settled yet
    chance_G: np.ndarray | None = None  # corrected confidences of that round's drafts, if it had any
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
        self._chosen: tuple[tuple[int, ...], np.ndarray] | None = None
        # requests of which none drafts, while they are the same, and the rounds for which that has gone on
        self._resting: list[ReferenceType[Request]] = []
        self._rested = 0
        self._look: _Look | None = None  # of the gate, for the decision that follows in the same round
        self._numbers = itertools.count()
        self._memory: WeakKeyDictionary[Request, _Memory] = WeakKeyDictionary()

    def draft_lengths(self, requests: Sequence[Request]) -> list[int]:
        """Drafts to ask of each request's drafter this round; decided by earlier rounds, before anything is drafted."""
        if self.table is None:
            raise ValueError("draft lengths rest on a cost table, got none")
        start, self._look = time.perf_counter(), None
        if self._at_rest(requests) and self._purse.rest(len(requests), self.table):
            # nobody drafted, so nothing was learned, and nothing changes
            self._rested += 1
            self._gate_s = time.perf_counter() - start
            return [0] * len(requests)
        look = self._look = self._look_at(requests)
        memories = look.memories
        who = tuple(memory.number for memory in memories)
        if self._chosen is None or self._chosen[0] != who:
            survival_BG = np.cumprod(look.expected_BG, axis=1)
            self._chosen = who, draft_lengths(survival_BG, self.table, context_tokens=look.context_tokens)
        may_B = np.array([self._room(request) for request in requests], dtype=np.int64)
        wanted_B = np.minimum(self._chosen[1], may_B)
        for reference in self._resting:
            if (request := reference()) is not None and request in self._memory:
                self._memory[request].skipped += self._rested
        skipped_B = np.array([memory.skipped for memory in memories], dtype=float)
        wanted_B = self._purse.add(wanted_B, skipped_B, may_B, self.table)
        for memory, wanted in zip(memories, wanted_B.tolist(), strict=True):
            memory.skipped = 0 if wanted else memory.skipped + 1
        self._resting = [] if wanted_B.any() else [ref(request) for request in requests]
        self._rested = 0
        self._gate_s = time.perf_counter() - start
        return wanted_B.tolist()

    def __call__(self, requests: Sequence[Request]) -> list[int]:
        """Drafts of each request to verify this round."""
        start, B = time.perf_counter(), len(requests)
        if self._blind:
            offered_B = np.array([request.proposal.gamma for request in requests], dtype=np.int64)
            view = RoundView(survival_BG=np.ones((B, self.gamma)), lens_B=offered_B)
            lengths = self.policy.lengths(view).tolist()
            told = {request.proposal.confidence_G is not None for request in requests if request.proposal.gamma}
            seen: set[Source] = {"confidence" if known else "history" for known in told}
            self._log(requests, offered_B, lengths, seen, time.perf_counter() - start)
            return lengths
        if self._rested and self._at_rest(requests) and not any(request.proposal.gamma for request in requests):
            self._log(requests, np.zeros(B, dtype=np.int64), [0] * B, set(), time.perf_counter() - start)
            return [0] * B
        look, self._look = self._look or self._look_at(requests), None
        memories = look.memories
        lens_B = np.array([request.proposal.gamma for request in requests], dtype=np.int64)
        for memory, length in zip(memories, lens_B.tolist(), strict=True):
            memory.drafted = length
            if not length:
                # what it told before is old by the time it drafts again
                memory.past.clear()
        if not lens_B.any():
            self._log(requests, lens_B, [0] * B, set(), time.perf_counter() - start)
            return [0] * B
        standing, expected_BG = look.standing, look.expected_BG
        raw_BG, told_B = np.ones((B, self.gamma)), np.zeros(B, dtype=bool)
        for i, request in enumerate(requests):
            confidence_G = request.proposal.confidence_G
            if confidence_G is not None and lens_B[i]:
                raw_BG[i, : lens_B[i]], told_B[i] = confidence_G, True
        if self._calibrate is not None and told_B.any():
            raw_BG[told_B] = self._calibrate(raw_BG[told_B])
        corrected_BG = self._history.corrected(raw_BG, standing) if self._learn else raw_BG
        # a short proposal: what it does not hold is expected to go as before
        has_BG = told_B[:, None] & (np.arange(self.gamma) < lens_B[:, None])
        survival_BG = np.cumprod(np.where(has_BG, corrected_BG, expected_BG), axis=1)
        past_BG = np.cumprod(expected_BG, axis=1)
        for i, memory in enumerate(memories):
            if len(memory.past) == DELAY:
                past_BG[i] = memory.past[0]
            if memory.drafted:
                memory.past.append(survival_BG[i])
            memory.chance_G = corrected_BG[i] if told_B[i] else None
        drafted = int(lens_B.sum())
        view = RoundView(
            survival_BG=survival_BG,
            lens_B=lens_B,
            past_BG=past_BG,
            asked_B=np.array([min(request.gamma, self._room(request)) for request in requests], dtype=np.int64),
            draft_s=self.table.draft.seconds(int((lens_B > 0).sum()), drafted) if self.table else 0.0,
            context_tokens=look.context_tokens,
        )
        lengths = [int(length) for length in self.policy.lengths(view)]
        sources: set[Source] = set()
        for told, drafts in zip(told_B, lens_B, strict=True):
            if drafts:
                sources.add("confidence" if told else "history")
        self._log(requests, lens_B, lengths, sources, time.perf_counter() - start)
        return lengths

    def _at_rest(self, requests: Sequence[Request]) -> bool:
        return len(requests) == len(self._resting) and all(
            reference() is request for reference, request in zip(self._resting, requests, strict=True)
        )

    def _log(
        self, requests: Sequence[Request], lens_B: np.ndarray, lengths: list[int], sources: set[Source], seconds: float
    ) -> None:
        self.decisions.append(
            Decision(
                requests=len(requests),
                drafted=int(lens_B.sum()),
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
        memories = self._read(requests)
        standing = _stacked(memories)
        return _Look(memories, standing, self._history.chances(standing), _context(requests))

    def _read(self, requests: Sequence[Request]) -> list[_Memory]:
        """The requests' memories, after taking in the rounds that were settled since."""
        memories, told, silent = [], list[tuple[_Memory, RoundRecord]](), list[tuple[_Memory, RoundRecord]]()
        for request in requests:
            memory = self._memory.get(request)
            if memory is None:
                memory = self._memory[request] = _Memory(Standing.new(1, self.gamma), next(self._numbers))
            memories.append(memory)
            records = request.result.rounds[memory.rounds_read :]
            memory.rounds_read += len(records)
            if records and memory.drafted:
                # one round is settled between two calls; one without drafts teaches nothing
                (silent if memory.chance_G is None else told).append((memory, records[-1]))
        for group in (told, silent):
            if not group:
                continue
            self._chosen = None
            standing = _stacked([memory for memory, _ in group])
            verified_B = np.array([record.gamma for _, record in group], dtype=np.int64)
            chances = [memory.chance_G for memory, _ in group if memory.chance_G is not None]
            self._history.settle(
                standing,
                np.array([memory.drafted for memory, _ in group], dtype=np.int64),
                verified_B,
                np.array([record.num_accepted for _, record in group], dtype=np.int64),
                np.stack(chances) if chances else None,
            )
            if len(group) > 1:
                for i, (memory, _) in enumerate(group):
                    memory.standing = standing.rows(np.array([i]))
        return memories


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
