"""Held-out errors by domain: every prompt judged once, by maps fitted on other prompts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

from dspec_lab.calibration.maps import EntropyMap, Method, PositionMap, apply_maps
from dspec_lab.calibration.metrics import BINS
from dspec_lab.calibration.records import Rounds, survival
from dspec_lab.calibration.score import RESAMPLES, Score, mean_error, mean_error_bounds, score_survival
from dspec_lab.calibration.split import refuse_leakage
from dspec_lab.calibration.sts import Labels, fit_maps

FOLDS = 4
# what a good calibration of a good confidence head reaches; the paper's has about 1 % and 0.81 to 0.90 (its Figure 6)
GOAL_ERROR = 0.02  # mean ECE after
GOAL_SHARE = 0.5  # of the mean ECE before
GOAL_AREA = 0.75  # AUROC at each position


@dataclass(frozen=True, kw_only=True, slots=True)
class MeanError:
    """Mean over positions of the ECE of survival, with 95 % bounds over prompts. Shares, 0..1."""

    estimate: float
    low: float
    high: float
    floor: float  # what perfect chances of these values would show with so few rounds


@dataclass(frozen=True, kw_only=True, slots=True)
class DomainScores:
    """Survival in one domain before and after maps that its prompts had no part in."""

    domain: str  # judged on
    fitted_on: str  # domain, or all
    method: Method
    rounds: int
    prompts: int
    before: tuple[Score, ...]
    after: tuple[Score, ...]
    mean_before: MeanError
    mean_after: MeanError
    order_kept: bool

    def unmet(self) -> list[str]:
        """In words, which of the goals at the head of this file the scores miss; empty where all are met."""
        found, after, before = [], self.mean_after.estimate, self.mean_before.estimate
        if after > GOAL_ERROR:
            found.append(f"mean ECE after is {100 * after:.1f} %, more than {100 * GOAL_ERROR:.0f} %")
        if after > GOAL_SHARE * before:
            found.append(f"mean ECE after is {after / before:.2f} of before, more than {GOAL_SHARE:g}")
        low = [f"{s.position}: {s.auroc:.3f}" for s in self.after if s.position and (s.auroc or 1.0) < GOAL_AREA]
        if low:
            found.append(f"AUROC below {GOAL_AREA:g} at position {', '.join(low)}")
        none = [str(s.position) for s in self.after if s.position and s.auroc is None]
        if none:
            found.append(f"AUROC unknown at position {', '.join(none)}, where no draft survived")
        return found if self.order_kept else [*found, "the order at a position is not kept"]


def prompt_folds(
    rounds: Rounds, *, folds: int = FOLDS, seed: int = 0
) -> Iterator[tuple[Rounds, Bool[np.ndarray, " I"]]]:
    """(rounds to fit on, mask of the rounds to judge) of each fold. A prompt is judged once; folds mix the domains."""
    names = rounds.prompts
    if not 2 <= folds <= len(names):
        raise ValueError(f"folds must lie in 2..{len(names)}, the number of prompts, got {folds}")
    generator, dealt = np.random.default_rng(seed), list[str]()
    for domain in rounds.domains:
        dealt += generator.permutation(sorted(set(rounds.prompt_I[rounds.domain_I == domain].tolist()))).tolist()
    for fold in range(folds):
        away_I = np.isin(rounds.prompt_I, dealt[fold::folds])
        fit = rounds.select(~away_I)
        refuse_leakage(fit.prompts, rounds.select(away_I).prompts)
        yield fit, away_I


def held_out_confidences(
    rounds: Rounds,
    method: Method,
    *,
    folds: int = FOLDS,
    seed: int = 0,
    bins: int = BINS,
    labels: Labels = "outcome",
) -> tuple[Float[np.ndarray, "I G"], bool]:
    """(calibrated confidences, whether each fold's maps kept the order), each prompt's from maps of the other folds."""
    after_IG, kept = np.full_like(rounds.confidence_IG, np.nan), True
    for fit, away_I in prompt_folds(rounds, folds=folds, seed=seed):
        maps = fit_maps(fit, method, bins=bins, labels=labels)
        after_IG[away_I] = apply_maps(maps, rounds.confidence_IG[away_I], rounds.draft_entropy_IG[away_I])
        kept = kept and keeps_order(maps, rounds.select(away_I))
    return after_IG, kept


def keeps_order(maps: tuple[PositionMap, ...], rounds: Rounds) -> bool:
    """Whether no map swaps two confidences of its position, and survival never rises along a round.

    An entropy map is asked the same of confidences with equal entropies: it may swap others, that is its use.
    """
    after_IG = apply_maps(maps, rounds.confidence_IG, rounds.draft_entropy_IG)
    for k in range(rounds.widest):
        there_I = rounds.proposed_IG[:, k]
        if isinstance(maps[k], EntropyMap):
            line_N = np.linspace(0, 1, 201)
            for entropy in np.unique(rounds.draft_entropy_IG[there_I, k].round()):
                if (np.diff(maps[k](line_N, np.full_like(line_N, entropy))) < 0).any():
                    return False
            continue
        order = np.argsort(rounds.confidence_IG[there_I, k], kind="stable")
        if (np.diff(after_IG[there_I, k][order]) < 0).any():
            return False
    survival_IG = np.nan_to_num(survival(after_IG), nan=0.0)
    return bool((np.diff(survival_IG, axis=1) <= 0).all())


def domain_scores(
    rounds: Rounds,
    method: Method = "temperature",
    *,
    fitted_on: str = "all",
    folds: int = FOLDS,
    seed: int = 0,
    bins: int = BINS,
    labels: Labels = "outcome",
    resamples: int = RESAMPLES,
) -> list[DomainScores]:
    """Scores by domain, `all` first where there are several; `fitted_on` names the one domain to fit and judge on."""
    chosen = rounds.of_domain(fitted_on)
    after_IG, kept = held_out_confidences(chosen, method, folds=folds, seed=seed, bins=bins, labels=labels)
    judged = ("all", *chosen.domains) if len(chosen.domains) > 1 else chosen.domains
    found = []
    for domain in judged:
        mask_I = np.full(len(chosen), True) if domain == "all" else chosen.domain_I == domain
        part, options = chosen.select(mask_I), {"bins": bins, "resamples": resamples, "seed": seed}
        stages = [part.confidence_IG, after_IG[mask_I]]
        scores = [tuple(score_survival(part, c_IG, **options)) for c_IG in stages]
        means = [
            MeanError(
                estimate=mean_error(s),
                **dict(zip(("low", "high"), mean_error_bounds(part, c_IG, **options), strict=True)),
                floor=float(np.mean([score.ece_floor for score in s if score.position is not None])),
            )
            for s, c_IG in zip(scores, stages, strict=True)
        ]
        found.append(
            DomainScores(
                domain=domain,
                fitted_on=fitted_on,
                method=method,
                rounds=len(part),
                prompts=len(part.prompts),
                before=scores[0],
                after=scores[1],
                mean_before=means[0],
                mean_after=means[1],
                order_kept=kept,
            )  # fmt: skip
        )
    return found
