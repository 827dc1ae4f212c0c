"""What a confidence threshold would have done to recorded rounds: tokens kept, tokens wasted, speed by measured cost.

A trace of whole blocks is cut after the fact. The verdict on a draft does not depend on how many drafts follow it, so
for each recorded round the counts are those that the threshold would have given. What is not replayed: a shorter
block ends elsewhere, so the next round would have begun elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from dspec_lab.calibration.records import THRESHOLD_MARK, Rounds, survival
from dspec_lab.scheduler.cost_table import CostTable

THRESHOLDS = tuple(round(0.05 * step, 2) for step in range(20))


@dataclass(frozen=True, kw_only=True, slots=True)
class ThresholdRow:
    """One threshold on survival. Token counts are means per round; shares are 0..1."""

    threshold: float
    rounds: int
    verified: float  # drafts sent to the target
    accepted: float  # tokens gained, the target's extra one included
    rejected: float  # drafts sent in vain
    accept_rate: float | None  # accepted drafts per draft sent; None where none was sent
    verify_rate: float  # tokens gained per row sent: what the paper's Figure 5 calls acceptance rate
    tokens_per_s: float | None  # None without costs


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundCost:
    """Seconds of a round of one request: drafting, overhead, and a pass over 1, 2, ... rows."""

    draft_s: float
    overhead_s: float
    verify_s_J: Float[np.ndarray, " J"]

    def __post_init__(self) -> None:
        for name, values in (("draft_s", [self.draft_s]), ("overhead_s", [self.overhead_s])):
            if not np.isfinite(values[0]) or values[0] < 0:
                raise ValueError(f"{name} must be at least 0, got {values[0]}")
        if not len(self.verify_s_J) or not (np.isfinite(self.verify_s_J) & (self.verify_s_J > 0)).all():
            raise ValueError(f"passes must take more than 0 s, got {self.verify_s_J.tolist()}")

    def seconds(self, rows_I: Int[np.ndarray, " I"]) -> Float[np.ndarray, " I"]:
        """Seconds of rounds that send so many rows."""
        if rows_I.max(initial=1) > len(self.verify_s_J):
            raise ValueError(f"a pass over {int(rows_I.max())} rows was not measured, at most {len(self.verify_s_J)}")
        return self.draft_s + self.overhead_s + self.verify_s_J[rows_I - 1]


def recorded_cost(rounds: Rounds, table: CostTable) -> RoundCost:
    """The costs of a trace: its median drafting time and overhead, and its median pass scaled to other widths.

    Only the ratios of the table's passes to that of a whole block are used (`serving.presets.recorded_cpu_table` has
    the measured ones), so that all times come from the trace's machine and load.
    """
    whole = rounds.gamma_I == rounds.widest
    if not whole.any():
        raise ValueError("no round has a whole block, whose time is the unit")
    most = rounds.widest + 1
    if table.rows[0] > 1 or table.last_row < most:
        raise ValueError(f"passes over 1..{most} rows are needed, the table has {table.rows[0]}..{table.last_row}")
    shape_J = table.verify_s_N[1 : most + 1]
    return RoundCost(
        draft_s=float(np.median(rounds.draft_s_I[whole])),
        overhead_s=float(np.median(rounds.overhead_s_I[whole])),
        verify_s_J=float(np.median(rounds.verify_s_I[whole])) * shape_J / shape_J[-1],
    )


def kept_lengths(rounds: Rounds, threshold: float) -> Int[np.ndarray, " I"]:
    """Drafts that each round would send: those before the first whose survival is below the threshold."""
    survival_IG = survival(rounds.confidence_IG)
    # survival never rises, so counting is stopping at the first; NaN compares false
    return (rounds.proposed_IG & (survival_IG >= threshold)).sum(1)


def threshold_sweep(
    rounds: Rounds, thresholds: Sequence[float] = THRESHOLDS, *, cost: RoundCost | None = None
) -> list[ThresholdRow]:
    """One row per threshold, from a trace of whole blocks with confidences (raw, or calibrated by `apply`)."""
    if not rounds.has_confidence:
        raise ValueError(f"the drafter {rounds.drafter!r} has no confidence for every draft")
    if THRESHOLD_MARK in rounds.drafter:
        raise ValueError(f"the blocks of {rounds.drafter!r} were cut already; a sweep needs whole blocks")
    bad = [t for t in thresholds if not 0 <= t <= 1]
    if bad:
        raise ValueError(f"a threshold must lie in 0..1, got {bad[0]}")
    rows = []
    for threshold in thresholds:
        sent_I = kept_lengths(rounds, threshold)
        kept_I = np.minimum(rounds.num_accepted_I, sent_I)
        gained, sent = float((kept_I + 1).sum()), float(sent_I.sum())
        seconds = None if cost is None else float(cost.seconds(sent_I + 1).sum())
        rows.append(
            ThresholdRow(
                threshold=float(threshold),
                rounds=len(rounds),
                verified=sent / len(rounds),
                accepted=gained / len(rounds),
                rejected=float((sent_I - kept_I).mean()),
                accept_rate=float(kept_I.sum()) / sent if sent else None,
                verify_rate=gained / (sent + len(rounds)),
                tokens_per_s=None if seconds is None else gained / seconds,
            )
        )
    return rows


def best_threshold(rows: Sequence[ThresholdRow]) -> ThresholdRow:
    """The fastest row; the lowest threshold of equals."""
    timed = [row for row in rows if row.tokens_per_s is not None]
    if not timed:
        raise ValueError("no row has a speed: give the sweep a cost")
    return max(timed, key=lambda row: (row.tokens_per_s, -row.threshold))
