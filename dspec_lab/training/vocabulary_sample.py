"""A part of the draft vocabulary that stands for all of it in one training step.

Logits over the vocabulary are most of a step's cost, and nearly all of their mass lies on few tokens. The sample holds
the tokens that matter for the batch for certain, and draws the rest evenly, each drawn token standing for
rest / drawn of its kind. With that weight added to the logits of both laws, every sum over the vocabulary (the
normaliser of q, the distance) is estimated without bias.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class VocabularySample:
    """Draft-vocabulary indices of one step and the logarithm of how many tokens each stands for."""

    index_S: Int[Tensor, " S"]
    log_weight_S: Float[Tensor, " S"]
    place_W: Int[Tensor, " W"]  # place of each token in the sample, -1 if it was not drawn

    def place(self, draft_index_N: Int[Tensor, " N"]) -> Int[Tensor, " N"]:
        """Places of draft-vocabulary indices; -1 stays -1."""
        return torch.where(draft_index_N < 0, draft_index_N, self.place_W[draft_index_N.clamp_min(0)])


def sample_vocabulary(
    size: int, certain_N: Int[Tensor, " N"], num_drawn: int, generator: torch.Generator
) -> VocabularySample:
    """The tokens `certain_N` (repeats and negative entries are ignored) and `num_drawn` of the others, in order."""
    if num_drawn < 1:
        raise ValueError(f"at least one token must be drawn from the rest, got {num_drawn}")
    log_weight_W = torch.zeros(size)
    chosen_W = torch.zeros(size, dtype=torch.bool)
    chosen_W[certain_N[certain_N >= 0].cpu()] = True
    rest_N = (~chosen_W).nonzero()[:, 0]
    if len(rest_N) <= num_drawn:
        chosen_W[:] = True
    else:
        drawn_N = rest_N[torch.randperm(len(rest_N), generator=generator)[:num_drawn]]
        chosen_W[drawn_N] = True
        log_weight_W[drawn_N] = math.log(len(rest_N) / num_drawn)
    index_S = chosen_W.nonzero()[:, 0]
    place_W = torch.full((size,), -1)
    place_W[index_S] = torch.arange(len(index_S))
    device = certain_N.device
    return VocabularySample(index_S.to(device), log_weight_W[index_S].to(device), place_W.to(device))
