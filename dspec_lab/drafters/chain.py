"""Sessions of the drafters that run token by token on their own hidden state (EAGLE-3, MTP)."""

from __future__ import annotations

import torch
from torch import Tensor

from dspec_lab.config import SamplingConfig
from dspec_lab.core.streams import DraftDraws
from dspec_lab.core.types import Proposal
from dspec_lab.drafters.chain_model import ChainDraftModel
from dspec_lab.drafters.choose import TokenChooser, check_gamma
from dspec_lab.drafters.fit import check_target, context_rows
from dspec_lab.drafters.protocol import Commit
from dspec_lab.models.protocol import Taps, Target


class ChainDrafter:
    """A drafter whose next step reads its last one. A drafted end token ends the proposal, as its last token."""

    def __init__(self, model: ChainDraftModel, *, name: str, taps: Taps) -> None:
        self.model = model
        self.name = name
        self.taps = taps
        self.max_gamma: int | None = model.arch.max_gamma

    def start(self, target: Target, *, capacity: int) -> ChainSession:
        """A fresh session; borrows the target's embedding and head where the model has none of its own."""
        check_target(self.model.arch, target, self.name)
        self.model.share(embedding=target.embedding, head=target.head)
        return ChainSession(self.model, self.name, self.taps, capacity, target.eos_ids)


class ChainSession:
    """One request's draft cache and the hidden state that proposes the next token."""

    def __init__(self, model: ChainDraftModel, name: str, taps: Taps, capacity: int, end_ids: frozenset[int]) -> None:
        self._model = model
        self._name = name
        self._taps = taps
        self._end_ids = end_ids
        self._cache = model.new_cache(capacity)
        self._kept_1D: Tensor | None = None

    @property
    def context_length(self) -> int:
        """Committed tokens whose features the draft context holds."""
        return self._cache.length

    @property
    def cache_bytes(self) -> int:
        """Memory of the draft cache; fixed from the start."""
        return self._cache.cache_bytes

    @torch.inference_mode()
    def commit(self, commit: Commit) -> None:
        """Pair each feature row with the token after it and run these rows through the draft layers."""
        features, rows_NF = commit.features, None
        if features is not None:
            rows_NF = features.tapped_NF if self._taps.layers else features.last_ND
        rows_NF = context_rows(commit, rows_NF, first=self._kept_1D is None, name=self._name)
        next_ids_N = torch.tensor(commit.token_ids[-rows_NF.shape[0] :], device=rows_NF.device)
        self._kept_1D = self._model.extend(self._cache, rows_NF, next_ids_N)

    @torch.inference_mode()
    def propose(self, gamma: int, sampling: SamplingConfig, draws: DraftDraws) -> Proposal:
        """A chain of at most `gamma` tokens; the draft cache is left as it was."""
        check_gamma(gamma, self._model.arch.max_gamma, self._name)
        if self._kept_1D is None:
            raise ValueError(f"drafter {self._name} was asked to propose before the prompt was committed")
        if gamma == 0:
            return Proposal(())
        chooser = TokenChooser(self._model, sampling, draws)
        hidden_1D, token_ids, rows = self._kept_1D, [], []
        for slot in range(gamma):
            if slot:
                hidden_1D = self._model.step(self._cache, slot - 1, hidden_1D, token_ids[-1])
            logits_1W = self._model.logits(hidden_1D)
            picked = torch.tensor([chooser.pick(slot, logits_1W)], device=logits_1W.device)
            token_ids.append(int(self._model.to_target_ids(picked)))
            rows.append(logits_1W)
            if token_ids[-1] in self._end_ids:
                break
        return chooser.proposal(tuple(token_ids), torch.cat(rows))
