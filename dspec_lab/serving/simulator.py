"""A batch under load, event by event, without a model: arrivals, rounds and ends, with times from a cost table.

All running requests share rounds, as in a real batch: draft, decide how much to verify, verify, settle. Within a round
everything is numpy over the requests, so thousands of them are cheap.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from dspec_lab.scheduler.cost_table import CostTable
from dspec_lab.scheduler.gating import ProbePurse, asked_lengths
from dspec_lab.scheduler.history import HOLD, AcceptanceHistory, Standing, recalled
from dspec_lab.scheduler.policies import Policy, RoundView, useful_drafts
from dspec_lab.serving.acceptance import Acceptance
from dspec_lab.serving.summary import LoadSummary, RequestEnd, RoundTally, summarise
from dspec_lab.serving.workload import ClosedLoop, Load

LENGTHS = ("geometric", "fixed", "text")


@dataclass(frozen=True, kw_only=True, slots=True)
class SimConfig:
    """One simulated run."""

    load: Load
    policy: Policy | None  # None: plain decoding, nothing is drafted
    table: CostTable
    acceptance: Acceptance
    tokens: int = 256  # new tokens of a request: mean, exactly, or at most
    lengths: Literal["geometric", "fixed", "text"] = "geometric"  # text: as long as the replayed text, up to `tokens`
    total: int | None = None  # requests that a closed loop serves; None has no end
    full_only: bool = False  # sum up only the rounds in which all places are taken
    context_tokens: float | None = None  # mean context of a request; None is the cost table's own
    prefill_s: float = 0.0  # that each new request holds the batch up
    gate: bool = False  # skip drafting where it does not pay
    learn: bool = False  # correct confidences by earlier verdicts, as the real batch does
    seed: int = 0
    max_rounds: int = 1_000_000
    warm_up: float = 0.1  # share of the rounds that is left out of a closed loop's summary

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.max_rounds < 1:
            raise ValueError(f"tokens and max_rounds must be at least 1, got {self.tokens}, {self.max_rounds}")
        if self.lengths not in LENGTHS:
            raise ValueError(f"lengths must be one of {LENGTHS}, got {self.lengths!r}")
        if not 0 <= self.warm_up < 1:
            raise ValueError(f"warm_up must lie in 0..1, got {self.warm_up}")
        if self.policy is not None and self.policy.uses_table and self.table.flat:
            raise ValueError(f"the policy {self.policy.name} can trim nothing: {self.table.findings()[0]}")
        if self.total is not None and (self.total < 1 or not isinstance(self.load, ClosedLoop)):
            raise ValueError(f"total is of a closed loop and at least 1, got {self.total}")
        if self.gate and self.policy is None:
            raise ValueError("plain decoding drafts nothing, so there is nothing to gate")


@dataclass(slots=True)
class _Places:
    """The running requests; a place is free where `active` is False."""

    active: np.ndarray
    left: np.ndarray  # tokens still to come
    done: np.ndarray
    arrived_s: np.ndarray
    began_s: np.ndarray
    starved: np.ndarray  # rounds in a row without a verified draft
    worst: np.ndarray
    number: np.ndarray  # of the request in a place, counted from 1
    past: list[np.ndarray] = field(default_factory=list)  # survival of the last round and of the one before
    skipped: np.ndarray = field(default_factory=lambda: np.zeros(0))
    rounds: np.ndarray = field(default_factory=lambda: np.zeros(0))  # in a row in which a request has drafted


@dataclass(frozen=True, slots=True)
class _Settled:
    """A round that nothing was learned from yet."""

    at_B: np.ndarray
    number_B: np.ndarray
    lens_B: np.ndarray
    verified_B: np.ndarray
    accepted_B: np.ndarray
    chance_BG: np.ndarray


@dataclass(slots=True)
class _Look:
    """What was found of the requests before they drafted; it holds as in `BatchScheduler`."""

    number_B: np.ndarray
    standing: Standing
    expected_BG: np.ndarray
    rounds: int = 1
    wanted_B: np.ndarray | None = None


@dataclass(slots=True)
class _Learned:
    """What the gate and the correction of confidences know, as `BatchScheduler` does."""

    history: AcceptanceHistory
    standing: Standing
    purse: ProbePurse
    settled: list[_Settled] = field(default_factory=list)
    held: _Look | None = None

    def look(self, p: _Places, at_B: np.ndarray) -> _Look:
        """What is known: found before, or anew, after taking in what was settled, where it has held long enough."""
        number_B, held = p.number[at_B], self.held
        if held is not None and held.rounds < HOLD and np.array_equal(held.number_B, number_B):
            held.rounds += 1
            return held
        for entry in self.settled:
            rows = self.standing.rows(entry.at_B)
            self.history.settle(rows, entry.lens_B, entry.verified_B, entry.accepted_B, entry.chance_BG)
            # what ended requests taught is for all to know; their own standing is gone
            here = np.flatnonzero(p.active[entry.at_B] & (p.number[entry.at_B] == entry.number_B))
            self.standing.put(entry.at_B[here], rows.rows(here))
        self.settled.clear()
        standing = self.standing.rows(at_B)
        self.held = _Look(number_B, standing, self.history.chances(standing))
        return self.held


def simulate(config: SimConfig) -> LoadSummary:
    """Run the load to its end (open loop, or a closed loop of `total` requests) or for `max_rounds` rounds.

    An endless closed loop's summary leaves out the first `warm_up` of its rounds. Raises `ValueError` where the cost
    table does not cover the requests.
    """
    rng = np.random.default_rng(config.seed)
    load, gamma = config.load, config.acceptance.gamma
    places = load.concurrency if isinstance(load, ClosedLoop) else load.max_active
    state = config.acceptance.start(places, rng)
    p = _new_places(places, gamma)
    learned = None
    if config.gate or config.learn:
        learned = _Learned(AcceptanceHistory(gamma), Standing.new(places, gamma), ProbePurse())
    # requests that have not begun: arrival times, or a closed loop's, which arrive as a place is free
    count = config.total if config.total is not None else 0
    waiting = deque([0.0] * count) if isinstance(load, ClosedLoop) else deque(load.arrivals_s.tolist())
    tally, ends, now = RoundTally(), list[RequestEnd](), 0.0
    for _ in range(config.max_rounds):
        now = _admit(config, p, state, learned, waiting, now, rng)
        at_B = np.flatnonzero(p.active)
        if not len(at_B):
            break
        look = learned.look(p, at_B) if learned is not None else None
        confidence_BG, chance_BG = state.draw(at_B, p.done[at_B])
        lens_B = _drafted(config, p, learned, look, at_B, gamma)
        past_BG = p.past[1][at_B]
        if learned is not None and look is not None:
            expected_BG = look.expected_BG
            if config.learn:
                confidence_BG = learned.history.corrected(confidence_BG, look.standing)
            confidence_BG = np.where(np.arange(gamma) < lens_B[:, None], confidence_BG, expected_BG)
            hoped_BG = np.cumprod(expected_BG, axis=1)
            past_BG = recalled(np.where(p.rounds[at_B, None] < len(p.past), hoped_BG, past_BG), hoped_BG)
        survival_BG = np.cumprod(confidence_BG, axis=1)
        kept_B = _leading(rng.random(chance_BG.shape, dtype=np.float32) < chance_BG)
        draft_s = config.table.draft.seconds(int(np.count_nonzero(lens_B)), int(lens_B.sum()))
        if config.policy is None:
            length_B = lens_B
        else:
            view = RoundView(
                survival_BG=survival_BG, lens_B=lens_B, past_BG=past_BG, asked_B=lens_B, draft_s=draft_s,
                accepted_B=kept_B, context_tokens=config.context_tokens,
            )  # fmt: skip
            length_B = config.policy.lengths(view)
        verified = int(length_B.sum())
        seconds = float(
            config.table.round_s_N(len(at_B), verified, draft_s=draft_s, context_tokens=config.context_tokens)[-1]
        )
        now += seconds
        gained_B = np.minimum(np.minimum(kept_B, length_B) + 1, p.left[at_B])
        _settle(p, at_B, gained_B, length_B, lens_B, survival_BG)
        if learned is not None:
            accepted_B = np.minimum(np.minimum(kept_B, length_B), gained_B)
            learned.settled.append(_Settled(at_B, p.number[at_B], lens_B, length_B, accepted_B, confidence_BG))
        if not config.full_only or len(at_B) == places:
            tally.add(
                seconds=seconds, requests=len(at_B), drafted=int(lens_B.sum()), verified=verified,
                committed=int(gained_B.sum()), draft_s=draft_s,
            )  # fmt: skip
        for i in at_B[p.left[at_B] == 0].tolist():
            ends.append(
                RequestEnd(
                    arrived_s=float(p.arrived_s[i]),
                    began_s=float(p.began_s[i]),
                    ended_s=now,
                    tokens=int(p.done[i]),
                    starved_rounds=int(p.worst[i]),
                )  # fmt: skip
            )
            p.active[i] = False
    skip = int(config.warm_up * len(tally.seconds)) if isinstance(load, ClosedLoop) and config.total is None else 0
    return summarise(tally, ends, skip=skip)


def _new_places(places: int, gamma: int) -> _Places:
    def zeros() -> np.ndarray:
        return np.zeros(places)

    return _Places(
        active=np.zeros(places, dtype=bool), left=np.zeros(places, dtype=np.int64),
        done=np.zeros(places, dtype=np.int64), arrived_s=zeros(), began_s=zeros(),
        starved=np.zeros(places, dtype=np.int64), worst=np.zeros(places, dtype=np.int64),
        number=np.zeros(places, dtype=np.int64),
        past=[np.ones((places, gamma), dtype=np.float32) for _ in range(2)],
        skipped=np.full(places, np.inf), rounds=np.zeros(places, dtype=np.int64),
    )  # fmt: skip


def _admit(  # type: ignore[no-untyped-def]
    config: SimConfig, p: _Places, state, learned: _Learned | None, waiting: deque[float], now: float, rng
) -> float:
    """Start requests on free places; the time after that (a server with nothing to do waits for the next arrival)."""
    free = np.flatnonzero(~p.active)
    if not len(free):
        return now
    if isinstance(config.load, ClosedLoop):
        count = len(free) if config.total is None else min(len(free), len(waiting))
        arrived = [now] * count
        for _ in range(count if config.total is not None else 0):
            waiting.popleft()
    else:
        if waiting and len(free) == len(p.active):
            now = max(now, waiting[0])
        arrived = []
        while waiting and waiting[0] <= now and len(arrived) < len(free):
            arrived.append(waiting.popleft())
    new = free[: len(arrived)]
    if not len(new):
        return now
    state.begin(new)
    p.active[new], p.done[new], p.starved[new], p.worst[new] = True, 0, 0, 0
    p.skipped[new], p.rounds[new] = np.inf, 0
    p.number[new] = int(p.number.max()) + 1 + np.arange(len(new))
    if learned is not None:
        learned.standing.put(new, Standing.new(len(new), learned.history.gamma))
    p.arrived_s[new] = arrived
    if config.lengths == "fixed":
        p.left[new] = config.tokens
    elif config.lengths == "text":
        p.left[new] = np.minimum(config.tokens, state.text_tokens(new))
    else:
        p.left[new] = rng.geometric(1 / config.tokens, len(new))
    for older in p.past:
        older[new] = 1.0
    now += config.prefill_s * len(new)
    p.began_s[new] = now
    return now


def _drafted(
    config: SimConfig, p: _Places, learned: _Learned | None, look: _Look | None, at_B: np.ndarray, gamma: int
) -> np.ndarray:
    """Drafts that each request makes."""
    if config.policy is None:
        return np.zeros(len(at_B), dtype=np.int64)
    room_B = np.full(len(at_B), useful_drafts(config.policy, gamma))
    if config.lengths != "geometric":
        # as in the real engine: no more drafts than tokens are still allowed
        room_B = np.minimum(room_B, config.tokens - p.done[at_B] - 1)
    if not config.gate or learned is None or look is None:
        return room_B
    if look.wanted_B is None:
        hoped_BG = np.cumprod(look.expected_BG, axis=1)
        look.wanted_B = asked_lengths(config.policy, hoped_BG, config.table, context_tokens=config.context_tokens)
    wanted_B = np.minimum(look.wanted_B, room_B)
    lens_B = learned.purse.add(wanted_B, p.skipped[at_B], room_B, config.table)
    if (lens_B != wanted_B).any():
        look.rounds = HOLD  # a probe is made to learn from it, at once
    p.skipped[at_B] = np.where(lens_B > 0, 0, p.skipped[at_B] + 1)
    return lens_B


def _settle(
    p: _Places,
    at_B: np.ndarray,
    gained_B: np.ndarray,
    length_B: np.ndarray,
    lens_B: np.ndarray,
    survival_BG: np.ndarray,
) -> None:
    p.left[at_B] -= gained_B
    p.done[at_B] += gained_B
    p.rounds[at_B] = np.where(lens_B > 0, p.rounds[at_B] + 1, 0)
    p.starved[at_B] = np.where(length_B > 0, 0, p.starved[at_B] + 1)
    p.worst[at_B] = np.maximum(p.worst[at_B], p.starved[at_B])
    p.past.insert(0, p.past.pop())
    p.past[0][at_B] = survival_BG


def _leading(kept_BG: np.ndarray) -> np.ndarray:
    """Drafts before the first that is not kept."""
    alive_B = kept_BG[:, 0].copy()
    count_B = alive_B.astype(np.int64)
    for k in range(1, kept_BG.shape[1]):
        alive_B &= kept_BG[:, k]
        count_B += alive_B
    return count_B
