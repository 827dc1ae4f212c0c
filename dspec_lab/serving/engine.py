"""The real batch under load: requests come by a closed or open loop, share passes of the target, and are timed.

The batch is `verifier.ragged.RaggedBatch`, the same one that plain use runs; here are only the clock, the line of
waiting requests, and the counts.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import ParamSpec

import numpy as np

from dspec_lab.config import DecodeConfig
from dspec_lab.core.types import Generation
from dspec_lab.drafters.protocol import Drafter
from dspec_lab.models.decoder import LeanDecoder
from dspec_lab.scheduler.batch import BatchScheduler, Decision
from dspec_lab.scheduler.cost_table import CostTable
from dspec_lab.scheduler.policies import Policy, useful_drafts
from dspec_lab.serving.summary import LoadSummary, RequestEnd, RoundTally, summarise
from dspec_lab.serving.workload import ClosedLoop, Load
from dspec_lab.verifier.ragged import BatchRequest, BatchRound, RaggedBatch
from dspec_lab.verifier.request import Request

P = ParamSpec("P")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadRun:
    """What one load did on the real engine."""

    summary: LoadSummary  # of the rounds, reading of prompts left out
    full: LoadSummary | None  # of the rounds in which all places were taken; None where there was none
    prefill_s: float
    generations: dict[str, Generation]
    rounds: list[BatchRound]
    decisions: list[Decision]


@dataclass(slots=True)
class _Clock:
    """Seconds since the load began, on which idle time is skipped rather than slept through, and which can be held."""

    start: float = field(default_factory=time.perf_counter)
    skipped: float = 0.0

    def now(self) -> float:
        return time.perf_counter() - self.start + self.skipped

    def skip_to(self, moment: float) -> None:
        self.skipped += max(0.0, moment - self.now())

    def back_to(self, moment: float) -> None:
        self.skipped += moment - self.now()


@dataclass(slots=True)
class _Track:
    """One running request."""

    arrived_s: float
    began_s: float
    last_s: float
    longest_gap_s: float = 0.0
    starved: int = 0
    worst: int = 0


def serve(
    target: LeanDecoder,
    prompts: Sequence[Sequence[int]],
    config: DecodeConfig,
    load: Load,
    *,
    drafter: Drafter | None,
    policy: Policy | None = None,
    table: CostTable | None = None,
    gate: bool = False,
    calibrate: Callable[[np.ndarray], np.ndarray] | None = None,
    total: int | None = None,
) -> Generator[float, None, LoadRun]:
    """Serve `total` requests (all arrivals of an open loop) that take turns with `prompts`, to their end.

    After each round it gives the share of the tokens served so far, at most, and waits to be asked for the next; what
    happens meanwhile does not count. So several runs can take turns on one machine.

    Request i has the id `str(i)`. Without a drafter this is plain decoding in a batch. With one, `policy` decides how
    many drafts are verified; None verifies all. A fixed length drafts no more than it verifies, as a server would; with
    `gate` each request drafts as far as earlier rounds promise to pay for it. Raises `ValueError` before anything runs
    for what cannot be served.
    """
    if not prompts:
        raise ValueError("no prompts to serve")
    places = load.concurrency if isinstance(load, ClosedLoop) else load.max_active
    count = (total or 2 * places) if isinstance(load, ClosedLoop) else len(load.arrivals_s)
    if count < 1:
        raise ValueError(f"at least 1 request must be served, got {count}")
    if drafter is None and (policy is not None or gate):
        raise ValueError("plain decoding drafts nothing, so a policy or a gate has nothing to decide")
    scheduler = None
    config = replace(config, gamma=useful_drafts(policy, config.gamma))
    if policy is not None:
        scheduler = BatchScheduler(policy, gamma=config.gamma, table=table, calibrate=calibrate, gate=gate)
    return _rounds(target, prompts, config, load, drafter, scheduler, gate, count)


def _to_its_end(begin: Callable[P, Generator[float, None, LoadRun]]) -> Callable[P, LoadRun]:
    """`begin` run without turns."""

    def run(*args: P.args, **options: P.kwargs) -> LoadRun:
        """The run of `serve`, from its beginning to its end: the same arguments, the same errors."""
        steps = begin(*args, **options)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return end.value

    return run


run_load = _to_its_end(serve)


def _rounds(
    target: LeanDecoder,
    prompts: Sequence[Sequence[int]],
    config: DecodeConfig,
    load: Load,
    drafter: Drafter | None,
    scheduler: BatchScheduler | None,
    gate: bool,
    count: int,
) -> Generator[float, None, LoadRun]:
    """`serve`, when it is known that it can be."""
    closed = isinstance(load, ClosedLoop)
    places = load.concurrency if isinstance(load, ClosedLoop) else load.max_active
    watched = _Watch(scheduler)
    batch = RaggedBatch(
        target,
        policy=watched if drafter is not None else None,
        gate=scheduler.draft_lengths if scheduler is not None and gate else None,
    )
    # a closed loop's requests are there from the start, and each counts as arriving when its place becomes free
    waiting = deque(enumerate([0.0] * count if closed else load.arrivals_s.tolist()))  # type: ignore[union-attr]
    tracks, ends = dict[str, _Track](), list[RequestEnd]()
    done, full, all_places = dict[str, Generation](), RoundTally(), RoundTally()
    clock, prefill_s, tokens_of = _Clock(), 0.0, dict[str, int]()

    def end(name: str, generation: Generation) -> None:
        track, done[name] = tracks.pop(name), generation
        gained = len(generation.token_ids) - 1
        # the request's own clock does not know of turns
        generation.decode_s = clock.now() - track.began_s
        ends.append(
            RequestEnd(
                arrived_s=track.arrived_s,
                began_s=track.began_s,
                ended_s=clock.now(),
                tokens=gained,
                starved_rounds=track.worst,
                longest_gap_s=track.longest_gap_s,
            )  # fmt: skip
        )

    while waiting or len(batch):
        if not closed and not len(batch):
            clock.skip_to(waiting[0][1])
        while waiting and len(batch) < places and (closed or waiting[0][1] <= clock.now()):
            index, arrived = waiting.popleft()
            name, before = str(index), clock.now()
            request = BatchRequest(
                request_id=name, prompt_ids=tuple(prompts[index % len(prompts)]), config=config, drafter=drafter
            )  # fmt: skip
            counter = _Counter(tokens_of, name)
            ended = batch.join(replace(request, on_tokens=counter))
            now = clock.now()
            prefill_s += now - before
            tracks[name] = _Track(arrived_s=before if closed else arrived, began_s=now, last_s=now)
            if ended is not None:
                end(name, ended)
        if not len(batch):
            continue
        active, before_tokens, began = list(tracks), dict(tokens_of), clock.now()
        finished = batch.step()
        now, record = clock.now(), batch.rounds[-1]
        lengths = dict(zip(active, watched.lengths or [0] * len(active), strict=True))
        entry = {
            "seconds": now - began,
            "requests": record.requests,
            "drafted": watched.drafted,
            "verified": record.rows - record.requests,
            "committed": sum(tokens_of[name] - before_tokens[name] for name in active),
            "draft_s": record.draft_s,
        }
        full.add(**entry)  # type: ignore[arg-type]
        if record.requests == places:
            all_places.add(**entry)  # type: ignore[arg-type]
        for name in active:
            track = tracks[name]
            track.longest_gap_s = max(track.longest_gap_s, now - track.last_s)
            track.last_s = now
            track.starved = 0 if lengths[name] or drafter is None else track.starved + 1
            track.worst = max(track.worst, track.starved)
        for name, generation in finished.items():
            end(name, generation)
        held = clock.now()
        yield sum(tokens_of.values()) / (count * config.max_new_tokens)
        clock.back_to(held)
    return LoadRun(
        summary=summarise(full, ends),
        full=summarise(all_places, ends) if all_places.seconds else None,
        prefill_s=prefill_s,
        generations={str(i): done[str(i)] for i in range(count)},
        rounds=batch.rounds,
        decisions=scheduler.decisions if scheduler else [],
    )


class _Watch:
    """A length policy that remembers the last round's drafts and lengths."""

    def __init__(self, inner: BatchScheduler | None) -> None:
        self._inner = inner
        self.lengths: list[int] = []
        self.drafted = 0

    def __call__(self, requests: Sequence[Request]) -> list[int]:
        offered = [request.proposal.gamma for request in requests]
        self.drafted = sum(offered)
        self.lengths = self._inner(requests) if self._inner is not None else offered
        return self.lengths


class _Counter:
    """Counts the tokens of one request as they come."""

    def __init__(self, totals: dict[str, int], name: str) -> None:
        self._totals, self._name = totals, name
        totals[name] = 0

    def __call__(self, tokens: Sequence[int], sources: Sequence[str]) -> None:
        self._totals[self._name] += len(tokens)
