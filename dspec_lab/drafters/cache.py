"""Key/value cache of a drafter's own layers, for one request: bounded, appended to, cut back."""

import torch
from torch import Tensor


class DraftCache:
    """Rotated keys and values of consecutive positions, one pair of buffers a layer.

    Entries past `length` are scratch: a round may write them and read them, and nothing of them stays.
    With a `window` only the last `window` entries are kept, in buffers of twice that size.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        capacity: int,
        scratch: int,
        window: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if capacity < 1 or scratch < 0:
            raise ValueError(f"a draft cache needs a capacity of at least 1, got {capacity} (scratch {scratch})")
        self.capacity = capacity
        self.window = window
        self.length = 0  # committed positions seen so far, dropped ones included
        self._dropped = 0  # positions that left the window
        self._rows = capacity if window is None else min(capacity, 2 * window)  # committed entries there is room for
        shape = (num_layers, 2, 1, num_kv_heads, self._rows + scratch, head_dim)
        self._buffer = torch.empty(shape, dtype=dtype, device=device)

    @property
    def held(self) -> int:
        """Committed entries that are still stored."""
        return self.length - self._dropped

    @property
    def cache_bytes(self) -> int:
        """Memory of the buffers; it does not grow."""
        return self._buffer.nbytes

    def make_room(self, count: int) -> int:
        """Prepare for `count` committed entries; returns how many of them, from the front, no window will ever see.

        These are counted as seen at once and must not be written. Raises `ValueError` beyond the capacity.
        """
        if self.length + count > self.capacity:
            raise ValueError(f"{self.length + count} context tokens exceed the draft cache's capacity {self.capacity}")
        if self.window is None:
            return 0
        unseen = max(count - self.window, 0)
        count -= unseen
        if unseen:
            self.length += unseen
            self._dropped = self.length
        elif self.held + count > self._rows:
            keep = self.window - count
            self._buffer[..., :keep, :] = self._buffer[..., self.held - keep : self.held, :].clone()
            self._dropped = self.length - keep
        return unseen

    def write(self, layer: int, offset: int, keys_1KTE: Tensor, values_1KTE: Tensor) -> None:
        """Store entries at positions length + offset, ...; `advance` makes them committed."""
        start = self.held + offset
        end = start + keys_1KTE.shape[2]
        if end > self._buffer.shape[4]:
            raise ValueError(f"{end} draft cache entries exceed the {self._buffer.shape[4]} rows of the buffer")
        self._buffer[layer, 0, :, :, start:end] = keys_1KTE
        self._buffer[layer, 1, :, :, start:end] = values_1KTE

    def read(self, layer: int, extra: int) -> tuple[Tensor, Tensor]:
        """Keys and values [1,K,S,E] of the context in view and of `extra` scratch entries after it."""
        start = 0 if self.window is None else max(self.held - self.window, 0)
        both = self._buffer[layer, :, :, :, start : self.held + extra]
        return both[0], both[1]

    def advance(self, count: int) -> None:
        """Count the next `count` written entries as committed."""
        self.length += count
