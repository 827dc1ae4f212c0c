"""When not to speculate: the speed of blocks over plain decoding, by acceptance, cost of drafting, and load."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from dspec_lab.scheduler.cost_table import CostTable


@dataclass(frozen=True, slots=True)
class BreakEvenMap:
    """Speed-up over plain decoding for P acceptances (rising) and Q costs of drafting, at one load."""

    requests: int
    accept_P: Float[np.ndarray, " P"]  # chance of each draft, given those before it
    draft_s_Q: Float[np.ndarray, " Q"]  # seconds that drafting a block takes for one request alone
    speedup_PQ: Float[np.ndarray, "P Q"]  # of the block length that is best there

    @property
    def break_even_Q(self) -> Float[np.ndarray, " Q"]:
        """Acceptance from which speculation pays, between grid points by a straight line; NaN where it never does."""
        found_Q = np.full(len(self.draft_s_Q), np.nan)
        for q in range(len(self.draft_s_Q)):
            over_P = self.speedup_PQ[:, q] > 1
            if over_P.any():
                p = int(over_P.argmax())
                edge = (self.accept_P[max(p - 1, 0)], self.accept_P[p])
                speeds = (self.speedup_PQ[max(p - 1, 0), q], self.speedup_PQ[p, q])
                found_Q[q] = float(np.interp(1.0, speeds, edge))
        return found_Q


def gained_tokens(accept_P: Float[np.ndarray, " P"], drafts: int) -> Float[np.ndarray, " P"]:
    """Tokens of a round: 1 + a + a^2 + ... + a^drafts."""
    return 1.0 + sum((accept_P**k for k in range(1, drafts + 1)), start=np.zeros_like(accept_P))


def acceptance_of(accepted_length: float, drafts: int) -> float:
    """The steady acceptance at which blocks of `drafts` gain `accepted_length` tokens a round."""
    if not 1 <= accepted_length <= drafts + 1:
        raise ValueError(f"{drafts} drafts gain 1 to {drafts + 1} tokens a round, got {accepted_length}")
    grid_P = np.linspace(0.0, 1.0, 4001)
    return float(np.interp(accepted_length, gained_tokens(grid_P, drafts), grid_P))


def block_speedup(
    table: CostTable,
    accept_P: Float[np.ndarray, " P"],
    draft_s_Q: Float[np.ndarray, " Q"],
    *,
    requests: int,
    drafts: int,
) -> Float[np.ndarray, "P Q"]:
    """Tokens per second of blocks of `drafts` over plain decoding, both with `requests` in the batch.

    `draft_s_Q` is the time of one request's block. More requests take that of the table's drafter in proportion if it
    was measured in joint passes (`DraftCost.growth`), else as many times as much. 0 where the table does not cover the
    rows.
    """
    round_s_N = table.round_s_N(requests, requests * drafts)
    gained_P1 = gained_tokens(accept_P, drafts)[:, None]
    return gained_P1 * round_s_N[0] / (round_s_N[-1] + table.draft.growth(requests, drafts) * draft_s_Q)


def break_even_map(
    table: CostTable,
    *,
    requests: int = 1,
    most_drafts: int = 7,
    accept_P: Float[np.ndarray, " P"] | None = None,
    draft_s_Q: Float[np.ndarray, " Q"] | None = None,
) -> BreakEvenMap:
    """The best of 1..most_drafts drafts everywhere; drafting costs the same however long the block is.

    By default acceptance 0 to 1 and drafting for up to one plain token's time.
    """
    if requests < 1 or most_drafts < 1:
        raise ValueError(f"requests and drafts must be at least 1, got {requests} and {most_drafts}")
    accept_P = np.linspace(0.0, 1.0, 101) if accept_P is None else accept_P
    draft_s_Q = np.linspace(0.0, float(table.round_s_N(1, 0)[0]), 41) if draft_s_Q is None else draft_s_Q
    speeds = [block_speedup(table, accept_P, draft_s_Q, requests=requests, drafts=n) for n in range(1, most_drafts + 1)]
    return BreakEvenMap(requests, accept_P, draft_s_Q, np.max(speeds, axis=0))
