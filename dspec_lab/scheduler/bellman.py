"""Optimal stopping for one request: when to end its chain of drafts, if the law of confidences is known.

A round that verifies l drafts takes t(l) seconds and gains 1 + sum_{j<=l} a_j tokens. Over many rounds the most tokens
per second come from the rule that maximises tokens - price x seconds, where price is that very rate (renewal reward).
The rule may look ahead, though not at tokens: at the law of later confidences, given the last one seen. So it sees
behind a cliff of the cost without leaking, which Algorithm 1 cannot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Integer

from dspec_lab.scheduler.policies import RoundView

GRID = 513  # points of survival at which values are kept; they are convex in it, so lines between lie above by 1e-4


@dataclass(frozen=True, slots=True)
class ConfidenceChain:
    """The law of conditional confidences c_1..c_G as a Markov chain over a few values."""

    values_M: Float[np.ndarray, " M"]  # rising, in 0..1
    start_M: Float[np.ndarray, " M"]  # law of c_1
    next_GMM: Float[np.ndarray, "H M M"]  # entry [k, m, n]: c_{k+2} = values[n] given c_{k+1} = values[m]

    def __post_init__(self) -> None:
        M = len(self.values_M)
        if not M or self.values_M.min() < 0 or self.values_M.max() > 1 or np.any(np.diff(self.values_M) <= 0):
            raise ValueError(f"confidence values must rise within 0..1, got {self.values_M.tolist()}")
        if self.start_M.shape != (M,) or self.next_GMM.shape[1:] != (M, M):
            raise ValueError(f"{M} values, but laws of shape {self.start_M.shape} and {self.next_GMM.shape}")
        for law in (self.start_M, *self.next_GMM.reshape(-1, M)):
            if law.min() < 0 or not np.isclose(law.sum(), 1):
                raise ValueError(f"a law of confidences must add up to 1, got {law.tolist()}")

    @property
    def gamma(self) -> int:
        """Drafts in a block."""
        return len(self.next_GMM) + 1

    def nearest(self, confidence: float) -> int:
        """Index of the value closest to `confidence`."""
        return int(np.abs(self.values_M - confidence).argmin())


def fit_chain(confidences: Sequence[Sequence[float]], gamma: int, *, values: int = 8) -> ConfidenceChain:
    """The chain of observed rounds, binned at equal shares, half a count of the position's own law in each row.

    Rounds may be shorter than `gamma`; each position needs at least one.
    """
    seen = np.array([c for row in confidences for c in row[:gamma]], dtype=np.float64)
    if not seen.size or seen.min() < 0 or seen.max() > 1:
        raise ValueError(f"confidences must lie in 0..1 and be there, got {seen.size} of them")
    edges = np.unique(np.quantile(seen, np.linspace(0, 1, values + 1)[1:-1]))
    bin_of = np.searchsorted(edges, seen, side="right")
    used = np.unique(bin_of)
    centre_M = np.array([seen[bin_of == i].mean() for i in used])
    M = len(centre_M)
    counts_GM = np.zeros((gamma, M))
    pairs_GMM = np.zeros((gamma - 1, M, M))
    for row in confidences:
        ids = np.searchsorted(used, np.searchsorted(edges, np.asarray(row[:gamma]), side="right"))
        counts_GM[np.arange(len(ids)), ids] += 1
        if len(ids) > 1:
            np.add.at(pairs_GMM, (np.arange(len(ids) - 1), ids[:-1], ids[1:]), 1)
    if (counts_GM.sum(1) == 0).any():
        raise ValueError(f"no round reaches position {int((counts_GM.sum(1) == 0).argmax()) + 1} of {gamma}")
    law_GM = counts_GM / counts_GM.sum(1, keepdims=True)
    pairs_GMM += 0.5 * law_GM[1:, None, :]
    return ConfidenceChain(centre_M, law_GM[0], pairs_GMM / pairs_GMM.sum(-1, keepdims=True))


@dataclass(frozen=True, slots=True)
class BellmanStop:
    """The optimal rule for one request with this chain and these round times. Other batch sizes are refused."""

    chain: ConfidenceChain
    round_s_N: Float[np.ndarray, " N"]  # seconds of a round that verifies 0..gamma drafts
    rate_tok_per_s: float  # the price, and what the rule earns
    ahead_GMA: Float[np.ndarray, "G M A"]  # value of what follows draft k + 1, by its confidence and survival
    name: str = "bellman"
    lossless: bool = True
    uses_table: bool = True

    def lengths(self, view: RoundView) -> Integer[np.ndarray, " B"]:
        """One request's drafts, verified as long as the gain ahead pays."""
        if view.requests != 1:
            raise ValueError(f"the Bellman rule is for one request, got a batch of {view.requests}")
        return np.array([self.length(view.survival_BG[0, : int(view.lens_B[0])])])

    def length(self, survival_G: Float[np.ndarray, " G"]) -> int:
        """Drafts to verify; draft k + 1 is judged by survival up to it."""
        before, grid_A = 1.0, np.linspace(0, 1, GRID)
        for k in range(min(len(survival_G), self.chain.gamma)):
            here = float(survival_G[k])
            m = self.chain.nearest(here / before if before > 0 else 0.0)
            extra_s = self.round_s_N[k + 1] - self.round_s_N[k]
            ahead = float(np.interp(here, grid_A, self.ahead_GMA[k, m]))
            if here + ahead - self.rate_tok_per_s * extra_s <= 0:
                return k
            before = here
        return min(len(survival_G), self.chain.gamma)


def solve(chain: ConfidenceChain, round_s_N: Float[np.ndarray, " N"]) -> BellmanStop:
    """The best rule for rounds of `round_s_N[l]` seconds, l = 0..gamma; bisection on the price."""
    if len(round_s_N) != chain.gamma + 1 or not np.isfinite(round_s_N).all():
        raise ValueError(f"{chain.gamma + 1} finite round times are needed, got {round_s_N.tolist()}")
    low, high = 0.0, (chain.gamma + 1) / float(round_s_N.min())
    for _ in range(60):
        price = (low + high) / 2
        worth, _ = _values(chain, round_s_N, price)
        low, high = (price, high) if worth > 0 else (low, price)
    return BellmanStop(chain, round_s_N, low, _values(chain, round_s_N, low)[1])


def _values(chain: ConfidenceChain, round_s_N: np.ndarray, price: float) -> tuple[float, np.ndarray]:
    """(Tokens - price x seconds of a round under the best rule, value behind each draft by its confidence)."""
    grid_A, G, M = np.linspace(0, 1, GRID), chain.gamma, len(chain.values_M)
    ahead_GMA = np.zeros((G, M, GRID))
    value_MA = np.zeros((M, GRID))  # before draft k + 1, its confidence known, by the survival so far
    for k in range(G - 1, -1, -1):
        if k < G - 1:
            ahead_GMA[k] = chain.next_GMM[k] @ value_MA
        extra_s = round_s_N[k + 1] - round_s_N[k]
        here_MA = chain.values_M[:, None] * grid_A
        ahead_MA = np.stack([np.interp(here_MA[m], grid_A, ahead_GMA[k, m]) for m in range(M)])
        value_MA = np.maximum(0.0, here_MA + ahead_MA - price * extra_s)
    return 1.0 - price * float(round_s_N[0]) + float(chain.start_M @ value_MA[:, -1]), ahead_GMA
