"""Rollback of a tree round: keep the accepted path's keys and values, on consecutive slots, and forget the rest."""

from __future__ import annotations

from jaxtyping import Int, Shaped
from torch import Tensor


def check_kept(
    slots: int, first_slots_B: Int[Tensor, " B"], kept_BJ: Int[Tensor, "B J"], num_kept_B: Int[Tensor, " B"]
) -> None:
    """Raise `ValueError` unless the kept rows of each request ascend, fit J and lie inside a pool of `slots` slots."""
    J = kept_BJ.shape[1]
    counts = zip(first_slots_B.tolist(), kept_BJ.tolist(), num_kept_B.tolist(), strict=True)
    for b, (first, kept, count) in enumerate(counts):
        if not 0 <= count <= J:
            raise ValueError(f"request {b}: between 0 and {J} rows can be kept, got {count}")
        rows = kept[:count]
        if any(row < 0 for row in rows) or any(y <= x for x, y in zip(rows, rows[1:], strict=False)):
            raise ValueError(f"request {b}: kept rows must ascend from 0 or more, got {rows}")
        if first < 0 or (rows and first + rows[-1] >= slots):
            raise ValueError(f"request {b}: rows {rows} from slot {first} on leave the pool of {slots} slots")


def compact_kv(
    keys_LSKE: Shaped[Tensor, "L S K E"],
    values_LSKE: Shaped[Tensor, "L S K E"],
    first_slots_B: Int[Tensor, " B"],
    kept_BJ: Int[Tensor, "B J"],
    num_kept_B: Int[Tensor, " B"],
) -> None:
    """Slot first + i takes keys and values of slot first + kept[i], for i < num_kept, in place, every layer and head.

    Request b's verified rows (anchor first, then its drafts) were written from slot `first_slots_B[b]` on. `kept_BJ`
    names the rows of the accepted path in ascending order; what stands from `num_kept_B[b]` on is ignored. Regions of
    different requests must not overlap. Slots behind the kept ones hold leftovers that no marker may reach. The bits of
    any dtype are moved unchanged. A rotary key keeps the position it was made with, so the i-th kept row must be the
    one at depth i. Any strides will do, also those of a view.
    """
    check_kept(keys_LSKE.shape[1], first_slots_B, kept_BJ, num_kept_B)
    for first, kept_J, count in zip(first_slots_B.tolist(), kept_BJ, num_kept_B.tolist(), strict=True):
        source_J = first + kept_J[:count].long()
        # advanced indexing copies, so reading and writing the same region is safe
        keys_LSKE[:, first : first + count] = keys_LSKE[:, source_J]
        values_LSKE[:, first : first + count] = values_LSKE[:, source_J]
