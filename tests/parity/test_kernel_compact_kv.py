"""KV compaction: kernel and torch twin against a slot-by-slot copy written out."""

from __future__ import annotations

import pytest
import torch

from dspec_lab.kernels import dispatch

FIRST = torch.tensor([2, 11, 20, 27])
KEPT = torch.tensor([[0, 2, 3, 6], [1, 2, 3, -7], [0, 1, 2, 99], [4, 9, 9, 9]])
COUNT = torch.tensor([4, 3, 3, 0])


def pool(dtype: torch.dtype, transposed: bool) -> torch.Tensor:
    """[L, S, K, E] = [2, 30, 3, 5], plain or seen through a cache that keeps the slot last."""
    flat = torch.arange(2 * 30 * 3 * 5, dtype=torch.float32)
    if transposed:
        return flat.reshape(2, 3, 5, 30).to(dtype).permute(0, 3, 1, 2)
    return flat.reshape(2, 30, 3, 5).to(dtype)


def moved(before: torch.Tensor) -> torch.Tensor:
    after = before.clone()
    for first, kept, count in zip(FIRST.tolist(), KEPT.tolist(), COUNT.tolist(), strict=True):
        for i in range(count):
            after[:, first + i] = before[:, first + kept[i]]
    return after


# 15 elements a row and blocks of 8 leave a partly filled block
@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_kept_rows_move_and_nothing_else_does(kernel_device, dtype, transposed):
    from dspec_kernels.compact_kv import compact_kv as kernel

    before = pool(dtype, transposed)
    for run in ("torch", "triton"):
        keys, values = pool(dtype, transposed), pool(dtype, False) + 1
        other = values.clone()
        if run == "torch":
            dispatch.compact_kv(keys, values, FIRST, KEPT, COUNT)
        else:
            keys, values = keys.to(kernel_device), values.to(kernel_device)
            kernel(keys, values, FIRST.to(kernel_device), KEPT.to(kernel_device), COUNT.to(kernel_device), block=8)
        assert torch.equal(keys.cpu(), moved(before))
        assert torch.equal(values.cpu(), moved(other))
        assert not torch.equal(keys.cpu(), before)


@pytest.mark.parametrize(
    ("kept", "count", "message"),
    [
        ([[2, 1]], [2], r"kept rows must ascend from 0 or more, got \[2, 1\]"),
        ([[1, 1]], [2], r"must ascend"),
        ([[-1, 0]], [2], r"must ascend"),
        ([[0, 1]], [3], r"between 0 and 2 rows can be kept, got 3"),
        ([[0, 5]], [2], r"leave the pool of 30 slots"),
    ],
)
def test_bad_paths_are_refused(kept, count, message):
    keys = pool(torch.float32, False)
    with pytest.raises(ValueError, match=message):
        dispatch.compact_kv(keys, keys.clone(), torch.tensor([25]), torch.tensor(kept), torch.tensor(count))
