"""How well stated chances match what happened: calibration error, AUROC, Brier score, reliability bins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from jaxtyping import Float, Int
from scipy.stats import rankdata

Binning = Literal["width", "mass"]
BINNINGS: tuple[Binning, ...] = get_args(Binning)
BINS = 20  # as the paper's Figure 6


@dataclass(frozen=True, slots=True)
class Reliability:
    """Predictions grouped in bins. Empty bins are left out; shares and chances are 0..1."""

    low_C: Float[np.ndarray, " C"]
    high_C: Float[np.ndarray, " C"]
    count_C: Int[np.ndarray, " C"]
    predicted_C: Float[np.ndarray, " C"]  # mean prediction
    observed_C: Float[np.ndarray, " C"]  # share that came true

    @property
    def error(self) -> float:
        """Expected calibration error: sum_b n_b / n |predicted_b - observed_b|."""
        return float((self.count_C * abs(self.predicted_C - self.observed_C)).sum() / self.count_C.sum())


def bin_edges(predicted_N: Float[np.ndarray, " N"], bins: int = BINS, binning: Binning = "width") -> np.ndarray:
    """Edges of `bins` bins: equally wide over 0..1, or with equally many predictions (fewer bins where they tie)."""
    if bins < 1:
        raise ValueError(f"there must be at least 1 bin, got {bins}")
    if binning not in BINNINGS:
        raise ValueError(f"binning must be one of {', '.join(BINNINGS)}, got {binning!r}")
    if binning == "width":
        return np.linspace(0.0, 1.0, bins + 1)
    inner = np.unique(np.quantile(predicted_N, np.linspace(0, 1, bins + 1)[1:-1]))
    return np.array([0.0, *inner[(inner > 0) & (inner < 1)], 1.0])


def bin_index(predicted_N: Float[np.ndarray, " N"], edges: np.ndarray) -> Int[np.ndarray, " N"]:
    """Bin of each prediction; a prediction on an edge belongs to the bin above, 1 to the last."""
    return np.searchsorted(edges[1:-1], predicted_N, side="right")


def reliability(
    predicted_N: Float[np.ndarray, " N"],
    observed_N: Float[np.ndarray, " N"],
    *,
    bins: int = BINS,
    binning: Binning = "width",
) -> Reliability:
    """Mean prediction and observed share by bin. `observed_N` may be outcomes (0 or 1) or known chances."""
    check(predicted_N, observed_N)
    edges = bin_edges(predicted_N, bins, binning)
    index_N = bin_index(predicted_N, edges)
    count_C = np.bincount(index_N, minlength=len(edges) - 1)
    there = count_C > 0
    filled_C = count_C[there]
    return Reliability(
        low_C=edges[:-1][there],
        high_C=edges[1:][there],
        count_C=filled_C,
        predicted_C=np.bincount(index_N, predicted_N, len(edges) - 1)[there] / filled_C,
        observed_C=np.bincount(index_N, observed_N, len(edges) - 1)[there] / filled_C,
    )


def calibration_error(
    predicted_N: Float[np.ndarray, " N"],
    observed_N: Float[np.ndarray, " N"],
    *,
    bins: int = BINS,
    binning: Binning = "width",
) -> float:
    """Expected calibration error (ECE), 0..1. Few predictions raise it: compare with `error_floor`."""
    return reliability(predicted_N, observed_N, bins=bins, binning=binning).error


def error_floor(
    predicted_N: Float[np.ndarray, " N"],
    *,
    bins: int = BINS,
    binning: Binning = "width",
    draws: int = 50,
    seed: int = 0,
) -> float:
    """Mean ECE that perfectly calibrated chances of these values would show, by chance alone.

    Outcomes are drawn as if independent; rounds of one prompt are not quite, so the true floor is a little higher.
    """
    generator = np.random.default_rng(seed)
    edges = bin_edges(predicted_N, bins, binning)
    index_N, size = bin_index(predicted_N, edges), len(edges) - 1
    stated_C = np.bincount(index_N, predicted_N, size)
    errors = []
    for _ in range(draws):
        drawn_N = (generator.random(len(predicted_N)) < predicted_N).astype(np.float64)
        errors.append(abs(np.bincount(index_N, drawn_N, size) - stated_C).sum() / len(predicted_N))
    return float(np.mean(errors))


def auroc(score_N: Float[np.ndarray, " N"], outcome_N: Float[np.ndarray, " N"]) -> float:
    """Chance that a round that survived scores above one that did not, ties counted half; NaN without both kinds."""
    check(score_N, outcome_N)
    if not np.isin(outcome_N, (0.0, 1.0)).all():
        raise ValueError("AUROC needs outcomes 0 or 1")
    positive = outcome_N == 1
    count = int(positive.sum())
    if count in (0, len(outcome_N)):
        return float("nan")
    ranks_N = rankdata(score_N)
    return float((ranks_N[positive].sum() - count * (count + 1) / 2) / (count * (len(outcome_N) - count)))


def brier(predicted_N: Float[np.ndarray, " N"], observed_N: Float[np.ndarray, " N"]) -> float:
    """Mean squared difference of chance and outcome, 0..1."""
    check(predicted_N, observed_N)
    return float(((predicted_N - observed_N) ** 2).mean())


def check(predicted_N: np.ndarray, observed_N: np.ndarray) -> None:
    """Raise `ValueError` unless both hold one probability for each of the same cases."""
    if predicted_N.shape != observed_N.shape or not predicted_N.size:
        raise ValueError(f"{predicted_N.size} predictions for {observed_N.size} outcomes; one each is needed")
    for name, values in (("predictions", predicted_N), ("outcomes", observed_N)):
        # written so that NaN is refused too
        bad = values[~((values >= 0) & (values <= 1))]
        if bad.size:
            raise ValueError(f"{name} must lie in 0..1, got {bad[0]}")
