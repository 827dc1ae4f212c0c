"""Acceptance by draft position: what one number p predicts, what is measured, and why the two differ."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dspec_lab.calibration.records import Rounds
from dspec_lab.evaluation.intervals import Interval, pooled_ratio_interval

RESAMPLES = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class DecayRow:
    """Draft position k. Shares are 0..1; bounds are 95 % over prompts, None for fewer than two prompts."""

    position: int
    proposed: int  # rounds that proposed k
    reached: int  # of these, rounds that accepted 1..k-1
    survival: float  # drafts 1..k all accepted, among rounds that proposed k
    survival_low: float | None
    survival_high: float | None
    conditional: float | None  # k accepted given 1..k-1; None where none got there
    conditional_low: float | None
    conditional_high: float | None
    geometric: float  # p^k with p the acceptance at position 1
    accept_prob: float | None  # mean 1 - TV over all rounds that proposed k, easy and hard alike
    independent: float | None  # product of these means up to k: survival if positions erred independently


def decay_rows(rounds: Rounds, *, longest: int | None = None) -> list[DecayRow]:
    """One row per position up to `longest`.

    From `geometric` to `independent` is what changes with depth; from `independent` to `survival` is that errors go
    together: a round whose first drafts are good is an easy one, whose later drafts are good too.
    """
    if not len(rounds) or not rounds.proposed_IG.any():
        raise ValueError(f"the trace of {rounds.drafter!r} has no drafted position")
    longest = rounds.widest if longest is None else longest
    if not 1 <= longest <= rounds.widest:
        raise ValueError(f"the draft length must lie in 1..{rounds.widest}, got {longest}")
    rows: list[DecayRow] = []
    independent: float | None = 1.0
    for k in range(longest):
        there_I, got_I = rounds.proposed_IG[:, k], rounds.reached_IG[:, k]
        kept_I = rounds.survived_IG[:, k]
        survived, low, high = _share(rounds, kept_I, there_I)
        conditional = _share(rounds, kept_I, got_I) if got_I.any() else (None, None, None)
        chances = rounds.accept_prob_IG[there_I, k]
        mean = float(chances.mean()) if np.isfinite(chances).all() else None
        independent = None if independent is None or mean is None else independent * mean
        first = rows[0].survival if rows else survived
        rows.append(
            DecayRow(
                position=k + 1, proposed=int(there_I.sum()), reached=int(got_I.sum()), survival=float(survived),
                survival_low=low, survival_high=high, conditional=conditional[0], conditional_low=conditional[1],
                conditional_high=conditional[2], geometric=first ** (k + 1), accept_prob=mean,
                independent=independent,
            )
        )  # fmt: skip
    return rows


def autocorrelation(rounds: Rounds, lag: int = 1) -> Interval:
    """Correlation of 1 - TV at positions k and k + lag of a round, each less its position's mean, pooled over k.

    At temperature 0 1 - TV is 1 for a right draft and 0 for a wrong one, so this is the autocorrelation of errors.
    Above, it is that of the chances; verdicts behind a rejection do not exist. Positions behind a rejection count.
    """
    if not 1 <= lag < rounds.widest:
        raise ValueError(f"the lag must lie in 1..{rounds.widest - 1}, got {lag}")
    chance_IG = np.where(rounds.proposed_IG, rounds.accept_prob_IG, np.nan)
    if not np.isfinite(chance_IG[rounds.proposed_IG]).all():
        raise ValueError(f"the trace of {rounds.drafter!r} has no accept_prob (1 - TV) for every draft")
    away_IG = chance_IG - np.nanmean(chance_IG, axis=0)
    x_IG, y_IG = away_IG[:, :-lag], away_IG[:, lag:]
    both = np.isfinite(x_IG) & np.isfinite(y_IG)
    x_IG, y_IG = np.where(both, x_IG, 0.0), np.where(both, y_IG, 0.0)
    prompt_I, count = rounds.prompt_index()
    sums_BX = np.stack(
        [np.bincount(prompt_I, (a * b).sum(1), count) for a, b in ((x_IG, y_IG), (x_IG, x_IG), (y_IG, y_IG))], axis=1
    )
    estimate = float(_correlation(sums_BX.sum(0)[:, None])[0])
    if count < 2:
        return Interval(estimate, estimate, estimate)
    weights_XB = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    drawn_X = _correlation((weights_XB @ sums_BX).T)
    low, high = np.nanquantile(drawn_X, [0.025, 0.975])
    return Interval(estimate, float(low), float(high))


def _correlation(sums: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore", divide="ignore"):
        return sums[0] / np.sqrt(sums[1] * sums[2])


def _share(rounds: Rounds, kept_I: np.ndarray, there_I: np.ndarray) -> tuple[float, float | None, float | None]:
    prompt_I, count = rounds.prompt_index()
    there_B = np.bincount(prompt_I, there_I, count)
    kept_B = np.bincount(prompt_I, there_I & kept_I, count)
    used = there_B > 0
    if used.sum() < 2:
        return float(kept_B.sum() / there_B.sum()), None, None
    found = pooled_ratio_interval(kept_B[used], there_B[used], resamples=RESAMPLES, method="percentile")
    return found.estimate, found.low, found.high
