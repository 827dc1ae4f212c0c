"""Admission of the scheduler: which drafted tokens are verified when the batch has room for K of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspec_lab.kernels.faults import Fault, encode


class Admission(NamedTuple):
    """How many drafts of each request are verified. With a fault in any request no count means anything."""

    num_admitted_B: Int[Tensor, " B"]
    fault_B: Int[Tensor, " B"]  # see faults.py


def admit_top_k(survival_BG: Float[Tensor, "B G"], lens_B: Int[Tensor, " B"], budget: int) -> Admission:
    """Prefix lengths that hold the `budget` largest survival products a_{r,j} of all requests.

    Survival never increases along a request, so the K largest entries form prefixes. Order, exact to the last tie:
    larger survival (in fp32), then the earlier request, then the earlier position. Entries from `lens_B[b]` on do not
    exist. A survival outside [0, 1] or above its predecessor is a fault.
    Ref: DSpark (arXiv:2607.05147), Algorithm 1, production form.
    """
    if budget < 0:
        raise ValueError(f"budget must be 0 or more, got {budget}")
    B, G = survival_BG.shape
    survival_BG = survival_BG.float()
    position_G = torch.arange(G, device=survival_BG.device)
    live_BG = position_G < lens_B.unsqueeze(1)
    before_BG = torch.cat([torch.ones_like(survival_BG[:, :1]), survival_BG[:, :-1]], dim=1)[:, :G]
    falls_BG = (survival_BG >= 0) & (survival_BG <= before_BG)
    fault_B = torch.zeros(B, dtype=torch.int64, device=survival_BG.device)
    for b, length in enumerate(lens_B.tolist()):
        bad = (live_BG[b] & ~falls_BG[b]).nonzero()
        if not 0 <= length <= G:
            fault_B[b] = encode(0, Fault.LENGTH)
        elif bad.numel():
            fault_B[b] = encode(int(bad[0]), Fault.SURVIVAL)
    # a stable sort keeps equal entries in reading order: request first, then position
    flat_N = survival_BG.masked_fill(~live_BG, -1.0).flatten()
    chosen_N = flat_N.sort(descending=True, stable=True).indices[:budget]
    admitted_N = torch.zeros_like(flat_N, dtype=torch.int64)
    admitted_N[chosen_N] = 1
    return Admission((admitted_N.reshape(B, G) * live_BG).sum(-1), fault_B)
