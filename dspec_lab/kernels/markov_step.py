"""One step of a sequential head: base logits plus a low-rank bias, and the token drawn from them.

The logits that come back are the ones the token was drawn from: hand them on as q, with the same temperature.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspec_lab.config import SamplingConfig
from dspec_lab.core.sampling import law
from dspec_lab.core.streams import inverse_cdf
from dspec_lab.kernels.faults import Fault, encode, legal_temperature


class StepResult(NamedTuple):
    """Drawn tokens with the law they were drawn from. A faulty request has token -1 and a NaN log-sum-exp."""

    token_ids_B: Int[Tensor, " B"]
    draft_logits_BV: Float[Tensor, "B V"]  # fp32, before the temperature
    logsumexp_B: Float[Tensor, " B"]  # of draft_logits / temperature (of draft_logits at temperature 0)
    fault_B: Int[Tensor, " B"]  # see faults.py


def markov_step(
    base_BV: Float[Tensor, "B V"],
    prev_ids_B: Int[Tensor, " B"],
    w1_VR: Float[Tensor, "V R"],
    w2_VR: Float[Tensor, "V R"],
    temperature_B: Float[Tensor, " B"],
    uniform_B: Float[Tensor, " B"],
) -> StepResult:
    """x_k ~ softmax((U_k + W1[x_{k-1}] W2^T) / temperature), by inverse CDF; the first maximum at temperature 0.

    The [V, V] table W1 W2^T never exists. Ref: DSpark (arXiv:2607.05147), eq. 5.
    """
    V = w1_VR.shape[0]
    known_B = (prev_ids_B >= 0) & (prev_ids_B < V)
    latent_BR = w1_VR[prev_ids_B.clamp(0, V - 1)].float() * known_B.unsqueeze(-1)
    return _step(base_BV, latent_BR, w2_VR, temperature_B, uniform_B, known_B.tolist())


def low_rank_step(
    base_BV: Float[Tensor, "B V"],
    latent_BR: Float[Tensor, "B R"],
    w2_VR: Float[Tensor, "V R"],
    temperature_B: Float[Tensor, " B"],
    uniform_B: Float[Tensor, " B"],
) -> StepResult:
    """`markov_step` with the bias latent W2^T, for heads that compute the latent vector themselves (gated, rnn).

    Ref: DSpark (arXiv:2607.05147), eq. 6: the rnn head's latent is tanh(o).
    """
    return _step(base_BV, latent_BR, w2_VR, temperature_B, uniform_B, [True] * base_BV.shape[0])


def _step(
    base_BV: Tensor, latent_BR: Tensor, w2_VR: Tensor, temperature_B: Tensor, uniform_B: Tensor, known: list[bool]
) -> StepResult:
    logits_BV = base_BV.float() + latent_BR.float() @ w2_VR.float().T
    tokens, faults, lse = [], [], []
    temperatures = map(legal_temperature, temperature_B.tolist())
    for b, (temperature, uniform) in enumerate(zip(temperatures, uniform_B.tolist(), strict=True)):
        fault = _fault(known[b], logits_BV[b], temperature, uniform)
        faults.append(fault)
        if fault:
            tokens.append(-1)
            lse.append(float("nan"))
            continue
        tokens.append(inverse_cdf(law(logits_BV[b : b + 1], SamplingConfig(temperature=temperature))[0], uniform))
        lse.append(float(torch.logsumexp(logits_BV[b] / (temperature or 1.0), dim=-1)))
    device = base_BV.device
    return StepResult(
        token_ids_B=torch.tensor(tokens, dtype=torch.int64, device=device),
        draft_logits_BV=logits_BV,
        logsumexp_B=torch.tensor(lse, dtype=torch.float32, device=device),
        fault_B=torch.tensor(faults, dtype=torch.int64, device=device),
    )


def _fault(known: bool, logits_V: Tensor, temperature: float, uniform: float) -> int:
    if not known:
        return encode(0, Fault.TOKEN_ID)
    if not bool(torch.isfinite(logits_V.max())):
        return encode(0, Fault.DRAFT_ROW)
    if math.isnan(temperature):
        return encode(0, Fault.TEMPERATURE)
    return 0 if 0 <= uniform < 1 else encode(0, Fault.UNIFORM)
