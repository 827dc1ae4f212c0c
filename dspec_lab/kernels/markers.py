"""The marker tensor: which token of a flattened verification row sees which, for many requests and trees at once.

`marker_NP` is int64 [N, 5], one line a token: the fields of `rows.RowMarkers`, in this order and with its rule.

| column | meaning |
|---|---|
| 0 owner | index of the request; -1 for filler rows, which stand at the end, see nothing and come out as 0 |
| 1 place | where the token's own key and value lie in its request's cache; nothing behind it is ever seen |
| 2 first, 3 prefix | the token sees the places first .. prefix - 1 |
| 4 ancestors | and place prefix + i for each bit i (0..62) that is set |

Nothing else is seen, wherever it stands in the row: no padding takes part. The rows of a request are contiguous and
requests ascend. `tree_markers` puts the anchor into the prefix of its drafts, so 63 bits serve 63 drafts a request;
draft i (from 1) has bit i - 1, and each draft carries its own bit and those of the drafts on its way to the anchor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dspec_lab.kernels.rows import RowMarkers

OWNER, PLACE, FIRST, PREFIX, ANCESTORS = range(5)
MAX_DRAFTS = 63


def chain_markers(gammas: Sequence[int], context_lens: Sequence[int]) -> Int[Tensor, "N P"]:
    """Markers of one chain a request: the anchor at place `context_lens[b]`, then `gammas[b]` drafts in a line."""
    lines = []
    for b, (gamma, context) in enumerate(zip(gammas, context_lens, strict=True)):
        _check_count(b, "drafts", gamma)
        _check_count(b, "cached tokens", context)
        lines += [(b, place, 0, place + 1, 0) for place in range(context, context + gamma + 1)]
    return torch.tensor(lines, dtype=torch.int64).reshape(-1, 5)


def tree_markers(
    parents: Sequence[Sequence[int]], context_lens: Sequence[int]
) -> tuple[Int[Tensor, "N P"], Int[Tensor, " N"]]:
    """(markers, rotary positions) of one tree a request: the anchor, then the drafts in the order given.

    `parents[b][i - 1]` is the parent of draft i of request b, 0 for the anchor, always smaller than i. Draft i lies at
    place context + i; its position is context + its depth. `context_lens[b]` counts the cached tokens, the anchor not
    among them.
    """
    lines, positions = [], []
    for b, (tree, context) in enumerate(zip(parents, context_lens, strict=True)):
        _check_count(b, "cached tokens", context)
        if len(tree) > MAX_DRAFTS:
            raise ValueError(f"request {b} has {len(tree)} drafts; a marker holds at most {MAX_DRAFTS}")
        depth, ancestors = [0], [0]
        lines.append((b, context, 0, context + 1, 0))
        for draft, parent in enumerate(tree, start=1):
            if not 0 <= parent < draft:
                raise ValueError(f"request {b}: the parent of draft {draft} must lie in 0..{draft - 1}, got {parent}")
            depth.append(depth[parent] + 1)
            ancestors.append(ancestors[parent] | 1 << (draft - 1))
            lines.append((b, context + draft, 0, context + 1, ancestors[draft]))
        positions += [context + steps for steps in depth]
    return torch.tensor(lines, dtype=torch.int64).reshape(-1, 5), torch.tensor(positions, dtype=torch.int64)


def with_filler(marker_NP: Int[Tensor, "N P"], rows: int) -> Int[Tensor, "rows P"]:
    """The same markers with filler at the end, up to `rows` lines (a fixed size, for captured graphs)."""
    if rows < marker_NP.shape[0]:
        raise ValueError(f"{marker_NP.shape[0]} rows do not fit {rows}")
    filler_NP = marker_NP.new_zeros(rows - marker_NP.shape[0], 5)
    filler_NP[:, OWNER] = -1
    return torch.cat([marker_NP, filler_NP])


def from_row_markers(markers: RowMarkers) -> Int[Tensor, "N P"]:
    """The marker tensor of a `RowMarkers` record."""
    fields = (markers.owner_N, markers.place_N, markers.first_N, markers.prefix_N, markers.ancestors_N)
    return torch.stack(fields, dim=1)


def visible(marker_NP: Int[Tensor, "N P"], end: int) -> Bool[Tensor, "N S"]:
    """Whether row n sees place s of its own request's cache, s < `end`: the rule above written out."""
    place_S = torch.arange(end, device=marker_NP.device)
    offset_NS = place_S - marker_NP[:, PREFIX, None]
    bit_NS = (marker_NP[:, ANCESTORS, None] >> offset_NS.clamp(0, 62)) & 1 == 1
    in_prefix_NS = (place_S >= marker_NP[:, FIRST, None]) & (offset_NS < 0)
    return in_prefix_NS | ((offset_NS >= 0) & (offset_NS < 63) & bit_NS)


def check_markers(marker_NP: Int[Tensor, "N P"], requests: int) -> None:
    """Raise `ValueError` for a marker tensor that breaks the format above. Copies it to the host."""
    if marker_NP.ndim != 2 or marker_NP.shape[1] != 5 or marker_NP.dtype != torch.int64:
        raise ValueError(f"markers must be int64 [N, 5], got {marker_NP.dtype} {tuple(marker_NP.shape)}")
    last = 0
    for n, (owner, place, first, prefix, ancestors) in enumerate(marker_NP.tolist()):
        if owner == -1:
            last = requests
            continue
        if not last <= owner < requests:
            raise ValueError(f"row {n}: owners must ascend within 0..{requests - 1}, filler last; got {owner}")
        if ancestors < 0:
            raise ValueError(f"row {n}: ancestors must use bits 0..62 only, got {ancestors:#x}")
        if not 0 <= first < prefix:
            raise ValueError(f"row {n}: first and prefix must satisfy 0 <= first < prefix, got {first} and {prefix}")
        if max(prefix, prefix + ancestors.bit_length()) != place + 1:
            raise ValueError(
                f"row {n}: the last place it sees must be its own, {place}; got prefix {prefix}, {ancestors:#x}"
            )
        last = owner


def _check_count(request: int, what: str, count: int) -> None:
    if count < 0:
        raise ValueError(f"request {request}: the number of {what} must be 0 or more, got {count}")
