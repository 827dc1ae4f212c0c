"""The target's real laws at the positions of a batch: final norm, head, scaling and soft cap included."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspec_lab.drafters.layers import linear
from dspec_lab.drafters.vocabulary import DraftModel
from dspec_lab.training.fused_terms import NO_HIT
from dspec_lab.training.vocabulary_sample import VocabularySample

# a table of the laws of all positions in use is made once for a batch if it fits here
TABLE_BYTES = 2**29


@dataclass(frozen=True, slots=True)
class TeacherLaw:
    """Target laws of N rows over the draft vocabulary, or over a sample of it with its weights."""

    probs_NW: Tensor
    missed_N: Tensor  # mass outside of it
    top_N: Tensor  # index of the largest token; NO_HIT where that token is missing


class Teacher:
    """Laws p at flat positions (sequence times length + position) of a batch of last hidden states.

    The hidden states are after the target's final norm. `lse_BT`, the log-sum-exp of the target's whole logits, spares
    the tokens outside the draft vocabulary; it must come from the same hidden states. No gradient flows here.
    """

    def __init__(
        self,
        model: DraftModel,
        last_hidden_BTD: Float[Tensor, "B T D"],
        lse_BT: Float[Tensor, "B T"] | None = None,
        vocabulary: VocabularySample | None = None,
    ) -> None:
        if vocabulary is not None and lse_BT is None:
            raise ValueError("a sampled vocabulary needs the log-sum-exp of the target's logits")
        self.model, self.vocabulary = model, vocabulary
        self._hidden_ND = last_hidden_BTD.detach().flatten(0, 1)
        self._lse_N = None if lse_BT is None else lse_BT.flatten()
        self._head_WD: Tensor | None = None
        self._table: tuple[Tensor, TeacherLaw] | None = None

    @torch.no_grad()
    def prepare(self, index_N: Int[Tensor, " N"]) -> None:
        """Compute the laws of the positions in `index_N` once, for all later calls, if they fit `TABLE_BYTES`."""
        used_U = index_N.unique()
        if used_U.numel() * self._head().shape[0] * 4 > TABLE_BYTES:
            return
        row_of_N = torch.full((self._hidden_ND.shape[0],), -1, device=index_N.device)
        row_of_N[used_U] = torch.arange(used_U.shape[0], device=index_N.device)
        self._table = (row_of_N, self._compute(used_U))

    @torch.no_grad()
    def law(self, index_N: Int[Tensor, " N"]) -> TeacherLaw:
        """Laws at flat positions `index_N`; a position may come several times."""
        if self._table is not None:
            row_of_N, law = self._table
            rows_N = row_of_N[index_N]
            if bool((rows_N < 0).any()):
                raise ValueError(f"position {int(index_N[rows_N < 0][0])} is not among those that were prepared")
        else:
            used_U, rows_N = index_N.unique(return_inverse=True)
            law = self._compute(used_U)
            if used_U.shape[0] == index_N.shape[0] and bool((used_U == index_N).all()):
                return law
        return TeacherLaw(law.probs_NW[rows_N], law.missed_N[rows_N], law.top_N[rows_N])

    def _head(self) -> Tensor:
        if self._head_WD is None:
            head_WD = self.model.draft_head().detach()
            self._head_WD = head_WD if self.vocabulary is None else head_WD[self.vocabulary.index_S]
        return self._head_WD

    def _compute(self, index_U: Tensor) -> TeacherLaw:
        model, hidden_UD = self.model, self._hidden_ND[index_U].to(self.model.activation_dtype)
        kept_W = model.target_ids_W
        if self._lse_N is None:
            whole_UV = model.teacher_logits(hidden_UD)
            lse_U = whole_UV.logsumexp(-1)
            best_U = model.to_draft_ids(whole_UV.argmax(-1))
            top_U = best_U.masked_fill(best_U < 0, NO_HIT)
            logits_UW = whole_UV if kept_W is None else whole_UV[:, kept_W]
        else:
            logits_UW, cap = linear(hidden_UD, self._head()), model.spec.logit_softcap
            if cap is not None:
                logits_UW = torch.tanh(logits_UW / cap).mul_(cap)
            lse_U = self._lse_N[index_U].to(logits_UW.dtype)
            best_U1 = logits_UW.argmax(-1, keepdim=True)
            top_p_U = (logits_UW.gather(-1, best_U1)[:, 0] - lse_U).exp()
            top_U = best_U1[:, 0]
            if self.vocabulary is not None:
                logits_UW += self.vocabulary.log_weight_S
        probs_UW = logits_UW.sub_(lse_U[:, None]).exp_() if self._lse_N is not None else _exp(logits_UW, lse_U)
        if kept_W is None and self.vocabulary is None:
            missed_U = torch.zeros_like(lse_U)
        else:
            missed_U = (1.0 - probs_UW.sum(-1)).clamp_min(0.0)
        if self._lse_N is not None:
            # the largest kept token is the largest of all only if no missed token can be larger
            top_U = top_U.masked_fill(top_p_U <= missed_U, NO_HIT)
        return TeacherLaw(probs_UW, missed_U, top_U)


def _exp(logits_UW: Tensor, lse_U: Tensor) -> Tensor:
    return (logits_UW - lse_U[:, None]).exp_()
