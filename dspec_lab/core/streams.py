"""Random streams: one per request and purpose, addressed by round and slot instead of consumed.

Every draw is a pure function of (seed, request, purpose, round, slot), by the Philox counter-based generator. So a
request draws the same numbers whatever its batch neighbours do, unrelated random calls change nothing, and the
draws for drafting, accepting, replacing and the bonus token never share a number. Rounds are part of the address on
purpose: reusing the noise of a discarded draft in a later round would condition it on the rejection.
"""

from __future__ import annotations

import hashlib
from typing import Literal, Protocol, get_args, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

Purpose = Literal["draft", "accept", "replacement", "bonus", "plain"]
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)


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

    The sum runs in float64: with 24 bits, tokens rarer than 6e-8 of a large vocabulary would never come.
    """
    cdf_V = probs_V.double().cumsum(0)
    total = float(cdf_V[-1])
    if not total > 0 or not np.isfinite(total):
        raise ValueError(f"cannot draw from probabilities that sum to {total}")
    index = int(torch.searchsorted(cdf_V, uniform * total, right=True))
    if index >= probs_V.shape[0]:
        # uniform * total rounded up to the total: the last token with mass
        index = int(probs_V.nonzero()[-1])
    return index


class RandomStreams:
    """The streams of one request."""

    def __init__(self, seed: int, request_id: str = "0") -> None:
        if seed < 0:
            raise ValueError(f"seed must be 0 or more, got {seed}")
        self.seed = seed
        self.request_id = request_id
        self._keys = {purpose: self._key(purpose) for purpose in PURPOSES}
        self._cache: dict[tuple[Purpose, int], list[float]] = {}

    def _key(self, purpose: Purpose) -> np.ndarray:
        text = f"{self.seed}/{self.request_id}/{purpose}".encode()
        return np.frombuffer(hashlib.blake2b(text, digest_size=16).digest(), dtype=np.uint64)

    def uniforms(self, purpose: Purpose, round_index: int, count: int) -> list[float]:
        """`count` numbers in (0, 1) with 53 bits, for slots 0..count-1 of a round. The same call gives the same."""
        held = self._cache.get((purpose, round_index), [])
        if len(held) < count:
            width = max(count, 16)
            bits = np.random.Philox(key=self._keys[purpose], counter=[0, round_index, 0, 0]).random_raw(width)
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
