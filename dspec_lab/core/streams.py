"""Random streams: one per request and purpose, addressed by round and slot instead of consumed.

Every draw is a pure function of (seed, request, purpose, round, slot), by the Philox counter-based generator. So a
request draws the same numbers whatever its batch neighbours do, unrelated random calls change nothing, and the
draws for drafting, accepting, replacing and the bonus token never share a number. Rounds are part of the address on
purpose: reusing the noise of a discarded draft in a later round would condition it on the rejection.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import Literal, Protocol, get_args, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

Purpose = Literal["draft", "accept", "replacement", "bonus", "plain"]
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)

# a draw goes through the masses of blocks of this many tokens, then through one block
CDF_BLOCK = 256


@runtime_checkable
class Chooser(Protocol):
    """The two random decisions of speculative decoding. The audit swaps in one that enumerates both outcomes."""

    def categorical(self, purpose: Purpose, round_index: int, slot: int, probs_V: Tensor) -> int:
        """A token drawn from `probs_V`, which need not be normalised."""
        ...

    def bernoulli(self, purpose: Purpose, round_index: int, slot: int, prob: float) -> bool:
        """True with chance `prob`."""
        ...


def inverse_cdf(probs_V: Float[Tensor, " V"], uniform: float) -> int:
    """The first token whose cumulative mass exceeds `uniform` times the total; never a token without mass.

    The sums run in float64: with 24 bits, tokens rarer than 6e-8 of a large vocabulary would never come. Blocks are
    summed first and only the one that holds the token is gone through, in a fixed order whatever the thread count.
    """
    vocab = probs_V.shape[0]
    whole = vocab - vocab % CDF_BLOCK
    masses = probs_V[:whole].view(-1, CDF_BLOCK).sum(-1, dtype=torch.float64).tolist() if whole else []
    if whole < vocab:
        masses.append(float(probs_V[whole:].sum(dtype=torch.float64)))
    ends = list(accumulate(masses))
    total = ends[-1] if ends else 0.0
    if not total > 0 or not math.isfinite(total):
        raise ValueError(f"cannot draw from probabilities that sum to {total}")
    wanted = uniform * total
    # uniform * total may round up to the total: then it is the last block with mass
    block = min(bisect_right(ends, wanted), bisect_left(ends, total))
    left = wanted - (ends[block - 1] if block else 0.0)
    weights = probs_V[block * CDF_BLOCK : (block + 1) * CDF_BLOCK].tolist()
    token = bisect_right(list(accumulate(weights)), left)
    if token >= len(weights):
        # the block's mass was rounded up by more than `left` lacks of it: its last token with mass
        token = max(index for index, weight in enumerate(weights) if weight > 0)
    return block * CDF_BLOCK + token


class RandomStreams:
    """The streams of one request."""

    def __init__(self, seed: int, request_id: str = "0") -> None:
        if seed < 0:
            raise ValueError(f"seed must be 0 or more, got {seed}")
        self.seed = seed
        self.request_id = request_id
        # made once and set to a round's counter: making one costs more than the numbers of a round
        self._bits = {purpose: np.random.Philox(key=self._key(purpose)) for purpose in PURPOSES}
        self._cache: dict[tuple[Purpose, int], list[float]] = {}

    def _key(self, purpose: Purpose) -> np.ndarray:
        text = f"{self.seed}/{self.request_id}/{purpose}".encode()
        return np.frombuffer(hashlib.blake2b(text, digest_size=16).digest(), dtype=np.uint64)

    def uniforms(self, purpose: Purpose, round_index: int, count: int) -> list[float]:
        """`count` numbers in (0, 1) with 53 bits, for slots 0..count-1 of a round. The same call gives the same."""
        held = self._cache.get((purpose, round_index), [])
        if len(held) < count:
            width = max(count, 16)
            source = self._bits[purpose]
            fresh = source.state
            fresh["state"]["counter"] = np.array([0, round_index, 0, 0], dtype=np.uint64)
            source.state = fresh | {"buffer_pos": 4, "has_uint32": 0}  # nothing left over from another round
            bits = source.random_raw(width)
            # centred in its 2^-53 cell, so never 0 or 1
            held = (((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53).tolist()
            if len(self._cache) > 16:
                self._cache.clear()
            self._cache[(purpose, round_index)] = held
        return held[:count]

    def categorical(self, purpose: Purpose, round_index: int, slot: int, probs_V: Float[Tensor, " V"]) -> int:
        """A token drawn from `probs_V` by inverse CDF."""
        return inverse_cdf(probs_V, self.uniforms(purpose, round_index, slot + 1)[slot])

    def bernoulli(self, purpose: Purpose, round_index: int, slot: int, prob: float) -> bool:
        """True with chance `prob`."""
        return self.uniforms(purpose, round_index, slot + 1)[slot] < prob


class DraftDraws:
    """The one random decision a drafter may take in a round: drawing its token of slot k."""

    __slots__ = ("_chooser", "_round_index")

    def __init__(self, chooser: Chooser, round_index: int) -> None:
        self._chooser = chooser
        self._round_index = round_index

    def categorical(self, slot: int, probs_V: Tensor) -> int:
        """The token of draft slot `slot` (0-based), drawn from `probs_V`."""
        return self._chooser.categorical("draft", self._round_index, slot, probs_V)
