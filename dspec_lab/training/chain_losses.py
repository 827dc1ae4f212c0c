"""Training losses of the drafters that propose in a chain (EAGLE-3, MTP) and of Medusa's heads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dspec_lab.drafters.chain_model import ChainDraftModel
from dspec_lab.drafters.medusa_model import MedusaDraftModel
from dspec_lab.training.anchors import Mask
from dspec_lab.training.losses import DENOMINATOR_FLOOR, LossReport, Ratio, pooled, spread_rows
from dspec_lab.training.teacher import Teacher
from dspec_lab.training.terms import ROWS_PER_CHUNK, model_row_terms
from dspec_lab.training.vocabulary_sample import VocabularySample


def ttt_loss(
    model: ChainDraftModel,
    features_BTF: Float[Tensor, "B T F"],
    input_ids_BT: Int[Tensor, "B T"],
    loss_mask_BT: Mask,
    last_hidden_BTD: Float[Tensor, "B T D"],
    lengths_B: Int[Tensor, " B"],
    *,
    num_steps: int | None = None,
    teacher_lse_BT: Float[Tensor, "B T"] | None = None,
    vocabulary: VocabularySample | None = None,
    rows_per_chunk: int = ROWS_PER_CHUNK,
) -> LossReport:
    """sum_s decay^s mean(-sum_v p log q) over the steps of training-time test; EAGLE-3 and MTP.

    At step s position i is compared with the target's law after token i + 1 + s, and counts where the loss mask (less
    the last real token of each row) is 1 at i + s. The mean divides by B times T, padding included.

    Ref: EAGLE-3 (arXiv:2503.01840), section 3.2.
    """
    num_steps = num_steps or model.arch.ttt_length
    masks_SBT = ttt_position_masks(loss_mask_BT, lengths_B, num_steps)
    batch, length = input_ids_BT.shape
    total, metrics = last_hidden_BTD.new_zeros((), dtype=torch.float32), {}
    hits, accepts = [], []
    teacher = Teacher(model, last_hidden_BTD, teacher_lse_BT, vocabulary)
    step_N, batch_N, at_N = masks_SBT.nonzero(as_tuple=True)
    teacher.prepare(batch_N * length + at_N + 1 + step_N)
    later_BN, place_BT = gathered_rows(masks_SBT[1:].any(0))
    for step, hidden_BXD in enumerate(model.train_steps(features_BTF, input_ids_BT, num_steps, later_BN)):
        batch_N, at_N = masks_SBT[step].nonzero(as_tuple=True)
        terms = model_row_terms(
            model,
            model.before_head(hidden_BXD[batch_N, place_BT[batch_N, at_N] if step else at_N]),
            None,
            teacher,
            batch_N * length + at_N + 1 + step,
            torch.zeros_like(at_N),
            rows_per_chunk=rows_per_chunk,
        )
        step_loss = terms.soft_cross_entropy_N.sum() / (batch * length)
        total = total + model.arch.step_loss_decay**step * step_loss
        metrics[f"loss@{step}"] = Ratio(float(step_loss.detach()), 1.0)
        metrics[f"accuracy@{step}"] = pooled(terms.greedy_hit_N.sum(), masks_SBT[step].sum())
        metrics[f"accept_rate@{step}"] = pooled(terms.accept_rate_N.sum(), masks_SBT[step].sum())
        hits.append(spread_rows(terms.greedy_hit_N.float(), masks_SBT[step]))
        accepts.append(spread_rows(terms.accept_rate_N, masks_SBT[step]))
    first_BT = masks_SBT[0]
    for name, values in (("tau_greedy", hits), ("tau_probabilistic", accepts)):
        tau_BT = 1 + torch.stack(values).cumprod(0).sum(0)
        metrics[name] = pooled(tau_BT[first_BT].sum(), first_BT.sum())
    return LossReport(total=total, metrics=metrics, weight=float(batch * length))


def ttt_position_masks(loss_mask_BT: Mask, lengths_B: Int[Tensor, " B"], num_steps: int) -> Tensor:
    """Which positions count at each step, bool [steps, B, T]: the mask less each row's last real token, moved left."""
    mask_BT = loss_mask_BT.bool().clone()
    mask_BT[torch.arange(mask_BT.shape[0], device=mask_BT.device), lengths_B - 1] = False
    moved = [F.pad(mask_BT[:, step:], (0, min(step, mask_BT.shape[1]))) for step in range(num_steps)]
    return torch.stack(moved)


