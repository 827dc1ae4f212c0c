"""The simulator over a range of loads, and its DSpark and MTP-1 curves beside the paper's Figures 7 and 8."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dspec_lab.scheduler.policies import FixedLength, Policy
from dspec_lab.serving.paper_fit import FREE, Curve, column, paper_rows
from dspec_lab.serving.presets import Preset
from dspec_lab.serving.simulator import SimConfig, simulate
from dspec_lab.serving.summary import LoadSummary
from dspec_lab.serving.workload import ClosedLoop

MTP = "mtp-1 (own law)"
Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepPoint:
    """One policy at one load."""

    policy: str
    lossless: bool
    concurrency: int
    summary: LoadSummary

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready, flat."""
        head = {"policy": self.policy, "lossless": self.lossless, "requests": self.concurrency}
        return {**head, **self.summary.as_dict()}


def sweep(
    preset: Preset,
    policies: Sequence[Policy],
    concurrency: Sequence[int] | None = None,
    *,
    request_rounds: int = 60_000,
    tokens: int = 256,
    gate: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[SweepPoint]:
    """Closed loops at each load, about `request_rounds` request-rounds each; MTP-1 by its own law where it has one."""
    if not policies:
        raise ValueError("no policy to simulate")
    if request_rounds < 100:
        raise ValueError(f"request_rounds must be at least 100, got {request_rounds}")
    loads = tuple(concurrency or preset.concurrency)
    if max(loads) > preset.table.last_row:
        raise ValueError(f"the cost table covers 1 to {preset.table.last_row} rows, {max(loads)} requests need as many")
    jobs = [(policy.name, policy, preset.acceptance, gate) for policy in policies]
    if preset.mtp is not None:
        jobs.append((MTP, FixedLength(1), preset.mtp, False))
    points = []
    for name, policy, acceptance, gated in jobs:
        for requests in loads:
            if progress is not None:
                progress(f"{name}, {requests} requests")
            config = SimConfig(
                load=ClosedLoop(concurrency=requests), policy=policy, table=preset.table, acceptance=acceptance,
                tokens=tokens, gate=gated, seed=seed, max_rounds=max(50, request_rounds // requests),
            )  # fmt: skip
            points.append(
                SweepPoint(policy=name, lossless=policy.lossless, concurrency=requests, summary=simulate(config))
            )
    return points


def curve_of(points: Sequence[SweepPoint], policy: str) -> Curve:
    """The points of one policy as a curve over the number of requests."""
    mine = sorted((point for point in points if point.policy == policy), key=lambda point: point.concurrency)
    if not mine:
        raise ValueError(f"no point of the policy {policy!r}; there are {sorted({p.policy for p in points})}")
    return Curve(
        requests_N=np.array([float(point.concurrency) for point in mine]),
        user_tok_per_s_N=np.array([point.summary.user_tok_per_s for point in mine]),
        budget_N=np.array([point.summary.budget for point in mine]),
    )


def against_paper(points: Sequence[SweepPoint], preset: Preset, policy: str) -> dict[str, Any]:
    """Gains of `policy` over MTP-1 and its budgets, beside the paper's; shares, not percent.

    `throughput_gain`: at the user rate of the paper's comparison. `speed_gain`: at MTP-1's throughput there. Budgets
    are compared with the curve drawn in Figure 8 at the loads that lie on it.
    """
    if preset.sla_tok_per_s is None:
        raise ValueError(f"the preset {preset.name} has no counterpart in the paper")
    ours, mtp, sla = curve_of(points, policy), curve_of(points, MTP), preset.sla_tok_per_s
    base = mtp.throughput_at(sla)
    anchor = next(row for row in paper_rows("fig7_anchors", model=preset.name) if float(row["sla_tps_per_user"]) == sla)
    drawn = paper_rows("fig8_budget", model=preset.name, method="dspark", kind="fit")
    at_N, budget_N = column(drawn, "concurrency"), column(drawn, "verification_budget")
    inside_N = (ours.requests_N >= at_N.min()) & (ours.requests_N <= at_N.max())
    off_N = ours.budget_N[inside_N] - np.interp(ours.requests_N[inside_N], at_N, budget_N)
    if not len(off_N):
        raise ValueError(f"no load lies on the paper's budget curve, {at_N.min():.0f} to {at_N.max():.0f} requests")
    gains = {
        "throughput_gain": (ours.throughput_at(sla) / base - 1, float(anchor["printed_throughput_gain_pct"]) / 100),
        "speed_gain": (ours.user_rate_at(base) / sla - 1, float(anchor["printed_tps_gain_pct"]) / 100),
    }
    return {
        "sla_tok_per_s": sla,
        **{
            name: {"ours": found, "paper": wanted, "relative_error": found / wanted - 1}
            for name, (found, wanted) in gains.items()
        },
        "mtp_throughput": {"ours": base, "paper": float(anchor["mtp_throughput_per_gpu"])},
        "budget_largest_error_tokens": float(np.abs(off_N).max()),
        "budget_by_requests": {
            str(int(n)): {"ours": float(found), "paper": float(found - off)}
            for n, found, off in zip(ours.requests_N[inside_N], ours.budget_N[inside_N], off_N, strict=True)
        },
        "free_parameters": list(FREE),
    }
