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
from dspec_lab.scheduler.gating import PROBE_EVERY, draft_lengths
from dspec_lab.scheduler.policies import Policy, RoundView
from dspec_lab.serving.acceptance import Acceptance
from dspec_lab.serving.summary import LoadSummary, RequestEnd, RoundTally, summarise
from dspec_lab.serving.workload import ClosedLoop, Load

LENGTHS = ("geometric", "fixed")
FORGETTING = 0.8  # of a request's mean survival, per round, in the gate's forecast


@dataclass(frozen=True, kw_only=True, slots=True)
class SimConfig:
    """One simulated run."""

    load: Load
    policy: Policy | None  # None: plain decoding, nothing is drafted
    table: CostTable
    acceptance: Acceptance
    tokens: int = 256  # new tokens of a request, mean or exactly
    lengths: Literal["geometric", "fixed"] = "geometric"
    prefill_s: float = 0.0  # that each new request holds the batch up
    gate: bool = False  # skip drafting where it does not pay
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
    past: list[np.ndarray] = field(default_factory=list)  # survival of the last round and of the one before
    forecast: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))
    skipped: np.ndarray = field(default_factory=lambda: np.zeros(0))


def simulate(config: SimConfig) -> LoadSummary:
    """Run the load to its end (open loop) or for `max_rounds` rounds (closed loop).

    A closed loop's summary leaves out the first `warm_up` of its rounds. Raises `ValueError` where the cost table does
    not cover the requests.
    """
    rng = np.random.default_rng(config.seed)
    load, gamma = config.load, config.acceptance.gamma
    places = load.concurrency if isinstance(load, ClosedLoop) else load.max_active
    state = config.acceptance.start(places, rng)
    p = _new_places(places, gamma)
    waiting = deque[float]() if isinstance(load, ClosedLoop) else deque(load.arrivals_s.tolist())
    tally, ends, now = RoundTally(), list[RequestEnd](), 0.0
    for _ in range(config.max_rounds):
        now = _admit(config, p, state, waiting, now, rng)
        at_B = np.flatnonzero(p.active)
        if not len(at_B):
            break
        confidence_BG, chance_BG = state.draw(at_B, p.done[at_B])
        lens_B = _drafted(config, p, at_B, gamma)
        survival_BG = np.cumprod(confidence_BG, axis=1)
        kept_B = _leading(rng.random(chance_BG.shape, dtype=np.float32) < chance_BG)
        draft_s = config.table.draft.seconds(int(np.count_nonzero(lens_B)), int(lens_B.sum()))
        if config.policy is None:
            length_B = lens_B
        else:
            view = RoundView(
                survival_BG=survival_BG, lens_B=lens_B, past_BG=p.past[1][at_B], asked_B=lens_B, draft_s=draft_s,
                accepted_B=kept_B,
            )  # fmt: skip
            length_B = config.policy.lengths(view)
        verified = int(length_B.sum())
        seconds = float(config.table.round_s_N(len(at_B), verified, draft_s=draft_s)[-1])
        now += seconds
        gained_B = np.minimum(np.minimum(kept_B, length_B) + 1, p.left[at_B])
        _settle(p, at_B, gained_B, length_B, lens_B, survival_BG)
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
    skip = int(config.warm_up * len(tally.seconds)) if isinstance(load, ClosedLoop) else 0
    return summarise(tally, ends, skip=skip)


def _new_places(places: int, gamma: int) -> _Places:
    def zeros() -> np.ndarray:
        return np.zeros(places)

    return _Places(
        active=np.zeros(places, dtype=bool), left=np.zeros(places, dtype=np.int64),
        done=np.zeros(places, dtype=np.int64), arrived_s=zeros(), began_s=zeros(),
        starved=np.zeros(places, dtype=np.int64), worst=np.zeros(places, dtype=np.int64),
        past=[np.ones((places, gamma), dtype=np.float32) for _ in range(2)],
        forecast=np.ones((places, gamma), dtype=np.float32), skipped=np.zeros(places, dtype=np.int64),
    )  # fmt: skip


def _admit(config: SimConfig, p: _Places, state, waiting: deque[float], now: float, rng) -> float:  # type: ignore[no-untyped-def]
    """Start requests on free places; the time after that (a server with nothing to do waits for the next arrival)."""
    free = np.flatnonzero(~p.active)
    if not len(free):
        return now
    if isinstance(config.load, ClosedLoop):
        arrived = [now] * len(free)
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
    p.active[new], p.done[new], p.starved[new], p.worst[new], p.skipped[new] = True, 0, 0, 0, 0
    p.arrived_s[new] = arrived
    if config.lengths == "fixed":
        p.left[new] = config.tokens
    else:
        p.left[new] = rng.geometric(1 / config.tokens, len(new))
    for older in p.past:
        older[new] = 1.0
    p.forecast[new] = 1.0
    now += config.prefill_s * len(new)
    p.began_s[new] = now
    return now


def _drafted(config: SimConfig, p: _Places, at_B: np.ndarray, gamma: int) -> np.ndarray:
    if config.policy is None:
        return np.zeros(len(at_B), dtype=np.int64)
    if not config.gate:
        return np.full(len(at_B), gamma)
    lens_B = draft_lengths(p.forecast[at_B], config.table, probe_B=p.skipped[at_B] >= PROBE_EVERY - 1)
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
    p.starved[at_B] = np.where(length_B > 0, 0, p.starved[at_B] + 1)
    p.worst[at_B] = np.maximum(p.worst[at_B], p.starved[at_B])
    p.past.insert(0, p.past.pop())
    G = survival_BG.shape[1]
    if int(lens_B.min()) < G:
        # what was not drafted has shown no confidence
        survival_BG = np.where(np.arange(G) < lens_B[:, None], survival_BG, p.forecast[at_B])
    p.past[0][at_B] = survival_BG
    p.forecast[at_B] = FORGETTING * p.forecast[at_B] + (1 - FORGETTING) * survival_BG


def _leading(kept_BG: np.ndarray) -> np.ndarray:
    """Drafts before the first that is not kept."""
    alive_B = kept_BG[:, 0].copy()
    count_B = alive_B.astype(np.int64)
    for k in range(1, kept_BG.shape[1]):
        alive_B &= kept_BG[:, k]
        count_B += alive_B
    return count_B
