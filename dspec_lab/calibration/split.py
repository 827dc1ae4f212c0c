"""Prompts to fit on and prompts to judge on. Rounds of one prompt share its text and never stand on both sides."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from dspec_lab.calibration.records import Rounds


def split_by_prompt(rounds: Rounds, *, held_out: float = 0.5, seed: int = 0) -> tuple[Rounds, Rounds]:
    """(rounds to fit on, held-out rounds): in each domain a share `held_out` of the prompts is held out.

    At least one prompt of every domain goes to each side; `ValueError` where a domain has fewer than two.
    """
    if not 0 < held_out < 1:
        raise ValueError(f"the held-out share must lie between 0 and 1, got {held_out}")
    generator = np.random.default_rng(seed)
    chosen: set[str] = set()
    for domain in rounds.domains:
        prompts = sorted(set(rounds.prompt_I[rounds.domain_I == domain].tolist()))
        if len(prompts) < 2:
            raise ValueError(f"the domain {domain!r} has {len(prompts)} prompt, a split needs at least 2")
        count = min(max(1, round(held_out * len(prompts))), len(prompts) - 1)
        chosen |= set(generator.permutation(prompts)[:count].tolist())
    away_I = np.isin(rounds.prompt_I, sorted(chosen))
    fit, judge = rounds.select(~away_I), rounds.select(away_I)
    refuse_leakage(fit.prompts, judge.prompts)
    return fit, judge


def refuse_leakage(fitted: Iterable[str], judged: Iterable[str]) -> None:
    """Raise `ValueError` if a prompt was fitted on and is to be judged on."""
    both = sorted(set(fitted) & set(judged))
    if both:
        more = f" and {len(both) - 3} more" if len(both) > 3 else ""
        raise ValueError(
            f"{len(both)} prompts were used to fit and would be judged on: {', '.join(both[:3])}{more}; "
            "held-out numbers need other prompts"
        )
