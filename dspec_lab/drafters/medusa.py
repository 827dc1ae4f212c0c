"""The Medusa drafter: independent heads on the target's last hidden state, as a chain."""

from __future__ import annotations

import torch
from torch import Tensor

from dspec_lab.config import SamplingConfig
from dspec_lab.core.streams import DraftDraws
from dspec_lab.core.types import Proposal
from dspec_lab.drafters.choose import TokenChooser, check_gamma
from dspec_lab.drafters.fit import check_target, context_rows
from dspec_lab.drafters.medusa_model import MedusaDraftModel
from dspec_lab.drafters.protocol import Commit
from dspec_lab.models.protocol import Taps, Target


class MedusaDrafter:
    """All tokens come from the state before the anchor: no head knows the anchor, nor what another head chose.

    Ref: Medusa (arXiv:2401.10774), without its tree.
    """

    def __init__(self, model: MedusaDraftModel, *, name: str = "medusa") -> None:
        self.model = model
        self.name = name
        self.taps = Taps(last_hidden=True)
        self.max_gamma: int | None = model.arch.max_gamma

    def start(self, target: Target, *, capacity: int) -> MedusaSession:
        """A fresh session; borrows the target's head where the model has none of its own."""
        check_target(self.model.arch, target, self.name)
        self.model.share(head=target.head)
        return MedusaSession(self.model, self.name)


class MedusaSession:
    """One request's newest target state."""

    def __init__(self, model: MedusaDraftModel, name: str) -> None:
        self._model = model
        self._name = name
        self._last_D: Tensor | None = None

    def commit(self, commit: Commit) -> None:
        """Keep the hidden state of the newest committed row, the one before the anchor."""
        last_ND = None if commit.features is None else commit.features.last_ND
        self._last_D = context_rows(commit, last_ND, first=self._last_D is None, name=self._name)[-1]

    @torch.inference_mode()
    def propose(self, gamma: int, sampling: SamplingConfig, draws: DraftDraws) -> Proposal:
        """One token from each of the first `gamma` heads."""
        check_gamma(gamma, self._model.arch.max_gamma, self._name)
        if self._last_D is None:
            raise ValueError(f"drafter {self._name} was asked to propose before the prompt was committed")
        if gamma == 0:
            return Proposal(())
        logits_GW = self._model.head_logits(self._model.hidden(self._last_D, gamma))
        chooser = TokenChooser(self._model, sampling, draws)
        picked_G = torch.tensor([chooser.pick(k, logits_GW[k : k + 1]) for k in range(gamma)], device=logits_GW.device)
        return chooser.proposal(tuple(self._model.to_target_ids(picked_G).tolist()), logits_GW)
