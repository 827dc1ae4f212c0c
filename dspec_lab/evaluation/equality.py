"""Is the speculative text the plain text? The verdict that stands beside every speed at temperature 0."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from dspec_lab.core.types import Generation
from dspec_lab.models.protocol import Target

Verdict = bool | Literal["near_tie", "inconclusive"] | None

# a flip counts as a tie when the two log-probabilities differ by at most this many rounding steps of the largest logit
TIE_STEPS = 4


@dataclass(frozen=True, slots=True)
class Flip:
    """The first place where two greedy texts differ."""

    position: int  # index among the new tokens
    plain_token: int
    other_token: int
    gap: float  # log-probability of the plain token less that of the other, under the target, nats
    tolerance: float  # the largest gap that the dtype's rounding explains; 0 in fp32

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains the flip."""
        return abs(self.gap) <= self.tolerance


def find_flip(target: Target, prompt_ids: Sequence[int], plain: Sequence[int], other: Sequence[int]) -> Flip | None:
    """The first difference of two greedy continuations, measured by a fresh pass over prompt and common part.

    A text that is only shorter than the other differs at its end; its missing token counts as -1 with gap infinity.
    """
    shared = next((i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b), None)
    if shared is None:
        if len(plain) == len(other):
            return None
        at = min(len(plain), len(other))
        longer = plain if len(plain) > at else other
        tokens = (longer[at], -1) if longer is plain else (-1, longer[at])
        return Flip(at, *tokens, gap=float("inf"), tolerance=0.0)
    context = [*prompt_ids, *plain[:shared]]
    row_V = target.session(capacity=len(context)).extend(context, logit_rows=1).logits_JV[0].double()
    logp_V = torch.log_softmax(row_V, -1)
    gap = float(logp_V[plain[shared]] - logp_V[other[shared]])
    precise = target.dtype in (torch.float32, torch.float64)
    tolerance = 0.0 if precise else TIE_STEPS * torch.finfo(target.dtype).eps * float(row_V.abs().max())
    return Flip(shared, plain[shared], other[shared], gap, tolerance)


def verdict(generations: Iterable[Generation], flips: Sequence[Flip | None]) -> Verdict:
    """The verdict over several greedy runs: True, False, "near_tie" or "inconclusive".

    Inconclusive: nothing was proposed, or no draft was accepted, or none was rejected, so equality shows nothing.
    """
    proposed = accepted = 0
    for generation in generations:
        proposed += generation.num_proposed
        accepted += generation.num_accepted
    real = [flip for flip in flips if flip is not None]
    if any(not flip.near_tie for flip in real):
        return False
    if proposed == 0 or accepted == 0 or accepted == proposed:
        return "inconclusive"
    return "near_tie" if real else True


def largest_gap(flips: Iterable[Flip | None]) -> float | None:
    """The largest log-probability gap at a first difference, nats; None where nothing differed."""
    gaps = [abs(flip.gap) for flip in flips if flip is not None]
    return max(gaps) if gaps else None
