"""Whether traffic still looks like what a calibration was fitted on."""

from __future__ import annotations

import numpy as np

from dspec_lab.calibration.calibration import Calibration, confidence_shares
from dspec_lab.calibration.records import Rounds, survival

# population stability index above which a distribution is commonly called changed
STABILITY_LIMIT = 0.25
NEW_DOMAIN_SHARE = 0.05
GAP_LIMIT = 0.05
FEWEST_ROUNDS = 100  # by position, below which shares of ten bins say little
FLOOR = 1e-3  # an empty bin counts as this share


def stability_index(expected: tuple[float, ...], found: tuple[float, ...]) -> float:
    """Population stability index: sum (f - e) ln(f / e), 0 for equal shares."""
    e = np.maximum(expected, FLOOR)
    f = np.maximum(found, FLOOR)
    return float(((f - e) * np.log(f / e)).sum())


def drift_warnings(calibration: Calibration, rounds: Rounds) -> list[str]:
    """In words, how the rounds differ from the fit; none when they do not. `rounds` hold raw confidences.

    Looked at: sampling temperature, domains, the shape of the raw confidences, and calibrated survival against what
    survived (by more than 0.05 and three standard errors over prompts).
    """
    if rounds.calibrated:
        raise ValueError("drift is judged on raw confidences, these are calibrated")
    origin, found = calibration.provenance, []
    if rounds.temperature != origin.temperature:
        found.append(f"sampling temperature {rounds.temperature:g}, fitted at {origin.temperature:g}")
    for domain in rounds.domains:
        share = float((rounds.domain_I == domain).mean())
        if origin.domain_shares.get(domain, 0.0) < NEW_DOMAIN_SHARE <= share:
            found.append(f"{100 * share:.0f} % of the rounds are of the domain {domain!r}, which the fit hardly saw")
    after_IG = survival(calibration.apply(rounds).confidence_IG)
    prompt_I, num_prompts = rounds.prompt_index()
    for k, shares in enumerate(confidence_shares(rounds)):
        there_I = rounds.proposed_IG[:, k]
        if int(there_I.sum()) < FEWEST_ROUNDS:
            continue
        index = stability_index(origin.confidence_shares[k], shares)
        if index > STABILITY_LIMIT:
            found.append(f"position {k + 1}: confidences have another shape than in the fit (index {index:.2f})")
        gap_N = after_IG[there_I, k] - rounds.survived_IG[there_I, k]
        by_prompt_B = np.bincount(prompt_I[there_I], gap_N, num_prompts)
        gap, error = float(gap_N.mean()), float(np.sqrt((by_prompt_B**2).sum()) / len(gap_N))
        if abs(gap) > GAP_LIMIT and abs(gap) > 3 * error:
            word = "above" if gap > 0 else "below"
            found.append(f"position {k + 1}: calibrated survival is {abs(gap):.2f} {word} what survived")
    return found
