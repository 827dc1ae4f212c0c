"""Total variation between drafter and target per row, from logits; the loss that trains a drafter for acceptance."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspec_lab.kernels.faults import Fault, encode


def tv_loss(
    draft_NV: Float[Tensor, "N V"], target_NV: Float[Tensor, "N V"]
) -> tuple[Float[Tensor, " N"], Int[Tensor, " N"]]:
    """(TV, fault) of each row: 0.5 sum_v |softmax(draft) - softmax(target)|, in [0, 1]; NaN for a faulty row.

    The gradient reaches the draft logits only. DSpark's L_tv sums |p_d - p_t| without the half, so it is twice this;
    the confidence label c* is one minus this. Where q = p to the last bit the gradient takes sign 0; where they differ
    by rounding alone its sign is noise, as in any implementation.
    Ref: DSpark (arXiv:2607.05147), eq. 8 and L_tv.
    """
    target_NV = target_NV.detach()
    # the maximum of a row is NaN if any entry is, +inf if any entry is, -inf if all are
    good_q_N = torch.isfinite(draft_NV.detach().amax(-1))
    good_p_N = torch.isfinite(target_NV.amax(-1))
    fault_N = torch.where(good_q_N, 0, encode(0, Fault.DRAFT_ROW))
    fault_N = torch.where(good_p_N, fault_N, encode(0, Fault.TARGET_ROW))
    q_NV = torch.softmax(_wide(draft_NV), dim=-1)
    p_NV = torch.softmax(_wide(target_NV), dim=-1)
    loss_N = 0.5 * (q_NV - p_NV).abs().sum(-1)
    return torch.where(fault_N == 0, loss_N, float("nan")), fault_N


def _wide(rows_NV: Tensor) -> Tensor:
    return rows_NV if rows_NV.dtype == torch.float64 else rows_NV.float()
