"""How a neural drafter picks its tokens: sampled from the very law it hands to the verifier, or greedily."""

from __future__ import annotations

import torch
from torch import Tensor

from dspec_lab.config import SamplingConfig
from dspec_lab.core.sampling import greedy_ids, law
from dspec_lab.core.streams import DraftDraws
from dspec_lab.core.types import Proposal
from dspec_lab.drafters.vocabulary import DraftModel


class TokenChooser:
    """Picks draft-vocabulary indices slot by slot and keeps the laws they came from."""

    def __init__(self, model: DraftModel, sampling: SamplingConfig, draws: DraftDraws) -> None:
        self._model = model
        self._sampling = sampling
        self._draws = draws
        self._laws: list[Tensor] = []

    @property
    def greedy(self) -> bool:
        """Whether each token is the largest entry's."""
        return self._sampling.greedy

    def pick(self, slot: int, logits_1W: Tensor) -> int:
        """Index of the token drafted at `slot`, from its raw logits."""
        if self._sampling.greedy:
            return greedy_ids(logits_1W, what="draft")[0]
        probs_1W = law(logits_1W, self._sampling, what="draft")
        self._laws.append(probs_1W)
        return self._draws.categorical(slot, probs_1W[0])

    def proposal(
        self, token_ids: tuple[int, ...], logits_GW: Tensor, confidence_logits_G: Tensor | None = None
    ) -> Proposal:
        """The proposal of the tokens picked so far: dense where they were sampled, one-hot where greedy."""
        probs_GV = self._model.spread(torch.cat(self._laws)) if self._laws else None
        confidence = (
            None if confidence_logits_G is None else tuple(torch.sigmoid(confidence_logits_G.double()).tolist())
        )
        return Proposal(
            token_ids=token_ids,
            draft_probs_GV=probs_GV,
            draft_logits_GV=logits_GW,
            logit_ids_V=self._model.target_ids_W,
            confidence_G=confidence,
        )


def check_gamma(gamma: int, max_gamma: int, name: str) -> None:
    """Raise `ValueError` for a draft length that the drafter was not trained for."""
    if gamma < 0:
        raise ValueError(f"gamma must be 0 or more, got {gamma}")
    if gamma > max_gamma:
        raise ValueError(f"{name} was trained to draft {max_gamma} tokens, cannot draft gamma = {gamma}")
