"""Distance of draft laws from given target laws, with a hand-written backward pass over kept laws.

Autograd would keep a handful of tensors as wide as the vocabulary and walk over each; here it is two, and the
vocabulary is most of a training step's memory traffic.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

NO_HIT = -2  # top index of a teacher's law whose largest token the draft vocabulary does not hold


def distance_terms(
    draft_logits_NW: Float[Tensor, "N W"],
    target_probs_NW: Float[Tensor, "N W"],
    missed_N: Float[Tensor, " N"],
    label_index_N: Int[Tensor, " N"],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(-log q[label], -sum p log q, sum |q - p| + missed, argmax q) per row, q = softmax(draft logits).

    `target_probs_NW` is p over the same W tokens and may sum to less than 1; `missed_N` is its mass elsewhere. A
    label of -1 gives a cross-entropy of 0. Gradients reach the draft logits only.
    """
    return _DistanceTerms.apply(draft_logits_NW, target_probs_NW, missed_N, label_index_N)


class _DistanceTerms(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_NW: Tensor, p_NW: Tensor, missed_N: Tensor, label_N: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        logits_NW = logits_NW if logits_NW.dtype == torch.float64 else logits_NW.float()
        p_NW = p_NW.to(logits_NW.dtype)
        q_NW = torch.softmax(logits_NW, dim=-1)
        top_N1, best_N1 = logits_NW.max(dim=-1, keepdim=True)
        # the largest entry of q is never tiny, so its logarithm is safe
        lse_N = (top_N1 - q_NW.gather(-1, best_N1).log()).squeeze(-1)
        known_N = label_N >= 0
        picked_N = logits_NW.gather(-1, label_N.clamp_min(0)[:, None]).squeeze(-1)
        ce_N = torch.where(known_N, lse_N - picked_N, torch.zeros_like(lse_N))
        mass_N = p_NW.sum(-1)
        soft_N = lse_N * mass_N - torch.linalg.vecdot(p_NW, logits_NW)
        l1_N = torch.linalg.vector_norm(q_NW - p_NW, ord=1, dim=-1) + missed_N.to(q_NW.dtype)
        ctx.save_for_backward(q_NW, p_NW, mass_N, label_N)
        ctx.set_materialize_grads(False)
        best_N = best_N1.squeeze(-1)
        ctx.mark_non_differentiable(best_N)
        return ce_N, soft_N, l1_N, best_N

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, g_ce_N: Tensor | None, g_soft_N: Tensor | None, g_l1_N: Tensor | None, _g_best: Tensor | None
    ) -> tuple[Tensor | None, None, None, None]:
        q_NW, p_NW, mass_N, label_N = ctx.saved_tensors
        known_N = (label_N >= 0).to(q_NW.dtype)
        # each term's gradient is q times something, less something sparse or p
        scale_N = torch.zeros_like(mass_N)
        if g_l1_N is not None:
            grad_NW = (q_NW - p_NW).sign_()
            scale_N = scale_N - g_l1_N * torch.linalg.vecdot(q_NW, grad_NW)
            grad_NW *= g_l1_N[:, None]
        else:
            grad_NW = torch.zeros_like(q_NW)
        if g_ce_N is not None:
            scale_N = scale_N + g_ce_N * known_N
        if g_soft_N is not None:
            scale_N = scale_N + g_soft_N * mass_N
        grad_NW += scale_N[:, None]
        grad_NW *= q_NW
        if g_soft_N is not None:
            grad_NW.addcmul_(p_NW, g_soft_N[:, None].to(p_NW.dtype), value=-1)
        if g_ce_N is not None:
            grad_NW.scatter_add_(-1, label_N.clamp_min(0)[:, None], -(g_ce_N * known_N)[:, None])
        return grad_NW, None, None, None
