"""Scores of a drafter's survival estimates per position and pooled, with intervals over prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from dspec_lab.calibration.metrics import (
    BINS,
    auroc,
    bin_edges,
    bin_index,
    brier,
    calibration_error,
    check,
    error_floor,
)
from dspec_lab.calibration.records import Rounds, survival

RESAMPLES = 400


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """Survival a_k against drafts 1..k having survived. Bounds are 95 % over prompts; None for fewer than two."""

    position: int | None  # None: all positions pooled
    cases: int
    survived: float  # share
    predicted: float  # mean a_k
    ece: float  # bins of equal width
    ece_low: float | None
    ece_high: float | None
    ece_mass: float  # bins of equal mass
    ece_floor: float  # what perfect chances of these values would show
    auroc: float | None  # None where all survived or none did
    auroc_low: float | None
    auroc_high: float | None
    brier: float
    brier_low: float | None
    brier_high: float | None


def score_survival(
    rounds: Rounds,
    confidence_IG: Float[np.ndarray, "I G"],
    *,
    bins: int = BINS,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> list[Score]:
    """A score for each position, then the pooled one. `confidence_IG` is conditional, raw or calibrated."""
    if confidence_IG.shape != rounds.confidence_IG.shape:
        raise ValueError(f"confidences of shape {confidence_IG.shape} for rounds of {rounds.confidence_IG.shape}")
    stated_IG, kept_IG = survival(confidence_IG), rounds.survived_IG.astype(np.float64)
    prompt_I, num_prompts = rounds.prompt_index()
    scores = []
    for k in (*range(rounds.widest), None):
        there = rounds.proposed_IG if k is None else rounds.proposed_IG & (np.arange(rounds.widest) == k)[None]
        if not there.any():
            continue
        prompt_N = np.broadcast_to(prompt_I[:, None], there.shape)[there]
        scores.append(
            _score(
                None if k is None else k + 1,
                stated_IG[there],
                kept_IG[there],
                prompt_N,
                num_prompts,
                bins,
                resamples,
                seed,
            )  # fmt: skip
        )
    return scores


def mean_error(scores: Sequence[Score]) -> float:
    """Mean ECE over positions, the pooled score left out."""
    return float(np.mean([score.ece for score in scores if score.position is not None]))


def mean_error_bounds(
    rounds: Rounds,
    confidence_IG: Float[np.ndarray, "I G"],
    *,
    bins: int = BINS,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> tuple[float, float]:
    """95 % bounds of `mean_error` over prompts, reflected about the estimate as those of a single ECE are."""
    stated_IG, kept_IG = survival(confidence_IG), rounds.survived_IG.astype(np.float64)
    prompt_I, num_prompts = rounds.prompt_index()
    if num_prompts < 2:
        raise ValueError(f"bounds over prompts need at least 2 prompts, got {num_prompts}")
    weight_XB = np.random.default_rng(seed).multinomial(
        num_prompts, np.full(num_prompts, 1 / num_prompts), size=resamples
    )
    estimates, draws = [], []
    for k in range(rounds.widest):
        there_I = rounds.proposed_IG[:, k]
        if not there_I.any():
            continue
        stated_N, kept_N, prompt_N = stated_IG[there_I, k], kept_IG[there_I, k], prompt_I[there_I]
        estimates.append(calibration_error(stated_N, kept_N, bins=bins))
        total_X = weight_XB @ np.bincount(prompt_N, minlength=num_prompts)
        gap_X = abs(weight_XB @ _gaps(stated_N, kept_N, prompt_N, num_prompts, bins)).sum(1)
        # a draw without a case says nothing
        draws.append(np.where(total_X > 0, gap_X / np.maximum(total_X, 1), np.nan))
    return _reflected(float(np.mean(estimates)), np.nanmean(draws, axis=0))


def _score(
    position: int | None, stated_N: np.ndarray, kept_N: np.ndarray, prompt_N: np.ndarray, num_prompts: int,
    bins: int, resamples: int, seed: int,
) -> Score:  # fmt: skip
    area = auroc(stated_N, kept_N)
    ece, squared = calibration_error(stated_N, kept_N, bins=bins), brier(stated_N, kept_N)
    bounds: dict[str, float | None] = dict.fromkeys(
        ("ece_low", "ece_high", "auroc_low", "auroc_high", "brier_low", "brier_high")
    )
    if len(np.unique(prompt_N)) > 1:
        draws = resampled(stated_N, kept_N, prompt_N, num_prompts, bins=bins, resamples=resamples, seed=seed)
        bounds["ece_low"], bounds["ece_high"] = _reflected(ece, draws["ece"])
        for name in ("auroc", "brier"):
            values = draws[name][np.isfinite(draws[name])]
            if values.size and (name == "brier" or np.isfinite(area)):
                bounds[f"{name}_low"], bounds[f"{name}_high"] = np.quantile(values, [0.025, 0.975]).tolist()
    return Score(
        position=position,
        cases=len(stated_N),
        survived=float(kept_N.mean()),
        predicted=float(stated_N.mean()),
        ece=ece,
        ece_mass=calibration_error(stated_N, kept_N, bins=bins, binning="mass"),
        ece_floor=error_floor(stated_N, bins=bins, seed=seed),
        auroc=None if np.isnan(area) else area,
        brier=squared,
        **bounds,
    )


def resampled(
    stated_N: Float[np.ndarray, " N"],
    kept_N: Float[np.ndarray, " N"],
    prompt_N: np.ndarray,
    num_prompts: int,
    *,
    bins: int = BINS,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """ECE, AUROC and Brier score of `resamples` draws of the prompts with replacement."""
    check(stated_N, kept_N)
    generator = np.random.default_rng(seed)
    # how often each prompt is drawn, of those that have a case here
    used = np.unique(prompt_N)
    weight_XB = np.zeros((resamples, num_prompts))
    weight_XB[:, used] = generator.multinomial(len(used), np.full(len(used), 1 / len(used)), size=resamples)
    gap_BC = _gaps(stated_N, kept_N, prompt_N, num_prompts, bins)
    count_B = np.bincount(prompt_N, minlength=num_prompts)
    square_B = np.bincount(prompt_N, (stated_N - kept_N) ** 2, num_prompts)
    total_X = weight_XB @ count_B
    return {
        "ece": abs(weight_XB @ gap_BC).sum(1) / total_X,
        "brier": weight_XB @ square_B / total_X,
        "auroc": _areas(stated_N, kept_N, prompt_N, weight_XB),
    }


def _gaps(stated_N: np.ndarray, kept_N: np.ndarray, prompt_N: np.ndarray, num_prompts: int, bins: int) -> np.ndarray:
    # sums of statement less outcome by prompt and bin
    gap_BC = np.zeros((num_prompts, bins))
    np.add.at(gap_BC, (prompt_N, bin_index(stated_N, bin_edges(stated_N, bins))), stated_N - kept_N)
    return gap_BC


def _reflected(estimate: float, draws_X: np.ndarray) -> tuple[float, float]:
    # resampling adds to an ECE what sampling added already, so its interval is reflected about the estimate; the
    # estimate itself stays inside
    low, high = np.quantile(draws_X, [0.025, 0.975])
    return float(np.clip(2 * estimate - high, 0.0, estimate)), float(np.clip(2 * estimate - low, estimate, 1.0))


def _areas(stated_N: np.ndarray, kept_N: np.ndarray, prompt_N: np.ndarray, weight_XB: np.ndarray) -> np.ndarray:
    order = np.argsort(stated_N, kind="stable")
    kept_N, prompt_N = kept_N[order], prompt_N[order]
    values, group_N = np.unique(stated_N[order], return_inverse=True)
    areas = []
    for weight_B in weight_XB:
        weight_N = weight_B[prompt_N]
        # mass of survivors and of the others at each distinct score
        good = np.bincount(group_N, weight_N * kept_N, len(values))
        bad = np.bincount(group_N, weight_N * (1 - kept_N), len(values))
        pairs = good.sum() * bad.sum()
        below = np.cumsum(bad) - bad
        areas.append((good * (below + bad / 2)).sum() / pairs if pairs else np.nan)
    return np.array(areas)
