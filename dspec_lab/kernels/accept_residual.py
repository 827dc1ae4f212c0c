"""Verify many requests at once: accepted prefix and extra token of each, from given random numbers.

The law is that of `core/rejection.py`, applied request by request to rows of two matrices. Request b has
`draft_lens_B[b]` drafts; its target rows start at `target_starts_B[b]` (one more row than drafts) and its draft rows at
`draft_starts_B[b]`. Nothing is padded and nothing of one request is read for another.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dspec_lab.config import SamplingConfig
from dspec_lab.core.rejection import accept_probs, residual_probs
from dspec_lab.core.sampling import law
from dspec_lab.core.streams import inverse_cdf
from dspec_lab.kernels.faults import Fault, encode, legal_temperature

# rows of probabilities must sum to 1 within this; bf16 rows over a large vocabulary miss it by about half
MASS_TOLERANCE = 0.02


class AcceptResult(NamedTuple):
    """Outcome of a ragged batch. A faulty request has `num_accepted` 0 and `next_ids` -1: nothing may be committed."""

    num_accepted_B: Int[Tensor, " B"]
    next_ids_B: Int[Tensor, " B"]
    fault_B: Int[Tensor, " B"]  # see faults.py


def accept_residual_rows(
    target_NV: Float[Tensor, "rows V"],
    draft_NV: Float[Tensor, "drafts V"] | None,
    draft_ids_BG: Int[Tensor, "B G"],
    draft_lens_B: Int[Tensor, " B"],
    accept_u_BG: Float[Tensor, "B G"],
    replacement_u_B: Float[Tensor, " B"],
    bonus_u_B: Float[Tensor, " B"],
    target_starts_B: Int[Tensor, " B"],
    draft_starts_B: Int[Tensor, " B"],
    one_hot_B: Bool[Tensor, " B"] | None,
    temperature_B: Float[Tensor, " B"] | None,
) -> AcceptResult:
    """Accept while u_k < min(1, p_t / p_d), then draw from max(p_t - p_d, 0) or, after the last draft, from p_t.

    Rows are probabilities where `temperature_B` is None, else logits that become softmax(logits / temperature) of both
    models, one-hot at temperature 0. q of a request with `one_hot_B` set (all, where `draft_NV` is None) is one-hot on
    its drafts and its draft rows are never read. The three uniforms come from separate streams.
    Ref: Leviathan et al. 2023 (arXiv:2211.17192), Algorithm 1.
    """
    lens, t_starts, d_starts = draft_lens_B.tolist(), target_starts_B.tolist(), draft_starts_B.tolist()
    G = draft_ids_BG.shape[1]
    outcome = []
    for b, length in enumerate(lens):
        hot = draft_NV is None or (one_hot_B is not None and bool(one_hot_B[b]))
        rows_fit = 0 <= length <= G and 0 <= t_starts[b] and t_starts[b] + length < target_NV.shape[0]
        if length > 0 and not hot:
            rows_fit = rows_fit and 0 <= d_starts[b] and d_starts[b] + length <= draft_NV.shape[0]
        if not rows_fit:
            outcome.append((0, -1, encode(0, Fault.LENGTH)))
            continue
        temperature = None if temperature_B is None else legal_temperature(float(temperature_B[b]))
        if temperature is not None and math.isnan(temperature):
            outcome.append((0, -1, encode(0, Fault.TEMPERATURE)))
            continue
        target_JV = target_NV[t_starts[b] : t_starts[b] + length + 1]
        draft_GV = None if hot else draft_NV[d_starts[b] : d_starts[b] + length]
        uniforms = accept_u_BG[b, :length], float(replacement_u_B[b]), float(bonus_u_B[b])
        outcome.append(_verify_one(target_JV, draft_GV, draft_ids_BG[b, :length], *uniforms, temperature))
    columns = torch.tensor(outcome, dtype=torch.int64, device=target_NV.device).reshape(-1, 3)
    return AcceptResult(*(column.contiguous() for column in columns.unbind(1)))


def _verify_one(
    target_JV: Tensor,
    draft_GV: Tensor | None,
    ids_G: Tensor,
    accept_u_G: Tensor,
    replacement_u: float,
    bonus_u: float,
    temperature: float | None,
) -> tuple[int, int, int]:
    gamma = ids_G.shape[0]
    faults = [encode(j, Fault.TARGET_ROW) for j in _bad_rows(target_JV, temperature)]
    if draft_GV is not None:
        faults += [encode(j, Fault.DRAFT_ROW) for j in _bad_rows(draft_GV, temperature)]
    faults += [encode(j, Fault.TOKEN_ID) for j in _where((ids_G < 0) | (ids_G >= target_JV.shape[1]))]
    faults += [encode(j, Fault.UNIFORM) for j in _where(~((accept_u_G >= 0) & (accept_u_G < 1)))]
    if faults:
        return 0, -1, min(faults)
    target_JV = _as_law(target_JV, temperature)
    if draft_GV is None:
        draft_GV = torch.zeros_like(target_JV[:gamma]).scatter_(-1, ids_G.long().unsqueeze(-1), 1.0)
    else:
        draft_GV = _as_law(draft_GV, temperature)
    accept_G = accept_probs(target_JV[None, :gamma], draft_GV[None], ids_G.long()[None])[0]
    kept = int((accept_u_G < accept_G).long().cumprod(0).sum())
    uniform = replacement_u if kept < gamma else bonus_u
    if not 0 <= uniform < 1:
        return 0, -1, encode(kept, Fault.UNIFORM)
    law_V = target_JV[kept]
    if kept < gamma:
        law_V = residual_probs(target_JV[kept : kept + 1], draft_GV[kept : kept + 1])[0]
    return kept, inverse_cdf(law_V, uniform), 0


def _where(flag_N: Tensor) -> list[int]:
    return flag_N.nonzero().flatten().tolist()


def _bad_rows(rows_NV: Tensor, temperature: float | None) -> list[int]:
    if temperature is not None:
        # the maximum of a row is NaN if any entry is, +inf if any entry is, -inf if all are
        return _where(~torch.isfinite(rows_NV.amax(-1)))
    off_N = (rows_NV.double().sum(-1) - 1).abs()
    return _where(~(off_N < MASS_TOLERANCE) | (rows_NV < 0).any(-1))


def _as_law(rows_NV: Tensor, temperature: float | None) -> Tensor:
    if temperature is not None:
        return law(rows_NV, SamplingConfig(temperature=temperature))
    return rows_NV if rows_NV.dtype == torch.float64 else rows_NV.float()
