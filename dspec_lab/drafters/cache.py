"""Key/value cache of a drafter's own layers, for one request: bounded, appended to, cut back."""

import numpy as np
import torch
from torch import Tensor

from dspec_lab.kernels.rows import BLOCK, LayerCache, native_pointers


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
        self._scratch = scratch
        self._allocate(num_layers, num_kv_heads, head_dim, dtype, torch.device(device))

    def _allocate(
        self, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (num_layers, 2, 1, num_kv_heads, self._rows + self._scratch, head_dim)
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
            self._keep_last(keep)
            self._dropped = self.length - keep
        return unseen

    def _keep_last(self, keep: int) -> None:
        """Move the last `keep` of the held entries to the front."""
        self._buffer[..., :keep, :] = self._buffer[..., self.held - keep : self.held, :].clone()

    def write(self, layer: int, offset: int, keys_1KTE: Tensor, values_1KTE: Tensor) -> None:
        """Store entries at positions length + offset, ...; `advance` makes them committed."""
        start = self.place(offset, keys_1KTE.shape[2])
        end = start + keys_1KTE.shape[2]
        self._buffer[layer, 0, :, :, start:end] = keys_1KTE
        self._buffer[layer, 1, :, :, start:end] = values_1KTE

    def read(self, layer: int, extra: int) -> tuple[Tensor, Tensor]:
        """Keys and values [1,K,S,E] of the context in view and of `extra` scratch entries after it."""
        both = self._buffer[layer, :, :, :, self.first_seen : self.held + extra]
        return both[0], both[1]

    @property
    def first_seen(self) -> int:
        """Where the context in view begins in the buffer."""
        return 0 if self.window is None else max(self.held - self.window, 0)

    def place(self, offset: int, count: int) -> int:
        """Where `count` entries at positions length + offset, ... go in the buffer; `ValueError` without room."""
        start, rows = self.held + offset, self._rows + self._scratch
        if start + count > rows:
            raise ValueError(f"{start + count} draft cache entries exceed the {rows} rows of the buffer")
        return start

    def advance(self, count: int) -> None:
        """Count the next `count` written entries as committed."""
        self.length += count


class RowCache(DraftCache):
    """The same in the form that the compiled row ops take: fp32 on the CPU, keys transposed, a `LayerCache` a layer."""

    def _allocate(
        self, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        if dtype != torch.float32 or device.type != "cpu":
            raise ValueError(f"the compiled row ops keep fp32 on the CPU, not {dtype} on {device}")
        rows = -(-(self._rows + self._scratch) // BLOCK) * BLOCK
        # zeros, not empty: places that no row may see are still read as part of a vector
        self._keys = torch.zeros(num_layers, num_kv_heads, head_dim, rows)
        self._values = torch.zeros(num_layers, num_kv_heads, rows, head_dim)
        held = [LayerCache([key], [value]) for key, value in zip(self._keys, self._values, strict=True)]
        self.layers = [LayerCache(each.keys, each.values, native_pointers(each)) for each in held]
        self.addresses_L2 = np.array([(each.keys[0].data_ptr(), each.values[0].data_ptr()) for each in held])

    @property
    def cache_bytes(self) -> int:
        return self._keys.nbytes + self._values.nbytes

    def _keep_last(self, keep: int) -> None:
        last = slice(self.held - keep, self.held)
        self._keys[..., :keep] = self._keys[..., last].clone()
        self._values[..., :keep, :] = self._values[..., last, :].clone()

    def write(self, layer: int, offset: int, keys_1KTE: Tensor, values_1KTE: Tensor) -> None:
        start = self.place(offset, keys_1KTE.shape[2])
        end = start + keys_1KTE.shape[2]
        self._keys[layer, :, :, start:end] = keys_1KTE[0].transpose(1, 2)
        self._values[layer, :, start:end] = values_1KTE[0]

    def read(self, layer: int, extra: int) -> tuple[Tensor, Tensor]:
        seen = slice(self.first_seen, self.held + extra)
        return self._keys[layer, :, :, seen].transpose(1, 2)[None], self._values[layer, :, seen][None]
