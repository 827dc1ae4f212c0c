"""Entropy against acceptance: where the target is sure of its next token, a draft is easy to get right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float
from scipy import stats

from dspec_lab.calibration.records import Rounds
from dspec_lab.evaluation.intervals import pooled_ratio_interval

Whose = Literal["target", "draft"]

# two laws whose entropy is easy to remember: 0.9 against 0.1, and ten tokens alike
SURE_LAW, WIDE_LAW = (0.9, 0.1), (0.1,) * 10
RESAMPLES = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class EntropyBin:
    """Drafts whose entropy lies in [low, high). Shares are 0..1; bounds 95 % over prompts, None for fewer than two."""

    low: float  # bits
    high: float
    cases: int
    prompts: int
    entropy: float  # mean, bits
    accepted: float  # share
    accepted_low: float | None
    accepted_high: float | None
    accept_prob: float | None  # mean 1 - TV: what theory expects of `accepted`; None where the trace lacks it


def entropy_bits(law: Sequence[float]) -> float:
    """-sum p log2 p of a law: (0.9, 0.1) has 0.47 bits, ten equal chances have 3.32."""
    p_V = np.asarray(law, dtype=np.float64)
    if (p_V < 0).any() or abs(p_V.sum() - 1) > 1e-9:
        raise ValueError(f"a law holds probabilities that sum to 1, got {list(law)}")
    p_V = p_V[p_V > 0]
    return float(-(p_V * np.log2(p_V)).sum())


def entropy_bins(rounds: Rounds, *, whose: Whose = "target", bins: int = 8) -> list[EntropyBin]:
    """Acceptance by entropy, in bins of equally many drafts. Only drafts that the verifier reached are counted:

    behind a rejection the verdict is unknown. Entropies are those of the models' laws at temperature 1.
    """
    if bins < 1:
        raise ValueError(f"there must be at least 1 bin, got {bins}")
    entropy_IG = _entropy(rounds, whose)
    values = entropy_IG[rounds.reached_IG]
    edges = np.unique(np.quantile(values, np.linspace(0, 1, bins + 1)))
    edges = np.array([edges[0], edges[0] + 1e-9]) if len(edges) == 1 else edges
    edges[-1] = np.nextafter(edges[-1], np.inf)  # the largest belongs to the last bin
    return [
        _bin(rounds, entropy_IG, low, high)
        for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
        if ((values >= low) & (values < high)).any()
    ]


def around(rounds: Rounds, bits: float, *, width: float = 0.5, whose: Whose = "target") -> EntropyBin | None:
    """The reached drafts with an entropy within half of `width` of `bits`; None where there is none."""
    entropy_IG = _entropy(rounds, whose)
    low, high = max(0.0, bits - width / 2), bits + width / 2
    there = rounds.reached_IG & (entropy_IG >= low) & (entropy_IG < high)
    return _bin(rounds, entropy_IG, low, high) if there.any() else None


def rank_correlation(rounds: Rounds, whose: Whose = "target") -> float:
    """Spearman's rank correlation of entropy and 1 - TV over the reached drafts, -1..1."""
    entropy_IG = _entropy(rounds, whose)
    known = rounds.reached_IG & np.isfinite(rounds.accept_prob_IG)
    if known.sum() < 3:
        raise ValueError(f"only {int(known.sum())} drafts have both an entropy and 1 - TV")
    return float(stats.spearmanr(entropy_IG[known], rounds.accept_prob_IG[known]).statistic)


def _entropy(rounds: Rounds, whose: Whose) -> Float[np.ndarray, "I G"]:
    if whose not in ("target", "draft"):
        raise ValueError(f"whose entropy must be target or draft, got {whose!r}")
    entropy_IG = rounds.target_entropy_IG if whose == "target" else rounds.draft_entropy_IG
    reached = rounds.reached_IG
    if not reached.any() or not np.isfinite(entropy_IG[reached]).all():
        raise ValueError(f"the trace of {rounds.drafter!r} does not hold the {whose}'s entropy for every draft")
    return entropy_IG


def _bin(rounds: Rounds, entropy_IG: np.ndarray, low: float, high: float) -> EntropyBin:
    there: Bool[np.ndarray, "I G"] = rounds.reached_IG & (entropy_IG >= low) & (entropy_IG < high)
    prompt_I, num_prompts = rounds.prompt_index()
    cases_B = np.bincount(prompt_I, there.sum(1), num_prompts)
    kept_B = np.bincount(prompt_I, (there & rounds.survived_IG).sum(1), num_prompts)
    used = cases_B > 0
    bounds: tuple[float | None, float | None] = (None, None)
    if used.sum() > 1:
        found = pooled_ratio_interval(kept_B[used], cases_B[used], resamples=RESAMPLES, method="percentile")
        bounds = (found.low, found.high)
    chances = rounds.accept_prob_IG[there]
    return EntropyBin(
        low=low,
        high=high,
        cases=int(there.sum()),
        prompts=int(used.sum()),
        entropy=float(entropy_IG[there].mean()),
        accepted=float(kept_B.sum() / cases_B.sum()),
        accepted_low=bounds[0],
        accepted_high=bounds[1],
        accept_prob=float(chances.mean()) if np.isfinite(chances).all() else None,
    )
