"""From logits to the law that tokens are drawn from: temperature, top-k, top-p, greedy."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from dspec_lab.config import SamplingConfig

# rows are first searched for their nucleus among this many of the largest entries
NUCLEUS_SEARCH = 1024


class NonFiniteLogitsError(ArithmeticError):
    """A row of logits holds NaN or +inf, or nothing but -inf. No token is ever committed from such a row."""


def greedy_ids(logits_NV: Float[Tensor, "N V"], *, what: str = "target") -> list[int]:
    """The first largest entry of each row. Raises `NonFiniteLogitsError` naming the row."""
    if logits_NV.device.type == "cpu" and logits_NV.dtype in (torch.float32, torch.float64):
        # the first largest entry, or the first NaN, as torch has it; on few long rows several times as fast
        rows = logits_NV.detach().numpy()
        ids = rows.argmax(-1).tolist()
        if all(math.isfinite(row[token]) for row, token in zip(rows, ids, strict=True)):
            return ids
    else:
        ids = logits_NV.argmax(dim=-1).tolist()
    top_N = logits_NV.gather(-1, torch.tensor(ids, device=logits_NV.device).unsqueeze(-1)).squeeze(-1)
    _check_rows(top_N, what)
    return ids


def law(logits_NV: Float[Tensor, "N V"], sampling: SamplingConfig, *, what: str = "target") -> Float[Tensor, "N V"]:
    """Probabilities [N, V] after temperature, top-k and top-p, in that order; rows sum to 1, fp32 or wider.

    At temperature 0 each row is one-hot on its first largest logit. Ties at the top-k or top-p border are broken
    towards the lower token id, so that exactly k tokens (or the smallest nucleus) stay. float64 logits stay float64.
    Raises `NonFiniteLogitsError` for a row with NaN, +inf, or only -inf.
    """
    logits_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    if sampling.greedy:
        ids = greedy_ids(logits_NV, what=what)
        probs_NV = torch.zeros_like(logits_NV)
        return probs_NV.scatter_(-1, torch.tensor(ids, device=logits_NV.device).unsqueeze(-1), 1.0)
    scaled_NV = logits_NV if sampling.temperature == 1 else logits_NV / sampling.temperature
    vocab = scaled_NV.shape[-1]
    if 0 < sampling.top_k < vocab:
        _check_rows(logits_NV.amax(dim=-1), what)
        scaled_NV = _keep_top_k(scaled_NV, sampling.top_k)
    probs_NV = torch.softmax(scaled_NV, dim=-1)
    if not _finite(probs_NV[:, 0]):
        # NaN, +inf or only -inf makes every probability of the row NaN, so one entry tells; now name the row
        _check_rows(logits_NV.amax(dim=-1), what)
        _check_rows(probs_NV[:, 0], what)
    if sampling.top_p < 1:
        probs_NV = _keep_nucleus(probs_NV, sampling.top_p)
    return probs_NV


def _check_rows(top_N: Tensor, what: str) -> None:
    # the maximum of a row is NaN if any entry is, +inf if any entry is, -inf if all are
    if not _finite(top_N):
        row, top = next((row, top) for row, top in enumerate(top_N.tolist()) if not math.isfinite(top))
        raise NonFiniteLogitsError(f"{what} logits of row {row} are not finite (largest: {top})")


def _finite(values_N: Tensor) -> bool:
    # a few numbers: cheaper in Python than as tensor ops
    return all(map(math.isfinite, values_N.tolist()))


def _keep_top_k(scaled_NV: Tensor, k: int) -> Tensor:
    # a stable descending sort puts equal entries in order of their id
    border_N1 = scaled_NV.topk(k, dim=-1).values[:, -1:]
    above_NV = scaled_NV > border_N1
    at_NV = scaled_NV == border_N1
    room_N1 = k - above_NV.sum(-1, keepdim=True)
    keep_NV = above_NV | (at_NV & (at_NV.cumsum(-1) <= room_N1))
    return scaled_NV.masked_fill(~keep_NV, float("-inf"))


def _keep_nucleus(probs_NV: Tensor, top_p: float) -> Tensor:
    vocab = probs_NV.shape[-1]
    width = min(NUCLEUS_SEARCH, vocab)
    top_NV = probs_NV.topk(width, dim=-1).values
    if width < vocab and bool((top_NV.double().sum(-1) < top_p).any()):
        top_NV = probs_NV.sort(dim=-1, descending=True).values
    # the token at rank r stays when the mass before it is still below top_p; the first always stays
    before_NV = top_NV.double().cumsum(-1) - top_NV.double()
    count_N1 = (before_NV < top_p).sum(-1, keepdim=True).clamp_min(1)
    border_N1 = top_NV.gather(-1, count_N1 - 1)
    above_NV = probs_NV > border_N1
    at_NV = probs_NV == border_N1
    keep_NV = above_NV | (at_NV & (at_NV.cumsum(-1) <= count_N1 - above_NV.sum(-1, keepdim=True)))
    kept_NV = torch.where(keep_NV, probs_NV, torch.zeros_like(probs_NV))
    return kept_NV / kept_NV.sum(-1, keepdim=True)


def entropy_bits(logits_NV: Float[Tensor, "N V"]) -> Float[Tensor, " N"]:
    """Entropy of softmax(logits) per row, in bits: -sum p log2 p. A tenth of ten equal tokens gives 3.32."""
    logp_NV = torch.log_softmax(logits_NV.double(), dim=-1)
    p_NV = logp_NV.exp()
    return -(p_NV * torch.where(p_NV > 0, logp_NV, torch.zeros_like(logp_NV))).sum(-1) / torch.log(
        torch.tensor(2.0, dtype=torch.float64)
    )
