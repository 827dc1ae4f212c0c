"""Policies at work: on the requests of a ragged batch, and on single proposals for the audit."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal
from weakref import WeakKeyDictionary

import numpy as np

from dspec_lab.core.types import Proposal
from dspec_lab.scheduler.bellman import ConfidenceChain, solve
from dspec_lab.scheduler.cost_table import CostTable
from dspec_lab.scheduler.gating import PROBE_EVERY, draft_lengths
from dspec_lab.scheduler.history import AcceptanceHistory
from dspec_lab.scheduler.policies import Delayed, EarlyStop, FixedLength, Policy, RoundView, StaticThreshold
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
class _Memory:
    """What is kept of one request."""

    past: deque[np.ndarray] = field(default_factory=lambda: deque(maxlen=DELAY))
    rounds_read: int = 0
    skipped: int = 0


class BatchScheduler:
    """A `LengthPolicy` of the ragged batch that asks `policy`. One for each run: it remembers requests.

    Survival comes from a proposal's confidences, passed through `calibrate` if given; a drafter without them is judged
    by how earlier rounds went. With `gate_table` each call also sets the draft length of the requests' next round.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        gamma: int,
        table: CostTable | None = None,
        calibrate: Callable[[np.ndarray], np.ndarray] | None = None,
        gate: bool = False,
    ) -> None:
        if not policy.lossless:
            raise ValueError(f"the policy {policy.name} is not lossless; it must not decide on real requests")
        if gate and table is None:
            raise ValueError("gating weighs drafting against its cost and needs a cost table, got none")
        self.policy, self.gamma, self.table = policy, gamma, table
        self.decisions: list[Decision] = []
        self._calibrate, self._gate = calibrate, gate
        self._history = AcceptanceHistory(gamma)
        self._memory: WeakKeyDictionary[Request, _Memory] = WeakKeyDictionary()

    def __call__(self, requests: Sequence[Request]) -> list[int]:
        """Drafts of each request to verify this round."""
        start = time.perf_counter()
        memories = [self._read(request) for request in requests]
        survival_BG = np.ones((len(requests), self.gamma))
        past_BG = np.ones((len(requests), self.gamma))
        lens_B = np.array([request.proposal.gamma for request in requests], dtype=np.int64)
        sources = set[Source]()
        for i, (request, memory) in enumerate(zip(requests, memories, strict=True)):
            survival_BG[i], source = self._survival(request)
            if lens_B[i]:
                sources.add(source)
            if len(memory.past) == DELAY:
                past_BG[i] = memory.past[0]
            memory.past.append(survival_BG[i].copy())
        drafted = int(lens_B.sum())
        view = RoundView(
            survival_BG=survival_BG,
            lens_B=lens_B,
            past_BG=past_BG,
            asked_B=np.array([self._asked(request) for request in requests], dtype=np.int64),
            draft_s=self.table.draft.seconds(int((lens_B > 0).sum()), drafted) if self.table else 0.0,
            context_tokens=float(np.mean([len(r.result.prompt_ids) + len(r.result.token_ids) for r in requests])),
        )
        lengths = [int(length) for length in self.policy.lengths(view)]
        if self._gate:
            self._set_draft_lengths(requests, memories, view)
        self.decisions.append(
            Decision(
                requests=len(requests),
                drafted=drafted,
                admitted=sum(lengths),
                longest=max(lengths),
                source="mixed" if len(sources) > 1 else next(iter(sources), "history"),
                seconds=time.perf_counter() - start,
            )
        )
        return lengths

    def _asked(self, request: Request) -> int:
        left = request.config.max_new_tokens - len(request.result.token_ids) - 1
        return 0 if request.drafter is None else max(0, min(request.gamma, self.gamma, left))

    def _read(self, request: Request) -> _Memory:
        memory = self._memory.setdefault(request, _Memory())
        for record in request.result.rounds[memory.rounds_read :]:
            self._history.add(request, record.gamma, record.num_accepted)
        memory.rounds_read = len(request.result.rounds)
        return memory

    def _survival(self, request: Request) -> tuple[np.ndarray, Source]:
        proposal = request.proposal
        expected_G = self._history.survival(request)
        if proposal.confidence_G is None:
            return expected_G, "history"
        confidence_G = np.asarray(proposal.confidence_G, dtype=np.float64)
        if self._calibrate is not None and len(confidence_G):
            confidence_G = self._calibrate(confidence_G[None])[0]
        found_G = np.ones(self.gamma)
        found_G[: len(confidence_G)] = confidence_G
        if len(confidence_G) < self.gamma:
            # a short proposal: what it does not hold is expected to go as before
            found_G[len(confidence_G) :] = self._history.average()[len(confidence_G) :]
        return np.cumprod(found_G), "confidence"

    def _set_draft_lengths(self, requests: Sequence[Request], memories: list[_Memory], view: RoundView) -> None:
        expected_BG = np.stack([self._history.survival(request) for request in requests])
        probe_B = np.array([memory.skipped >= PROBE_EVERY - 1 for memory in memories])
        wanted_B = draft_lengths(expected_BG, self.table, context_tokens=view.context_tokens, probe_B=probe_B)  # type: ignore[arg-type]
        for request, memory, wanted in zip(requests, memories, wanted_B.tolist(), strict=True):
            if request.drafter is not None:
                # read by the request's next round; this round's drafts are made already
                request.gamma = wanted
                memory.skipped = 0 if wanted else memory.skipped + 1


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
