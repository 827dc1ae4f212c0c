"""Per-row training terms: cross-entropy, L1 distance and acceptance of draft laws against the target's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dspec_lab.drafters.vocabulary import DraftModel

# rows whose logits (draft and target vocabulary) are alive at once
ROWS_PER_CHUNK = 512


@dataclass(frozen=True, slots=True)
class RowTerms:
    """Terms of N draft laws q against target laws p over the whole target vocabulary."""

    cross_entropy_N: Tensor  # -log q[label]; 0 where the label is not in the draft vocabulary
    soft_cross_entropy_N: Tensor  # -sum_v p log q over the draft vocabulary
    l1_N: Tensor  # sum_v |q - p|, no factor one half
    accept_rate_N: Tensor  # 1 - l1 / 2, no gradient
    greedy_hit_N: Tensor  # whether q and p have the same largest token, no gradient

    @staticmethod
    def join(parts: list[RowTerms]) -> RowTerms:
        """Terms of all rows, from those of consecutive chunks."""
        names = RowTerms.__dataclass_fields__
        return RowTerms(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


def row_terms(
    draft_logits_NW: Float[Tensor, "N W"],
    teacher_logits_NX: Float[Tensor, "N X"],
    label_index_N: Int[Tensor, " N"],
    kept_W: Int[Tensor, " W"] | None = None,
    teacher_lse_N: Float[Tensor, " N"] | None = None,
) -> RowTerms:
    """Terms of q = softmax(draft logits) and p = softmax(teacher logits); p carries no gradient.

    `kept_W` are the target ids of a reduced draft vocabulary: q is 0 elsewhere, and p's mass there counts in full
    towards the distance. `label_index_N` indexes the draft vocabulary, -1 for a label that is not in it. With
    `teacher_lse_N`, the log-sum-exp of the target's whole logits, `teacher_logits_NX` holds the kept columns only.
    """
    log_q_NW = draft_logits_NW.float().log_softmax(-1)
    with torch.no_grad():
        teacher_NX = teacher_logits_NX.detach().float()
        lse_N = teacher_NX.logsumexp(-1) if teacher_lse_N is None else teacher_lse_N.float()
        whole = kept_W is None or teacher_lse_N is not None
        kept_NW = teacher_NX if whole else teacher_NX.index_select(-1, kept_W)
        p_NW = (kept_NW - lse_N[:, None]).exp()
        missed_N = torch.zeros_like(lse_N) if kept_W is None else (1.0 - p_NW.sum(-1)).clamp_min(0.0)
        best_W = draft_logits_NW.argmax(-1)
        if kept_W is None:
            hit_N = best_W == teacher_NX.argmax(-1)
        elif teacher_lse_N is None:
            hit_N = kept_W[best_W] == teacher_NX.argmax(-1)
        else:
            # the largest kept token is the largest of all only if no missed token can be larger
            top_N = kept_NW.amax(-1)
            hit_N = (best_W == kept_NW.argmax(-1)) & ((top_N - lse_N).exp() > missed_N)
    q_NW = log_q_NW.exp()
    l1_N = (q_NW - p_NW).abs().sum(-1) + missed_N
    known_N = label_index_N >= 0
    picked_N = log_q_NW.gather(-1, label_index_N.clamp_min(0)[:, None]).squeeze(-1)
    return RowTerms(
        cross_entropy_N=torch.where(known_N, -picked_N, torch.zeros_like(picked_N)),
        soft_cross_entropy_N=-(p_NW * log_q_NW).sum(-1),
        l1_N=l1_N,
        accept_rate_N=(1.0 - 0.5 * l1_N.detach()).clamp(0.0, 1.0),
        greedy_hit_N=hit_N,
    )


def model_row_terms(
    model: DraftModel,
    hidden_ND: Float[Tensor, "N D"],
    feature_NR: Float[Tensor, "N R"] | None,
    teacher_hidden_ND: Float[Tensor, "N D"],
    label_ids_N: Int[Tensor, " N"],
    *,
    teacher_lse_N: Float[Tensor, " N"] | None = None,
    rows_per_chunk: int = ROWS_PER_CHUNK,
) -> RowTerms:
    """`row_terms` of normed draft hidden states, in chunks whose logits are made again for the backward pass.

    `feature_NR` is the sequential head's feature, to be added as a bias. Memory does not grow with N times V.
    """
    bias = None if feature_NR is None else model.markov_head.bias

    def chunk(hidden: Tensor, feature: Tensor | None, teacher: Tensor, labels: Tensor, lse: Tensor | None) -> RowTerms:
        logits_NW = model.head_logits(hidden)
        if bias is not None:
            logits_NW = logits_NW + bias(feature)
        with torch.no_grad():
            if lse is None:
                teacher_logits = model.teacher_logits(teacher)
            else:
                teacher_logits = model.head_logits(teacher)
        return row_terms(logits_NW, teacher_logits, model.to_draft_ids(labels), model.target_ids_W, lse)

    parts = []
    for start in range(0, max(hidden_ND.shape[0], 1), rows_per_chunk):
        rows = slice(start, start + rows_per_chunk)
        args = (
            hidden_ND[rows],
            None if feature_NR is None else feature_NR[rows],
            teacher_hidden_ND[rows],
            label_ids_N[rows],
            None if teacher_lse_N is None else teacher_lse_N[rows],
        )
        if torch.is_grad_enabled():
            parts.append(RowTerms(*checkpoint(_as_tuple(chunk), *args, use_reentrant=False)))
        else:
            parts.append(chunk(*args))
    return RowTerms.join(parts)


def _as_tuple(chunk):  # noqa: ANN001, ANN202 - checkpoint hands on tuples of tensors only
    names = tuple(RowTerms.__dataclass_fields__)

    def run(*args: Tensor | None) -> tuple[Tensor, ...]:
        terms = chunk(*args)
        return tuple(getattr(terms, name) for name in names)

    return run
