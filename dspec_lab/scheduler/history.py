"""What earlier rounds tell about the coming one: acceptance by position, for drafters that give no confidences."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
from jaxtyping import Float

OWN_WEIGHT = 8.0  # rounds of all requests' average that a request's own counts are mixed with
PRIOR_ROUNDS = 2.0  # and rounds of `PRIOR` that the average starts from
PRIOR = 0.7
DECAY = 0.97  # of a request's own counts, per round: texts change


class AcceptanceHistory:
    """Conditional acceptance by position: each request's own recent rounds, drawn towards the average of all.

    Position k counts a round only if drafts 1..k-1 were accepted and k was verified, so short verification does not
    bias it. Fed after a round is settled, it depends on earlier rounds alone, which keeps a decision on it lossless.
    """

    def __init__(self, gamma: int) -> None:
        if gamma < 1:
            raise ValueError(f"gamma must be at least 1, got {gamma}")
        self.gamma = gamma
        self._all_2G = np.zeros((2, gamma))  # reached, kept
        self._own: dict[Hashable, np.ndarray] = {}

    def add(self, request: Hashable, verified: int, accepted: int) -> None:
        """One settled round of `request`: so many drafts verified, so many of them accepted."""
        if not 0 <= accepted <= verified <= self.gamma:
            raise ValueError(f"{accepted} of {verified} drafts accepted, gamma is {self.gamma}")
        seen_2G = np.zeros((2, self.gamma))
        seen_2G[0, : min(verified, accepted + 1)] = 1
        seen_2G[1, :accepted] = 1
        self._all_2G += seen_2G
        own_2G = self._own.setdefault(request, np.zeros((2, self.gamma)))
        own_2G *= DECAY
        own_2G += seen_2G

    def forget(self, request: Hashable) -> None:
        """Drop a request that has ended."""
        self._own.pop(request, None)

    def average(self) -> Float[np.ndarray, " G"]:
        """Conditional acceptance over all requests so far; `PRIOR` before any."""
        return (self._all_2G[1] + PRIOR_ROUNDS * PRIOR) / (self._all_2G[0] + PRIOR_ROUNDS)

    def survival(self, request: Hashable) -> Float[np.ndarray, " G"]:
        """Expected survival by position of the request's next drafts."""
        average_G = self.average()
        own_2G = self._own.get(request)
        if own_2G is None:
            return np.cumprod(average_G)
        return np.cumprod((own_2G[1] + OWN_WEIGHT * average_G) / (own_2G[0] + OWN_WEIGHT))
