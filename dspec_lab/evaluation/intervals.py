"""Confidence intervals by resampling prompts, for one drafter and for two drafters on the same prompts.

Prompts are the independent units: rounds of one prompt share its text and are not resampled on their own. All
intervals are two-sided. Few prompts give intervals that are a little too short: in simulations a 95 % interval held the
true value in 88 to 91 % of cases with 12 prompts and in 93 to 95 % with 36.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Float
from scipy import stats

PerPrompt: TypeAlias = Sequence[float | int | np.number] | np.ndarray  # one number per prompt
METHODS = ("BCa", "percentile")
FEWEST_RESAMPLES = 100  # below, the tails that bound the interval rest on a handful of draws


@dataclass(frozen=True, slots=True)
class Interval:
    """A point estimate with its confidence bounds, in the unit of the estimate."""

    estimate: float
    low: float
    high: float
    confidence: float = 0.95

    def __str__(self) -> str:
        return f"{self.estimate:.3f} [{self.low:.3f}, {self.high:.3f}]"

    @property
    def excludes_zero(self) -> bool:
        """True when zero lies outside the interval, so that the sign of a difference is settled."""
        return self.low > 0 or self.high < 0


def paired_difference(
    values_a: PerPrompt,
    values_b: PerPrompt,
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
    method: str = "BCa",
) -> Interval:
    """Mean of a - b over prompts; entry i of both belongs to prompt i, and prompts are resampled as pairs.

    Ref: Efron 1987, Better bootstrap confidence intervals (BCa).
    """
    a_B, b_B = _same_prompts(values_a=values_a, values_b=values_b)
    scale = max(np.abs(a_B).max(), np.abs(b_B).max())
    return _bootstrap((a_B - b_B,), _mean, scale, confidence, resamples, seed, method)


def pooled_ratio_interval(
    numerators: PerPrompt,
    denominators: PerPrompt,
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
    method: str = "BCa",
) -> Interval:
    """sum(numerators) / sum(denominators) over prompts, as accepted length = committed tokens / rounds.

    The pooled ratio weighs a prompt by its denominator; it is not the mean of the prompts' own ratios. Denominators
    must be positive: leave out a prompt that had no round.
    """
    numerator_B, denominator_B = _same_prompts(numerators=numerators, denominators=denominators)
    _require_positive("denominators", denominator_B)
    scale = abs(_pooled_ratio(numerator_B, denominator_B))
    return _bootstrap((numerator_B, denominator_B), _pooled_ratio, scale, confidence, resamples, seed, method)


def paired_ratio_difference(
    numerators_a: PerPrompt,
    denominators_a: PerPrompt,
    numerators_b: PerPrompt,
    denominators_b: PerPrompt,
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
    method: str = "BCa",
) -> Interval:
    """Pooled ratio of a minus pooled ratio of b; entry i of all four belongs to prompt i, resampled together."""
    samples = _same_prompts(
        numerators_a=numerators_a,
        denominators_a=denominators_a,
        numerators_b=numerators_b,
        denominators_b=denominators_b,
    )
    _require_positive("denominators_a", samples[1])
    _require_positive("denominators_b", samples[3])
    scale = max(abs(_pooled_ratio(*samples[:2])), abs(_pooled_ratio(*samples[2:])))
    return _bootstrap(samples, _pooled_ratio_difference, scale, confidence, resamples, seed, method)


def _mean(values: np.ndarray, axis: int = -1) -> Any:
    return values.mean(axis=axis)


def _pooled_ratio(numerators: np.ndarray, denominators: np.ndarray, axis: int = -1) -> Any:
    return numerators.sum(axis=axis) / denominators.sum(axis=axis)


def _pooled_ratio_difference(
    numerators_a: np.ndarray,
    denominators_a: np.ndarray,
    numerators_b: np.ndarray,
    denominators_b: np.ndarray,
    axis: int = -1,
) -> Any:
    return _pooled_ratio(numerators_a, denominators_a, axis) - _pooled_ratio(numerators_b, denominators_b, axis)


def _bootstrap(
    samples: tuple[Float[np.ndarray, " B"], ...],
    statistic: Callable[..., Any],
    scale: float,
    confidence: float,
    resamples: int,
    seed: int,
    method: str,
) -> Interval:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")
    if isinstance(resamples, bool) or not isinstance(resamples, int) or resamples < FEWEST_RESAMPLES:
        raise ValueError(f"resamples must be a whole number of at least {FEWEST_RESAMPLES}, got {resamples!r}")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed must be a whole number of at least 0, got {seed!r}")
    if method not in METHODS:
        raise ValueError(f"method must be 'BCa' or 'percentile', got {method!r}")
    estimate = float(statistic(*samples))
    # constant data are answered and missing bounds refused below, so SciPy need not warn of them
    with warnings.catch_warnings(), np.errstate(divide="ignore", invalid="ignore"):
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)
        result = stats.bootstrap(
            samples,
            statistic,
            n_resamples=resamples,
            paired=True,
            vectorized=True,
            confidence_level=confidence,
            method=method,
            rng=np.random.default_rng(seed),
        )
    spread = float(np.ptp(result.bootstrap_distribution))
    # scale is the size of what was subtracted or divided: its rounding error is all that is left then
    if spread <= 1e-14 * scale:
        return Interval(estimate, estimate, estimate, confidence)
    low, high = (float(bound) for bound in result.confidence_interval)
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(
            f"the {method} interval of {samples[0].size} prompts is [{low}, {high}]: too few different values; "
            "use method='percentile' or more prompts"
        )
    return Interval(estimate, low, high, confidence)


def _same_prompts(**samples: PerPrompt) -> tuple[Float[np.ndarray, " B"], ...]:
    arrays = {name: np.asarray(values, dtype=np.float64) for name, values in samples.items()}
    for name, array in arrays.items():
        if array.ndim != 1:
            raise ValueError(f"{name} must hold one number per prompt, got shape {array.shape}")
        bad = np.flatnonzero(~np.isfinite(array))
        if bad.size:
            raise ValueError(f"{name}[{bad[0]}] is {array[bad[0]]}; every prompt needs a finite number")
    sizes = {name: array.size for name, array in arrays.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"the samples must hold the same prompts, got {sizes} values")
    if min(sizes.values()) < 2:
        raise ValueError(f"an interval needs at least 2 prompts, got {min(sizes.values())}")
    return tuple(arrays.values())


def _require_positive(name: str, values_B: Float[np.ndarray, " B"]) -> None:
    bad = np.flatnonzero(values_B <= 0)
    if bad.size:
        raise ValueError(f"{name}[{bad[0]}] is {values_B[bad[0]]:g}; leave out prompts without rounds")
