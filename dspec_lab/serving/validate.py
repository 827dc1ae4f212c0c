"""The simulator beside the real engine: the points of a `serve-bench` record, simulated from what it measured.

In go the record's cost table (passes timed alone, drafting and settling fitted on batches of full blocks) and the
drafter's acceptance at every token. Nothing is fitted to the throughputs that are predicted.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dspec_lab.scheduler.cost_table import CostTable, parse_table
from dspec_lab.scheduler.policies import policy_from_name
from dspec_lab.serving.compare import GATED, PLAIN
from dspec_lab.serving.measured import MeasuredAcceptance, parse_measured
from dspec_lab.serving.simulator import SimConfig, simulate
from dspec_lab.serving.workload import ClosedLoop


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationPoint:
    """One policy at one load. Errors are simulated / engine - 1."""

    policy: str
    requests: int
    engine_tok_per_s: float
    simulated_tok_per_s: float
    throughput_error: float
    engine_accepted_length: float
    simulated_accepted_length: float
    engine_budget: float
    simulated_budget: float
    engine_round_ms: float
    simulated_round_ms: float


def validate(record: Mapping[str, Any]) -> list[ValidationPoint]:
    """Every point of the record, in its order. `ValueError` says what a record lacks."""
    for key in ("rows", "cost_table", "acceptance", "run"):
        if not record.get(key):
            raise ValueError(f"the record holds no {key}; dspec serve-bench writes it, at temperature 0 with a table")
    settings = record["run"]["settings"]
    if settings.get("rate") is not None:
        raise ValueError(f"only closed loops are compared, this one has arrivals at {settings['rate']} a second")
    table, measured = parse_table(record["cost_table"]), parse_measured(record["acceptance"])
    return [_point(row, table, measured, settings) for row in record["rows"]]


def largest_error(points: list[ValidationPoint], pace: Mapping[int, float] | None = None) -> tuple[float, float]:
    """(median, largest) size of the throughput's error; with `pace` after that factor of each load is taken out."""
    errors = [abs((1 + point.throughput_error) / (pace or {}).get(point.requests, 1.0) - 1) for point in points]
    return statistics.median(errors), max(errors)


def paces(points: list[ValidationPoint]) -> dict[int, float]:
    """By number of requests: simulated over engine, the median over policies.

    A table is measured in some minutes and a load in others, and on its own rather than between other policies' rounds;
    what that makes of the policies of one load is mostly one factor.
    """
    return {
        requests: statistics.median(1 + point.throughput_error for point in points if point.requests == requests)
        for requests in sorted({point.requests for point in points})
    }


def points_as_dicts(points: list[ValidationPoint]) -> list[dict[str, Any]]:
    """JSON-ready."""
    return [asdict(point) for point in points]


def _point(
    row: Mapping[str, Any], table: CostTable, measured: MeasuredAcceptance, settings: Mapping[str, Any]
) -> ValidationPoint:
    name, requests = row["policy"], row["requests"]
    base = name.removesuffix(GATED)
    found = simulate(
        SimConfig(
            load=ClosedLoop(concurrency=requests),
            policy=None if name == PLAIN else policy_from_name(base.replace(" ", "-"), table),
            table=table,
            acceptance=measured.law(),
            # the first token comes with the prompt
            tokens=settings["max_new_tokens"] - 1,
            lengths="text",
            total=row["requests_served"],
            full_only=True,
            gate=name.endswith(GATED),
            learn=name != PLAIN,
            context_tokens=measured.context_tokens,
        )
    )
    return ValidationPoint(
        policy=name,
        requests=requests,
        engine_tok_per_s=row["throughput_tok_per_s"],
        simulated_tok_per_s=found.throughput_tok_per_s,
        throughput_error=found.throughput_tok_per_s / row["throughput_tok_per_s"] - 1,
        engine_accepted_length=row["accepted_length"],
        simulated_accepted_length=found.accepted_length,
        engine_budget=row["budget"],
        simulated_budget=found.budget,
        engine_round_ms=row["round_ms"],
        simulated_round_ms=1e3 * found.round_s,
    )
