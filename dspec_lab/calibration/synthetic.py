"""Rounds with known chances and known distortions, to test a calibration against the truth."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dspec_lab.calibration.maps import sigmoid
from dspec_lab.calibration.records import Rounds

DOMAINS = ("chat", "code", "math")


def synthetic_rounds(
    count: int,
    temperatures: Sequence[float],
    *,
    biases: Sequence[float] | None = None,
    prompts: int = 60,
    level: float = 1.5,
    spread: float = 1.5,
    seed: int = 0,
    drafter: str = "synthetic",
) -> Rounds:
    """`count` rounds whose position k has the true chance c_k = sigmoid(z_k) and states sigmoid(T_k z_k + b_k).

    Scaling by the temperatures T_k (and taking away the biases b_k, 0 by default) gives the truth back. z_k is normal
    with mean `level` less 0.2 per position; half its variance is common to the positions of a round, and prompts
    differ, so errors go together as in real text. `accept_prob_IG` holds the true chances; times are 1 s.
    """
    gamma = len(temperatures)
    shift_G = np.zeros(gamma) if biases is None else np.asarray(biases, dtype=np.float64)
    if count < 1 or gamma < 1 or prompts < 1 or shift_G.shape != (gamma,):
        raise ValueError(
            f"need rounds, temperatures, prompts and as many biases as temperatures, got {count}, {gamma}, "
            f"{prompts} and {shift_G.size}"
        )
    generator = np.random.default_rng(seed)
    prompt_I = generator.integers(prompts, size=count)
    together_I = generator.normal(size=count) + 0.5 * generator.normal(size=prompts)[prompt_I]
    alone_IG = generator.normal(size=(count, gamma))
    z_IG = level - 0.2 * np.arange(gamma) + spread * np.sqrt(0.5) * (together_I[:, None] + alone_IG)
    true_IG = sigmoid(z_IG)
    kept_IG = np.cumprod(generator.random((count, gamma)) < true_IG, axis=1)
    nothing_IG = np.full((count, gamma), np.nan)
    return Rounds(
        drafter=drafter,
        temperature=1.0,
        prompt_I=np.array([f"prompt/{index:03d}" for index in prompt_I]),
        domain_I=np.array([DOMAINS[index % len(DOMAINS)] for index in prompt_I]),
        gamma_I=np.full(count, gamma),
        num_accepted_I=kept_IG.sum(1),
        confidence_IG=sigmoid(np.asarray(temperatures) * z_IG + shift_G),
        accept_prob_IG=true_IG,
        target_entropy_IG=nothing_IG,
        draft_entropy_IG=nothing_IG,
        draft_s_I=np.ones(count),
        verify_s_I=np.ones(count),
        overhead_s_I=np.zeros(count),
    )
