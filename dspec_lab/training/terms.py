"""Per-row training terms: cross-entropy, L1 distance and acceptance of draft laws against the target's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dspec_lab.drafters.layers import bf16_products, in_bf16, linear
from dspec_lab.drafters.vocabulary import DraftModel
from dspec_lab.training.fused_terms import NO_HIT, distance_terms
from dspec_lab.training.teacher import Teacher

# rows whose logits are alive at once
ROWS_PER_CHUNK = 512
# laws kept for the backward pass, both sides together; rows beyond are computed again there
KEEP_BYTES = 2**30


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

    The formula written out. `model_row_terms` computes the same with fewer passes over the vocabulary.
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
    teacher: Teacher,
    teacher_index_N: Int[Tensor, " N"],
    label_ids_N: Int[Tensor, " N"],
    *,
    rows_per_chunk: int = ROWS_PER_CHUNK,
    keep_bytes: int | None = None,
) -> RowTerms:
    """`row_terms` of normed draft hidden states against the teacher's laws at flat positions `teacher_index_N`.

    `feature_NR` is the sequential head's feature, to be added as a bias. Logits are alive for one chunk only. Laws are
    kept for the backward pass up to `keep_bytes` (None: `KEEP_BYTES`); rows of later chunks are computed again in it.
    """
    keep_bytes = KEEP_BYTES if keep_bytes is None else keep_bytes
    sample = teacher.vocabulary
    head_WD = model.draft_head()
    labels_N = model.to_draft_ids(label_ids_N)
    bias_WR = None if feature_NR is None else model.markov_head.markov_w2.weight
    if sample is not None:
        head_WD = head_WD.index_select(0, sample.index_S)
        bias_WR = None if bias_WR is None else bias_WR.index_select(0, sample.index_S)
        labels_N = sample.place(labels_N)
    cap = model.spec.logit_softcap

    low = in_bf16()

    def chunk(hidden: Tensor, feature: Tensor | None, teacher_index: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        # chunks that are made again in the backward pass are so outside of the caller's context
        with bf16_products(low):
            return terms_of(hidden, feature, teacher_index, labels)

    def terms_of(hidden: Tensor, feature: Tensor | None, teacher_index: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        logits_NW = linear(hidden, head_WD)
        if cap is not None:
            logits_NW = cap * torch.tanh(logits_NW / cap)
        if feature is not None:
            logits_NW = logits_NW.add_(linear(feature, bias_WR))
        if sample is not None:
            logits_NW = logits_NW.add_(sample.log_weight_S)
        law = teacher.law(teacher_index)
        ce_N, soft_N, l1_N, best_N = distance_terms(logits_NW, law.probs_NW, law.missed_N, labels)
        accept_N = (1.0 - 0.5 * l1_N.detach()).clamp(0.0, 1.0)
        return ce_N, soft_N, l1_N, accept_N, (best_N == law.top_N) & (law.top_N != NO_HIT)

    parts, kept_bytes = [], 0
    width = head_WD.shape[0]
    for start in range(0, max(hidden_ND.shape[0], 1), rows_per_chunk):
        rows = slice(start, start + rows_per_chunk)
        feature = None if feature_NR is None else feature_NR[rows]
        args = (hidden_ND[rows], feature, teacher_index_N[rows], labels_N[rows])
        kept_bytes += 8 * width * args[0].shape[0]
        if torch.is_grad_enabled() and kept_bytes > keep_bytes:
            parts.append(RowTerms(*checkpoint(chunk, *args, use_reentrant=False)))
        else:
            parts.append(RowTerms(*chunk(*args)))
    return RowTerms.join(parts)
