"""The draft cache: bounded, appended to, windowed, with scratch that leaves no trace."""

from __future__ import annotations

import pytest
import torch

from dspec_lab.drafters.cache import DraftCache, RowCache

KINDS = pytest.mark.parametrize("kind", [DraftCache, RowCache])


def rows(first, count):
    """Entries whose every number is the position."""
    values = torch.arange(first, first + count, dtype=torch.float32)
    return values[None, None, :, None].expand(1, 2, count, 4)


def append(cache, count):
    first = cache.length
    unseen = cache.make_room(count)
    new = rows(first + unseen, count - unseen)
    for layer in range(2):
        cache.write(layer, 0, new + layer, -new)
    cache.advance(count - unseen)


def positions(cache, extra=0):
    keys, values = cache.read(1, extra)
    assert torch.equal(keys - 1, -values)
    return values[0, 0, :, 0].neg().tolist()


@KINDS
def test_entries_stay_in_order_and_scratch_is_overwritten(kind):
    cache = kind(2, 2, 4, capacity=10, scratch=3)
    append(cache, 4)
    cache.write(1, 0, rows(90, 3) + 1, -rows(90, 3))
    assert positions(cache, 3) == [0, 1, 2, 3, 90, 91, 92]
    assert positions(cache) == [0, 1, 2, 3] and cache.length == 4
    append(cache, 2)
    assert positions(cache) == [0, 1, 2, 3, 4, 5]


@KINDS
@pytest.mark.parametrize("steps", [[1] * 40, [3, 1, 4, 1, 5, 2, 6, 5, 3, 5], [17, 1, 20, 2], [5, 5, 5, 5, 11]])
def test_window_keeps_the_last_entries(steps, kind):
    cache = kind(2, 2, 4, capacity=40, scratch=3, window=5)
    size = cache.cache_bytes
    for step in steps:
        append(cache, step)
        expected = list(range(max(cache.length - 5, 0), cache.length))
        assert positions(cache) == expected
        cache.write(1, 0, rows(90, 3) + 1, -rows(90, 3))
        assert positions(cache, 3) == [*expected, 90, 91, 92]
    # the row ops read whole blocks of 32
    assert cache.cache_bytes == size == 2 * 2 * 2 * (32 if kind is RowCache else 10 + 3) * 4 * 4
    assert cache.length == sum(steps)


@KINDS
def test_bounds_are_errors(kind):
    cache = kind(1, 1, 4, capacity=6, scratch=2)
    with pytest.raises(ValueError, match="7 context tokens exceed the draft cache's capacity 6"):
        cache.make_room(7)
    with pytest.raises(ValueError, match="9 draft cache entries exceed the 8 rows"):
        cache.write(0, 0, torch.zeros(1, 1, 9, 4), torch.zeros(1, 1, 9, 4))
    with pytest.raises(ValueError, match="capacity of at least 1, got 0"):
        kind(1, 1, 4, capacity=0, scratch=2)


def test_the_row_ops_take_one_kind_of_numbers():
    with pytest.raises(ValueError, match="keep fp32 on the CPU, not torch.float64"):
        RowCache(1, 1, 4, capacity=4, scratch=2, dtype=torch.float64)
