"""Training losses of the drafters that propose in a chain (EAGLE-3, MTP) and of Medusa's heads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from dspec_lab.drafters.chain_model import ChainDraftModel
from dspec_lab.drafters.medusa_model import MedusaDraftModel
from dspec_lab.training.anchors import Mask
from dspec_lab.training.losses import DENOMINATOR_FLOOR, LossReport, Ratio, pooled, spread_rows
from dspec_lab.training.terms import ROWS_PER_CHUNK, model_row_terms


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
    for step, hidden_BTD in enumerate(model.train_steps(features_BTF, input_ids_BT, num_steps)):
        batch_N, at_N = masks_SBT[step].nonzero(as_tuple=True)
        teacher_N = at_N + 1 + step
        terms = model_row_terms(
            model,
            model.before_head(hidden_BTD[batch_N, at_N]),
            None,
            last_hidden_BTD[batch_N, teacher_N],
            torch.zeros_like(at_N),
            teacher_lse_N=None if teacher_lse_BT is None else teacher_lse_BT[batch_N, teacher_N],
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
    return LossReport(total=total, metrics=metrics)


def ttt_position_masks(loss_mask_BT: Mask, lengths_B: Int[Tensor, " B"], num_steps: int) -> Tensor:
    """Which positions count at each step, bool [steps, B, T]: the mask less each row's last real token, moved left."""
    mask_BT = loss_mask_BT.bool().clone()
    mask_BT[torch.arange(mask_BT.shape[0], device=mask_BT.device), lengths_B - 1] = False
    moved = [F.pad(mask_BT[:, step:], (0, min(step, mask_BT.shape[1]))) for step in range(num_steps)]
    return torch.stack(moved)


def medusa_loss(
    model: MedusaDraftModel,
    loss_mask_BT: Mask,
    last_hidden_BTD: Float[Tensor, "B T D"],
    *,
    head_decay: float = 0.8,
    teacher_lse_BT: Float[Tensor, "B T"] | None = None,
    rows_per_chunk: int = ROWS_PER_CHUNK,
) -> LossReport:
    """sum_k decay^k mean(-sum_v p log q): head k at position i against the target's law after token i + 1 + k.

    A position counts for head k where the loss mask is 1 at i + 1 .. i + 2 + k, the tokens drafted up to then.

    Ref: Medusa (arXiv:2401.10774), section 3.2 (soft labels in place of the text's tokens).
    """
    mask_BT = loss_mask_BT.bool()
    total, metrics = last_hidden_BTD.new_zeros((), dtype=torch.float32), {}
    length = mask_BT.shape[1]
    alive_BT = F.pad(mask_BT[:, 1:], (0, 1))
    first_BT, hits, accepts = None, [], []
    for head in range(min(model.arch.medusa_num_heads, length - 2)):
        alive_BT = alive_BT & F.pad(mask_BT[:, head + 2 :], (0, head + 2))
        first_BT = alive_BT if first_BT is None else first_BT
        batch_N, at_N = alive_BT.nonzero(as_tuple=True)
        teacher_N = at_N + 1 + head
        block = model.medusa_heads[head]
        terms = model_row_terms(
            model,
            block(last_hidden_BTD[batch_N, at_N].to(model.activation_dtype)),
            None,
            last_hidden_BTD[batch_N, teacher_N],
            torch.zeros_like(at_N),
            teacher_lse_N=None if teacher_lse_BT is None else teacher_lse_BT[batch_N, teacher_N],
            rows_per_chunk=rows_per_chunk,
        )
        count = alive_BT.sum()
        loss = terms.soft_cross_entropy_N.sum() / (count + DENOMINATOR_FLOOR)
        total = total + head_decay**head * loss
        metrics[f"loss@{head}"] = Ratio(float(loss.detach()), 1.0)
        metrics[f"accuracy@{head}"] = pooled(terms.greedy_hit_N.sum(), count)
        metrics[f"accept_rate@{head}"] = pooled(terms.accept_rate_N.sum(), count)
        hits.append(spread_rows(terms.greedy_hit_N.float(), alive_BT))
        accepts.append(spread_rows(terms.accept_rate_N, alive_BT))
    if first_BT is None:
        raise ValueError(f"sequences of {length} tokens are too short for a Medusa head, which looks two ahead")
    for name, values in (("tau_greedy", hits), ("tau_probabilistic", accepts)):
        tau_BT = 1 + torch.stack(values).cumprod(0).sum(0)
        metrics[name] = pooled(tau_BT[first_BT].sum(), first_BT.sum())
    return LossReport(total=total, metrics=metrics)
