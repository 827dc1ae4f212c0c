"""The DSpark drafter: one block pass, then a left-to-right walk with the sequential head."""

from __future__ import annotations

import torch
from torch import Tensor

from dspec_lab.config import SamplingConfig
from dspec_lab.core.streams import DraftDraws
from dspec_lab.core.types import Proposal
from dspec_lab.drafters.backbone import BlockDraftModel
from dspec_lab.drafters.block_rows import greedy_walk
from dspec_lab.drafters.cache import DraftCache
from dspec_lab.drafters.choose import TokenChooser, check_gamma
from dspec_lab.drafters.fit import check_target, context_rows
from dspec_lab.drafters.protocol import Commit
from dspec_lab.models.protocol import Taps, Target

FRESH = 8  # rounds whose features may wait as views of their passes


class DSparkDrafter:
    """Drafts blocks from the target's tapped layers. The block always has its trained width; gamma cuts it.

    Ref: DSpark (arXiv:2607.05147), section 3.
    """

    def __init__(self, model: BlockDraftModel, *, name: str = "dspark") -> None:
        self.model = model
        self.name = name
        self.taps = Taps(layers=model.arch.target_layer_ids)
        self.max_gamma: int | None = model.arch.max_gamma

    def start(self, target: Target, *, capacity: int) -> BlockSession:
        """A fresh session; borrows the target's embedding and head where the model has none of its own."""
        check_target(self.model.arch, target, self.name)
        self.model.share(embedding=target.embedding, head=target.head)
        return BlockSession(self.model, self.name, capacity)


class BlockSession:
    """One request's draft cache and anchor.

    After the prompt, features wait until something is drafted: a request that skips drafting (see `scheduler.gating`)
    then pays for its rows once, in one pass, when it drafts again.
    """

    def __init__(self, model: BlockDraftModel, name: str, capacity: int) -> None:
        self._model = model
        self._name = name
        self._cache = model.new_cache(capacity)
        self._anchor: int | None = None
        self._waiting: list[Tensor] = []  # features not yet in the cache, oldest first, and then
        self._fresh: list[Tensor] = []  # those of the newest rounds
        self._committed = 0

    @property
    def context_length(self) -> int:
        """Committed tokens whose features the draft context holds, or will hold when it drafts next."""
        return self._committed

    @property
    def model(self) -> BlockDraftModel:
        """The drafter's model; sessions that share one can draft in one pass (`drafters.together`)."""
        return self._model

    @property
    def cache(self) -> DraftCache:
        """The draft cache; it lacks the features that wait."""
        return self._cache

    @property
    def cache_bytes(self) -> int:
        """Memory of the draft cache; fixed from the start."""
        return self._cache.cache_bytes

    def commit(self, commit: Commit) -> None:
        """Append the features of the committed rows; the newest token becomes the anchor."""
        tapped_NF = None if commit.features is None else commit.features.tapped_NF
        rows_NF = context_rows(commit, tapped_NF, first=self._anchor is None, name=self._name)
        count = self._committed + rows_NF.shape[0]
        if count > self._cache.capacity:
            raise ValueError(f"{count} context tokens exceed the draft cache's capacity {self._cache.capacity}")
        self._committed = count
        self._fresh.append(rows_NF)
        if len(self._fresh) == FRESH:
            # rows of a batch's pass are a view of the whole pass, which must not be kept alive while they wait
            with torch.inference_mode():
                self._waiting.append(torch.cat(self._fresh))
            self._fresh.clear()
        if self._anchor is None:
            with torch.inference_mode():
                self._take_in()
        self._anchor = commit.token_ids[-1]

    @torch.inference_mode()
    def propose(self, gamma: int, sampling: SamplingConfig, draws: DraftDraws) -> Proposal:
        """Tokens of the first `gamma` proposing slots, with their confidences where the model has that head."""
        anchor = self.anchor_for(gamma)
        if gamma == 0:
            return Proposal(())
        self._take_in()
        first = self._model.arch.first_slot
        hidden_GD = self._model.block_hidden(self._cache, anchor)[first : first + gamma]
        chooser, base_GW = TokenChooser(self._model, sampling, draws), self._model.head_logits(hidden_GD)
        if chooser.greedy and (walked := greedy_walk(self._model, base_GW, [anchor], [1] * gamma)) is not None:
            tokens, embedded_GR = walked
            head = self._model.confidence_head
            sure_G = None if head is None else head(hidden_GD, embedded_GR if head.uses_previous else None)
            return chooser.proposal(tuple(tokens), base_GW, sure_G)
        block = self._model.draft(hidden_GD, base_GW, anchor, chooser.pick)
        return chooser.proposal(block.token_ids, block.logits_GW, block.confidence_logits_G)

    def anchor_for(self, gamma: int) -> int:
        """The token that a block of `gamma` drafts follows; `ValueError` where it cannot be drafted."""
        check_gamma(gamma, self._model.arch.max_gamma, self._name)
        if self._anchor is None:
            raise ValueError(f"drafter {self._name} was asked to propose before the prompt was committed")
        return self._anchor

    def hand_over(self) -> Tensor | None:
        """The feature rows that wait, for the caller to append to `cache`; None where none do."""
        held = [*self._waiting, *self._fresh]
        if not held:
            return None
        self._waiting.clear()
        self._fresh.clear()
        return held[0] if len(held) == 1 else torch.cat(held)

    def _take_in(self) -> None:
        rows_NF = self.hand_over()
        if rows_NF is not None:
            self._model.append_context(self._cache, rows_NF)