def gathered_rows(mask_BT: Bool[Tensor, "B T"]) -> tuple[Tensor, Tensor]:
    """(positions [B, N] where the mask is 1, as many as the fullest row has, at least one; each position's place in N).

    Rows with fewer are filled with their last position; places of positions that are not chosen carry no meaning.
    """
    count_B1 = mask_BT.sum(1, keepdim=True)
    place_BT = mask_BT.cumsum(1) - 1
    wide_BT = (~mask_BT).long().argsort(dim=1, stable=True)
    column_N = torch.arange(max(int(count_B1.max()), 1), device=mask_BT.device)
    return wide_BT.gather(1, column_N.minimum((count_B1 - 1).clamp_min(0))), place_BT


def medusa_loss(
    model: MedusaDraftModel,
    loss_mask_BT: Mask,
    last_hidden_BTD: Float[Tensor, "B T D"],
    *,
    head_decay: float = 0.8,
    teacher_lse_BT: Float[Tensor, "B T"] | None = None,
    vocabulary: VocabularySample | None = None,
    rows_per_chunk: int = ROWS_PER_CHUNK,
) -> LossReport:
    """sum_k decay^k sum(-sum_v p log q) / n: head k at position i against the target's law after token i + 1 + k.

    A position counts for head k where the loss mask is 1 at i + 1 .. i + 2 + k, the tokens drafted up to then; n is
    the number of positions that count for the first head.

    Ref: Medusa (arXiv:2401.10774), section 3.2 (soft labels in place of the text's tokens).
    """
    masks_SBT = medusa_position_masks(loss_mask_BT, model.arch.medusa_num_heads)
    length = loss_mask_BT.shape[1]
    first_BT = masks_SBT[0]
    total, metrics = last_hidden_BTD.new_zeros((), dtype=torch.float32), {}
    hits, accepts = [], []
    shared_den = float(first_BT.sum()) + DENOMINATOR_FLOOR
    teacher = Teacher(model, last_hidden_BTD, teacher_lse_BT, vocabulary)
    head_N, batch_N, at_N = masks_SBT.nonzero(as_tuple=True)
    teacher.prepare(batch_N * length + at_N + 1 + head_N)
    for head, alive_BT in enumerate(masks_SBT):
        batch_N, at_N = alive_BT.nonzero(as_tuple=True)
        terms = model_row_terms(
            model,
            model.medusa_heads[head](last_hidden_BTD[batch_N, at_N].to(model.activation_dtype)),
            None,
            teacher,
            batch_N * length + at_N + 1 + head,
            torch.zeros_like(at_N),
            rows_per_chunk=rows_per_chunk,
        )
        count = alive_BT.sum()
        loss = terms.soft_cross_entropy_N.sum() / shared_den
        total = total + head_decay**head * loss
        metrics[f"loss@{head}"] = Ratio(float(loss.detach()), 1.0)
        metrics[f"accuracy@{head}"] = pooled(terms.greedy_hit_N.sum(), count)
        metrics[f"accept_rate@{head}"] = pooled(terms.accept_rate_N.sum(), count)
        hits.append(spread_rows(terms.greedy_hit_N.float(), alive_BT))
        accepts.append(spread_rows(terms.accept_rate_N, alive_BT))
    for name, values in (("tau_greedy", hits), ("tau_probabilistic", accepts)):
        tau_BT = 1 + torch.stack(values).cumprod(0).sum(0)
        metrics[name] = pooled(tau_BT[first_BT].sum(), first_BT.sum())
    return LossReport(total=total, metrics=metrics, weight=shared_den)


def medusa_position_masks(loss_mask_BT: Mask, num_heads: int) -> Bool[Tensor, "S B T"]:
    """Which positions count for each head (at most as many heads as the sequences can supervise)."""
    mask_BT = loss_mask_BT.bool()
    length = mask_BT.shape[1]
    if length < 3:
        raise ValueError(f"sequences of {length} tokens are too short for a Medusa head, which looks two ahead")
    alive_BT = F.pad(mask_BT[:, 1:], (0, 1))
    masks = []
    for head in range(min(num_heads, length - 2)):
        alive_BT = alive_BT & F.pad(mask_BT[:, head + 2 :], (0, head + 2))
        masks.append(alive_BT)
    return torch.stack(masks)
