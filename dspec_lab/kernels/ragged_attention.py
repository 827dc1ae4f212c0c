"""Attention of a flattened verification row: each token over the part of its request's cache that its marker names."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspec_lab.kernels.markers import OWNER, PLACE, check_markers, visible


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """Markers of one batch with what every layer needs of them; made once a round by `attention_plan`."""

    marker_NP: Int[Tensor, "N P"]  # see markers.py
    slots_B: Int[Tensor, " B"]  # slot of the pool that holds place 0 of request b
    starts_B: Int[Tensor, " B"]  # first row of request b
    counts_B: Int[Tensor, " B"]  # its rows
    ends_B: Int[Tensor, " B"]  # one past the last place any of its rows sees
    max_rows: int
    max_end: int


def attention_plan(
    marker_NP: Int[Tensor, "N P"], slots_B: Int[Tensor, " B"], *, pool_slots: int, device: torch.device | str
) -> AttentionPlan:
    """Check the markers and the room of each request in a pool of `pool_slots` slots, and put all on `device`."""
    requests = slots_B.shape[0]
    check_markers(marker_NP, requests)
    marker_NP, slots_B = marker_NP.cpu(), slots_B.cpu()
    counts_B = (marker_NP[:, OWNER, None] == torch.arange(requests)).sum(0)
    starts_B = counts_B.cumsum(0) - counts_B
    ends = [0] * requests
    for owner, place in marker_NP[:, [OWNER, PLACE]].tolist():
        if owner >= 0:
            ends[owner] = max(ends[owner], place + 1)
    for b, (slot, end) in enumerate(zip(slots_B.tolist(), ends, strict=True)):
        if slot < 0 or slot + end > pool_slots:
            raise ValueError(f"request {b}: {end} places from slot {slot} on leave the pool of {pool_slots} slots")
    return AttentionPlan(
        marker_NP=marker_NP.to(device),
        slots_B=slots_B.to(device),
        starts_B=starts_B.to(device),
        counts_B=counts_B.to(device),
        ends_B=torch.tensor(ends, dtype=torch.int64).to(device),
        max_rows=max(counts_B.tolist(), default=0),
        max_end=max(ends, default=0),
    )


def ragged_attention(
    query_NHE: Float[Tensor, "N H E"],
    keys_SKE: Float[Tensor, "S K E"],
    values_SKE: Float[Tensor, "S K E"],
    plan: AttentionPlan,
    *,
    scale: float,
) -> Float[Tensor, "N H E"]:
    """softmax(scale q k^T) v over the places each row sees, in one pool of keys and values for all requests.

    The rows' own keys and values are in the pool already. Head h reads key/value head h // (H / K). fp32 inside, output
    in the query's dtype, 0 for filler rows. A place that no row of a request sees may hold anything, NaN included.
    Nothing of one request is read for another, so each request's result is the same bits whatever its neighbours are.
    """
    H, K = query_NHE.shape[1], keys_SKE.shape[1]
    out_NHE = torch.zeros_like(query_NHE)
    spans = zip(*(x.tolist() for x in (plan.starts_B, plan.counts_B, plan.slots_B, plan.ends_B)), strict=True)
    for start, count, slot, end in spans:
        if count == 0:
            continue
        rows, places = slice(start, start + count), slice(slot, slot + end)
        seen_NS = visible(plan.marker_NP[rows], end)
        values_KSE = values_SKE[places].float().transpose(0, 1)
        values_KSE = values_KSE.masked_fill(~seen_NS.any(0)[:, None], 0.0)
        query_KGNE = query_NHE[rows].float().unflatten(1, (K, H // K)).permute(1, 2, 0, 3)
        scores_KGNS = scale * query_KGNE @ keys_SKE[places].float().permute(1, 2, 0).unsqueeze(1)
        weights_KGNS = torch.softmax(scores_KGNS.masked_fill(~seen_NS, float("-inf")), dim=-1)
        mixed_KGNE = weights_KGNS @ values_KSE.unsqueeze(1)
        out_NHE[rows] = mixed_KGNE.permute(2, 0, 1, 3).flatten(1, 2).to(out_NHE.dtype)
    return out_NHE
