"""What else could tell a good draft: AUROC of the verdict on k for the confidence, other signals, and the known chance.

Only rounds that reached k have the verdict. The ceiling is what the chance 1 - TV itself scores: it takes the target's
law, and the draw of the token is all that it does not know. What lies between is what a better confidence could gain.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from dspec_lab.calibration.held_out import FOLDS, prompt_folds
from dspec_lab.calibration.maps import logit, sigmoid
from dspec_lab.calibration.metrics import auroc
from dspec_lab.calibration.records import Rounds
from dspec_lab.calibration.score import RESAMPLES, resampled

FEWEST_OF_A_KIND = 20  # accepted, and rejected, of the rounds that reached k
SIGNALS = ("confidence", "draft_entropy", "both", "chance")


@dataclass(frozen=True, kw_only=True, slots=True)
class SignalArea:
    """AUROC of one signal for the verdict on k, with 95 % bounds over prompts."""

    domain: str
    position: int
    signal: str  # confidence; draft_entropy (low is good); both: held-out logistic regression; chance: 1 - TV
    cases: int
    auroc: float
    low: float
    high: float


def signal_areas(
    rounds: Rounds, *, positions: int = 3, folds: int = FOLDS, seed: int = 0, resamples: int = RESAMPLES
) -> list[SignalArea]:
    """AUROC of each of `SIGNALS` by domain (`all` first) and position, where both verdicts are frequent enough.

    `ValueError` for a trace without confidences, entropies or chances.
    """
    for name, values_IG in _columns(rounds).items():
        if not np.isfinite(values_IG[rounds.proposed_IG]).all():
            raise ValueError(f"the trace of {rounds.drafter!r} has no {name} for every draft")
    prompt_I, num_prompts = rounds.prompt_index()
    found = []
    for k in range(min(positions, rounds.widest)):
        reached_I = rounds.reached_IG[:, k]
        if not _enough(rounds, reached_I, k):
            continue
        signals = _signals(rounds, k, folds=folds, seed=seed)
        for domain in ("all", *rounds.domains):
            there_I = reached_I if domain == "all" else reached_I & (rounds.domain_I == domain)
            if not _enough(rounds, there_I, k):
                continue
            kept_N, prompt_N = rounds.survived_IG[there_I, k].astype(np.float64), prompt_I[there_I]
            for name, value_I in signals.items():
                draws = resampled(value_I[there_I], kept_N, prompt_N, num_prompts, resamples=resamples, seed=seed)
                low, high = np.nanquantile(draws["auroc"], [0.025, 0.975]).tolist()
                found.append(
                    SignalArea(
                        domain=domain,
                        position=k + 1,
                        signal=name,
                        cases=len(kept_N),
                        auroc=auroc(value_I[there_I], kept_N),
                        low=low,
                        high=high,
                    )  # fmt: skip
                )
    return found


def _columns(rounds: Rounds) -> dict[str, np.ndarray]:
    return {
        "confidence": rounds.confidence_IG,
        "draft_entropy_bits": rounds.draft_entropy_IG,
        "accept_prob": rounds.accept_prob_IG,
    }


def _enough(rounds: Rounds, there_I: np.ndarray, k: int) -> bool:
    kept = int(rounds.survived_IG[there_I, k].sum())
    return min(kept, int(there_I.sum()) - kept) >= FEWEST_OF_A_KIND


def _signals(rounds: Rounds, k: int, *, folds: int, seed: int) -> dict[str, Float[np.ndarray, " I"]]:
    # each in 0..1, larger for better drafts; 2^-H is the chance of one of 2^H equal tokens
    return {
        "confidence": rounds.confidence_IG[:, k],
        "draft_entropy": np.exp2(-rounds.draft_entropy_IG[:, k]),
        "both": _both(rounds, k, folds=folds, seed=seed),
        "chance": rounds.accept_prob_IG[:, k],
    }


def _both(rounds: Rounds, k: int, *, folds: int, seed: int) -> Float[np.ndarray, " I"]:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import PolynomialFeatures, StandardScaler

    def inputs(part: Rounds, mask_I: np.ndarray) -> np.ndarray:
        return np.stack([logit(part.confidence_IG[mask_I, k]), part.draft_entropy_IG[mask_I, k]], axis=1)

    chance_I = np.full(len(rounds), np.nan)
    for fit, away_I in prompt_folds(rounds, folds=folds, seed=seed):
        known_I, judged_I = fit.reached_IG[:, k], away_I & rounds.reached_IG[:, k]
        if not judged_I.any():
            continue
        model = make_pipeline(StandardScaler(), PolynomialFeatures(2, include_bias=False), LogisticRegression())
        model.fit(inputs(fit, known_I), fit.survived_IG[known_I, k])
        chance_I[judged_I] = sigmoid(model.decision_function(inputs(rounds, judged_I)))
    return chance_I
