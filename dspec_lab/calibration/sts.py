"""Sequential temperature scaling; Platt, isotonic and entropy maps to compare it with.

Ref: DSpark (arXiv:2607.05147), section 3: for k = 1..gamma in order, search the temperature of c_k that minimises the
calibration error of the survival a_k = prod_{i<=k} c_i, with the earlier positions fixed. The paper does not give the
grid; ours is `GRID`.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from jaxtyping import Float

from dspec_lab.calibration.maps import (
    EntropyMap,
    IsotonicMap,
    Method,
    PlattMap,
    PositionMap,
    TemperatureMap,
    logit,
    sigmoid,
)
from dspec_lab.calibration.metrics import BINS
from dspec_lab.calibration.records import CALIBRATED_MARK, THRESHOLD_MARK, Rounds

# temperatures 0.1 .. 10, one about 1.2 % above the last; 1 is among them
GRID = np.geomspace(0.1, 10.0, 401)
FEWEST_ROUNDS = 50  # below, twenty bins hold two or three rounds each
FEWEST_OF_A_KIND = 5  # accepted, and rejected, for a Platt, isotonic or entropy map
PRIOR_VERDICTS = 4.0  # weight of the position before in an entropy map, which has three numbers to learn

# outcome: 1 where drafts 1..k survived. expected: the same with the last verdict replaced by its known chance,
# 1[1..k-1 survived] (1 - TV_k): the same mean given the confidences, and less noise
Labels = Literal["outcome", "expected"]


def survival_labels(rounds: Rounds, labels: Labels = "outcome") -> Float[np.ndarray, "I G"]:
    """What a_k is held against; NaN where k was not proposed.

    Survival is known for every proposed position, unlike the verdict on k alone, which only rounds that got there
    have: so it has no bias towards easy rounds.
    """
    if labels == "outcome":
        known_IG = rounds.survived_IG.astype(np.float64)
    elif labels == "expected":
        known_IG = np.where(rounds.reached_IG, rounds.accept_prob_IG, 0.0)
        if not np.isfinite(known_IG[rounds.proposed_IG]).all():
            raise ValueError("the trace has no accept_prob (1 - TV), which expected labels need")
    else:
        raise ValueError(f"labels must be 'outcome' or 'expected', got {labels!r}")
    return np.where(rounds.proposed_IG, known_IG, np.nan)


def fit_temperatures(
    rounds: Rounds, *, bins: int = BINS, labels: Labels = "outcome", grid: Float[np.ndarray, " X"] = GRID
) -> tuple[TemperatureMap, ...]:
    """One temperature per position, by sequential search. Equal errors go to the temperature nearest 1."""
    check_fit(rounds)
    if grid.size == 0 or not (grid > 0).all():
        raise ValueError("the grid must hold temperatures above 0")
    near_1 = grid[np.argsort(abs(np.log(grid)), kind="stable")]
    target_IG = survival_labels(rounds, labels)
    before_I = np.ones(len(rounds))
    maps = []
    for k in range(rounds.widest):
        there_I = rounds.proposed_IG[:, k]
        logit_N, prefix_N = logit(rounds.confidence_IG[there_I, k]), before_I[there_I]
        errors = [_error(prefix_N * sigmoid(logit_N / t), target_IG[there_I, k], bins) for t in near_1]
        maps.append(TemperatureMap(float(near_1[int(np.argmin(errors))])))
        before_I[there_I] *= maps[-1](rounds.confidence_IG[there_I, k])
    return tuple(maps)


def _error(predicted_N: np.ndarray, observed_N: np.ndarray, bins: int) -> float:
    # ECE of equally wide bins: the bin's count cancels
    index_N = np.minimum((predicted_N * bins).astype(np.int64), bins - 1)
    return float(abs(np.bincount(index_N, predicted_N - observed_N, bins)).sum() / len(predicted_N))


def fit_platt(rounds: Rounds) -> tuple[PlattMap, ...]:
    """Slope and bias per position, by maximum likelihood of the verdict on k among the rounds that reached it.

    A slope that would be negative becomes 0: the map must keep the order. A position with too few verdicts (see
    `sparse_positions`) takes the map of the one before it; `ValueError` if that is the first.
    """
    from scipy.optimize import minimize

    check_fit(rounds)
    sparse, maps = sparse_positions(rounds), list[PlattMap]()
    for k in range(rounds.widest):
        if k in sparse and maps:
            maps.append(maps[-1])
            continue
        logit_N, kept_N = _verdicts(rounds, k, "a Platt map")
        sign_N = 2 * kept_N - 1

        def loss(parameters: np.ndarray, x_N: np.ndarray = logit_N, sign_N: np.ndarray = sign_N) -> float:
            return float(np.logaddexp(0.0, -sign_N * (parameters[0] * x_N + parameters[1])).mean())

        found = minimize(loss, np.array([1.0, 0.0]), method="L-BFGS-B", bounds=[(0.0, None), (None, None)])
        maps.append(PlattMap(float(found.x[0]), float(found.x[1])))
    return tuple(maps)


def fit_isotonic(rounds: Rounds) -> tuple[IsotonicMap, ...]:
    """The best non-decreasing map per position (least squares), from the verdicts on k where it was reached.

    A position with too few verdicts takes the map of the one before it; `ValueError` if that is the first.
    """
    from sklearn.isotonic import IsotonicRegression

    check_fit(rounds)
    sparse, maps = sparse_positions(rounds), list[IsotonicMap]()
    for k in range(rounds.widest):
        if k in sparse and maps:
            maps.append(maps[-1])
            continue
        logit_N, kept_N = _verdicts(rounds, k, "an isotonic map")
        model = IsotonicRegression(y_min=0.0, y_max=1.0, out_of_bounds="clip").fit(sigmoid(logit_N), kept_N)
        maps.append(IsotonicMap(*_knots(model.X_thresholds_, model.y_thresholds_)))
    return tuple(maps)


def fit_entropy(rounds: Rounds) -> tuple[EntropyMap, ...]:
    """Slope, weight and bias per position, by penalised maximum likelihood of the verdicts on k where it was reached.

    The penalty, half `PRIOR_VERDICTS` times the squared distance to the map of the position before (for the first: the
    confidence as it is), keeps positions with few verdicts near it. A position with too few of them takes that map.
    `ValueError` for a trace without the draft's entropies, or if the first position has too few verdicts.
    """
    from scipy.optimize import minimize

    check_fit(rounds)
    if not np.isfinite(rounds.draft_entropy_IG[rounds.proposed_IG]).all():
        raise ValueError(f"the trace of {rounds.drafter!r} has no draft_entropy_bits for every draft")
    sparse, maps, before = sparse_positions(rounds), list[EntropyMap](), np.array([1.0, 0.0, 0.0])
    for k in range(rounds.widest):
        if k in sparse and maps:
            maps.append(maps[-1])
            continue
        logit_N, kept_N = _verdicts(rounds, k, "an entropy map")
        entropy_N, sign_N = rounds.draft_entropy_IG[rounds.reached_IG[:, k], k], 2 * kept_N - 1

        def loss(
            parameters: np.ndarray,
            x_N: np.ndarray = logit_N,
            h_N: np.ndarray = entropy_N,
            sign_N: np.ndarray = sign_N,
            before: np.ndarray = before,
        ) -> float:
            score_N = parameters[0] * x_N - parameters[1] * h_N + parameters[2]
            penalty = PRIOR_VERDICTS / 2 * float(np.square(parameters - before).sum())
            return (float(np.logaddexp(0.0, -sign_N * score_N).sum()) + penalty) / len(sign_N)

        found = minimize(loss, before, method="L-BFGS-B", bounds=[(0.0, None), (0.0, None), (None, None)])
        before = found.x
        maps.append(EntropyMap(*map(float, before)))
    return tuple(maps)


def _knots(inputs: np.ndarray, outputs: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    rising = np.concatenate([[True], np.diff(inputs) > 0])
    return tuple(inputs[rising].tolist()), tuple(np.maximum.accumulate(outputs[rising]).tolist())


def fit_maps(
    rounds: Rounds, method: Method, *, bins: int = BINS, labels: Labels = "outcome"
) -> tuple[PositionMap, ...]:
    """The maps of a method. Bins and labels are those of temperature scaling; the others fit verdicts."""
    if method == "temperature":
        return fit_temperatures(rounds, bins=bins, labels=labels)
    if method == "platt":
        return fit_platt(rounds)
    if method == "isotonic":
        return fit_isotonic(rounds)
    if method == "entropy":
        return fit_entropy(rounds)
    raise ValueError(f"method must be temperature, platt, isotonic or entropy, got {method!r}")


def sparse_positions(rounds: Rounds) -> tuple[int, ...]:
    """Positions, from 0, that have too few accepted or too few rejected drafts for a map of their own."""
    kept_G = (rounds.reached_IG & rounds.survived_IG.astype(bool)).sum(0)
    fewest_G = np.minimum(kept_G, rounds.reached_IG.sum(0) - kept_G)
    return tuple(np.flatnonzero(fewest_G < FEWEST_OF_A_KIND).tolist())


def _verdicts(rounds: Rounds, k: int, what: str) -> tuple[np.ndarray, np.ndarray]:
    reached_I = rounds.reached_IG[:, k]
    kept_N = rounds.survived_IG[reached_I, k].astype(np.float64)
    kept = int(kept_N.sum())
    if min(kept, len(kept_N) - kept) < FEWEST_OF_A_KIND:
        raise ValueError(
            f"position {k + 1} was accepted {kept} and rejected {len(kept_N) - kept} times; "
            f"{what} needs {FEWEST_OF_A_KIND} of each"
        )
    return logit(rounds.confidence_IG[reached_I, k]), kept_N


def check_fit(rounds: Rounds) -> None:
    """Raise `ValueError` for rounds that no calibration can be fitted on."""
    name = rounds.drafter
    if rounds.calibrated:
        raise ValueError(f"the confidences of {name!r} are calibrated already ({CALIBRATED_MARK} in its name)")
    if THRESHOLD_MARK in name:
        raise ValueError(f"the blocks of {name!r} were cut by a threshold, so low confidences are missing")
    if not rounds.has_confidence:
        raise ValueError(f"the drafter {name!r} has no confidence for every draft, so there is nothing to fit")
    for k, count in enumerate(rounds.proposed_IG.sum(0).tolist(), 1):
        if count < FEWEST_ROUNDS:
            raise ValueError(f"only {count} rounds proposed a draft {k}; a fit needs at least {FEWEST_ROUNDS}")
