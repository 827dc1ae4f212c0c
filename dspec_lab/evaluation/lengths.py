"""Draft lengths of an evaluation: within each drafter's reach, or several side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dspec_lab.drafters.protocol import Drafter

USUAL_GAMMA = 7


def within_reach(drafters: Mapping[str, Drafter], gamma: int = USUAL_GAMMA) -> dict[str, int]:
    """`gamma` for each drafter, or the longest proposal it was trained for where that is less."""
    return {name: min(gamma, drafter.max_gamma or gamma) for name, drafter in drafters.items()}


def side_by_side(drafters: Mapping[str, Drafter], lengths: Sequence[int]) -> tuple[dict[str, Drafter], dict[str, int]]:
    """(drafters, their lengths) with every drafter once per length, as NAME:LENGTH where there are several.

    Raises `ValueError` for a length that a drafter was not trained for, since asking for it by name was meant.
    """
    if not lengths or len(set(lengths)) != len(lengths):
        raise ValueError(f"draft lengths must be given once each, got {', '.join(map(str, lengths)) or 'none'}")
    made, gammas = {}, {}
    for name, drafter in drafters.items():
        for gamma in lengths:
            if gamma < 1 or gamma > (drafter.max_gamma or gamma):
                limit = f"at most {drafter.max_gamma}" if gamma >= 1 else "at least 1"
                raise ValueError(f"{name} drafts {limit} tokens a round, got gamma {gamma}")
            label = name if len(lengths) == 1 else f"{name}:{gamma}"
            made[label], gammas[label] = drafter, gamma
    return made, gammas
