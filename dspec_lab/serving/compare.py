"""Policies on the real engine, load by load: runs that take turns, and each policy against the best fixed length."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dspec_lab.config import DecodeConfig
from dspec_lab.drafters.protocol import Drafter
from dspec_lab.models.decoder import LeanDecoder
from dspec_lab.scheduler.cost_table import CostTable
from dspec_lab.scheduler.policies import FixedLength, FullBlock, Policy
from dspec_lab.serving.engine import LoadRun, serve
from dspec_lab.serving.workload import ClosedLoop, Load

PLAIN = "plain"
GATED = " + gate"
Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One policy at one load: its runs, one a repeat."""

    policy: str
    requests: int
    runs: tuple[LoadRun, ...]
    fixed: bool  # verifies the same number of drafts always

    @property
    def throughput(self) -> float:
        """Median over repeats of tokens per second while all places were taken (of the whole run, if never)."""
        return statistics.median((run.full or run.summary).throughput_tok_per_s for run in self.runs)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready: the medians over repeats of what the summaries say, and how far the throughput spread."""
        kept = [run.full or run.summary for run in self.runs]
        whole = [run.summary for run in self.runs]
        rates = [summary.throughput_tok_per_s for summary in kept]
        last = self.runs[-1]
        return {
            "policy": self.policy,
            "requests": self.requests,
            "throughput_tok_per_s": self.throughput,
            "throughput_min": min(rates),
            "throughput_max": max(rates),
            "user_p50_tok_per_s": statistics.median(s.user_p50_tok_per_s or 0.0 for s in whole),
            "user_p95_tok_per_s": statistics.median(s.user_p95_tok_per_s or 0.0 for s in whole),
            "accepted_length": statistics.median(s.accepted_length for s in kept),
            "budget": statistics.median(s.budget for s in kept),
            "drafted": statistics.median(s.drafted for s in kept),
            "wasted_rows": statistics.median(s.wasted_rows for s in kept),
            "round_ms": 1e3 * statistics.median(s.round_s for s in kept),
            "draft_ms": 1e3 * statistics.median(statistics.fmean(r.draft_s for r in run.rounds) for run in self.runs),
            "verify_ms": 1e3 * statistics.median(statistics.fmean(r.verify_s for r in run.rounds) for run in self.runs),
            "most_starved_rounds": max(s.most_starved_rounds or 0 for s in whole),
            "longest_gap_s": max(s.longest_gap_s or 0.0 for s in whole),
            "wait_p95_s": statistics.median(s.wait_p95_s or 0.0 for s in whole),
            "requests_served": len(last.generations),
            "requests_ended": whole[-1].requests_ended,
            "rounds": whole[-1].rounds,
            "prefill_s": last.prefill_s,
            "decide_us": 1e6 * statistics.median([d.seconds for d in last.decisions]) if last.decisions else None,
            "survival_from": sorted({d.source for d in last.decisions}),
        }


def compare_policies(
    target: LeanDecoder,
    prompts: Sequence[Sequence[int]],
    config: DecodeConfig,
    drafter: Drafter,
    policies: Sequence[Policy],
    *,
    table: CostTable | None,
    loads: Mapping[int, Load],
    total: Callable[[int], int] = lambda requests: 2 * requests,
    repeats: int = 2,
    plain: bool = True,
    gated: Sequence[Policy] = (),
    progress: Progress | None = None,
) -> list[Entry]:
    """Every policy (and plain decoding) at every load, `repeats` times.

    Within a repeat the policies take turns round by round, whoever has served least going next: what slows the machine
    for a while slows all of them.

    The policies in `gated` run with draft gating. A closed loop serves `total(requests)` requests.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    if not (policies or gated) or not loads:
        raise ValueError(f"{len(policies) + len(gated)} policies and {len(loads)} loads: both are needed")
    entries = []
    variants: list[tuple[str, Policy | None, bool]] = [(PLAIN, None, False)] if plain else []
    variants += [(policy.name, policy, False) for policy in policies]
    variants += [(policy.name + GATED, policy, True) for policy in gated]
    for requests, load in loads.items():
        runs: dict[str, list[LoadRun]] = {name: [] for name, _, _ in variants}
        for repeat in range(repeats):
            if progress is not None:
                progress(f"{requests} requests, repeat {repeat + 1} of {repeats}")
            steps = {
                name: serve(
                    target, prompts, config, load, drafter=drafter if policy is not None else None, policy=policy,
                    table=table, gate=gates, total=total(requests) if isinstance(load, ClosedLoop) else None,
                )
                for name, policy, gates in variants
            }  # fmt: skip
            for name, run in take_turns(steps).items():
                runs[name].append(run)
        for name, policy, gates in variants:
            fixed = isinstance(policy, (FixedLength, FullBlock)) and not gates
            entries.append(Entry(policy=name, requests=requests, runs=tuple(runs[name]), fixed=fixed))
    return entries


def take_turns(steps: Mapping[str, Generator[float, None, LoadRun]]) -> dict[str, LoadRun]:
    """The runs to their ends; the one that has served the least share goes next."""
    served, done = dict.fromkeys(steps, 0.0), dict[str, LoadRun]()
    while served:
        name = min(served, key=served.__getitem__)
        try:
            served[name] = next(steps[name])
        except StopIteration as end:
            done[name] = end.value
            del served[name]
    return done


def against_fixed(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Per load: the best fixed length, and each other policy's share of it.

    Plain decoding counts as length 0 in `best_fixed` and `ratio`; `best_drafting` and `ratio_to_drafting` leave it out.
    """
    found = []
    for requests in sorted({entry.requests for entry in entries}):
        here = [entry for entry in entries if entry.requests == requests]
        drafting = [entry for entry in here if entry.fixed]
        fixed = drafting + [entry for entry in here if entry.policy == PLAIN]
        if not fixed:
            continue
        best = max(fixed, key=lambda entry: entry.throughput)
        others = [entry for entry in here if entry not in fixed]
        result = {
            "requests": requests, "best_fixed": best.policy, "best_fixed_tok_per_s": best.throughput,
            "ratio": {entry.policy: entry.throughput / best.throughput for entry in others},
        }  # fmt: skip
        if drafting:
            most = max(drafting, key=lambda entry: entry.throughput)
            result |= {
                "best_drafting": most.policy, "best_drafting_tok_per_s": most.throughput,
                "ratio_to_drafting": {entry.policy: entry.throughput / most.throughput for entry in others},
            }  # fmt: skip
        found.append(result)
    return found
