"""Policies: how many drafts of each request are verified in this round, k = 0 always among the choices.

A policy is lossless when whether draft k is verified does not depend on the token at k or behind it (non-anticipation).
It may depend on earlier tokens, since these are decided on before k is. `lossless` says what holds for each; a test
checks it by exact enumeration and by changing what lies behind a draft.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Integer

from dspec_lab.scheduler.admission import (
    best_budget,
    early_stop_budget,
    falling,
    lengths_from,
    lone_rates,
    present,
    rates,
    top_k_lengths,
)
from dspec_lab.scheduler.cost_table import CostTable


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundView:
    """What a policy may look at, after drafting and before verifying. Chances are survival, a_{r,j}."""

    survival_BG: Float[np.ndarray, "B G"]  # of this round's drafts
    lens_B: Integer[np.ndarray, " B"]  # drafts that each request has
    # the same two rounds ago, or as recalled since (`history.recalled`); where a request is newer, 1 or what is hoped
    past_BG: Float[np.ndarray, "B G"] | None = None
    # drafts that were asked for, known before any was drawn (a drafter may stop short by what it has drawn); None: all
    asked_B: Integer[np.ndarray, " B"] | None = None
    draft_s: float = 0.0  # what drafting this round has taken
    context_tokens: float | None = None  # mean context of the requests
    accepted_B: Integer[np.ndarray, " B"] | None = None  # what would be accepted: nobody knows this, save the oracle

    @property
    def requests(self) -> int:
        """Requests in the batch."""
        return len(self.lens_B)


@runtime_checkable
class Policy(Protocol):
    """How long each request's verified prefix is."""

    @property
    def name(self) -> str:
        """For tables and plots."""
        ...

    @property
    def lossless(self) -> bool:
        """Whether the output keeps the target's law."""
        ...

    @property
    def uses_table(self) -> bool:
        """Whether a cost table matters to it."""
        ...

    def lengths(self, view: RoundView) -> Integer[np.ndarray, " B"]:
        """Drafts to verify, per request, 0..lens."""
        ...


@dataclass(frozen=True, slots=True)
class FullBlock:
    """Every draft."""

    name: str = "full block"
    lossless: bool = True
    uses_table: bool = False

    def lengths(self, view: RoundView) -> Integer[np.ndarray, " B"]:
        """As many as there are."""
        return view.lens_B


@dataclass(frozen=True, slots=True)
class FixedLength:
    """The first `count` drafts; 1, 3, 5 are MTP-1, -3, -5 of the paper, 0 is plain decoding after a wasted draft."""

    count: int
    lossless: bool = True
    uses_table: bool = False

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError(f"a fixed length must be 0 or more, got {self.count}")

    @property
    def name(self) -> str:
        """`fixed-n`."""
        return f"fixed-{self.count}"

    def lengths(self, view: RoundView) -> Integer[np.ndarray, " B"]:
        """`count`, or what there is."""
        return np.minimum(view.lens_B, self.count)


@dataclass(frozen=True, slots=True)
class StaticThreshold:
    """Drafts before the first whose chance is below `threshold`: its survival, or its conditional confidence."""

    threshold: float
    on: Literal["survival", "confidence"] = "survival"
    lossless: bool = True
    uses_table: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"a threshold must lie in 0..1, got {self.threshold}")

    @property
    def name(self) -> str:
        """`threshold-x`."""
        return f"threshold-{self.threshold:g}" + ("" if self.on == "survival" else " (confidence)")

    def lengths(self, view: RoundView) -> Integer[np.ndarray, " B"]:
        """Prefixes of chances at or above the threshold."""
        chance_BG = view.survival_BG
        if self.on == "confidence":
            before_BG = np.concatenate([np.ones_like(chance_BG[:, :1]), chance_BG[:, :-1]], axis=1)
            # 0 / 0: a draft behind a hopeless one
            chance_BG = np.divide(chance_BG, before_BG, out=np.zeros_like(chance_BG), where=before_BG > 0)
        below_BG = np.append(chance_BG < self.threshold, np.ones((view.requests, 1), dtype=bool), axis=1)
        return np.minimum(below_BG.argmax(1), view.lens_B)


@dataclass(frozen=True, slots=True)
class EarlyStop:
    """Admit drafts by falling survival until one does not raise tau x SPS. Ref: DSpark, Algorithm 1.

    Exact, and blind behind a cliff: where the cost is a staircase it may stop at the first stair.
    """

    table: CostTable
    name: str = "early-stop"
    lossless: bool = True
    uses_table: bool = True

    def lengths(self, view: RoundView) -> Integer[np.ndarray, " B"]:
        """The search over current survival."""
        if view.requests == 1:
            length = int(view.lens_B[0])
            found = lone_rates(view.survival_BG, length, _round_s_N(self.table, view, length))
            stop = next((n for n, (a, b) in enumerate(itertools.pairwise(found)) if b <= a), length)
            return np.array([stop], dtype=np.int64)
        chances_BG = present(view.survival_BG, view.lens_B)
        falling_N = falling(chances_BG)
        budget = early_stop_budget(rates(falling_N, view.requests, _round_s_N(self.table, view, len(falling_N))))
        return _admit(chances_BG, falling_N, budget)


@dataclass(frozen=True, slots=True)
class Delayed:
    """Capacity from chances two rounds old by a search over all sizes; filled by current survival.

    Ref: DSpark (arXiv:2607.05147), production form. What sets the capacity was known before any current token.
    """

    table: CostTable
    name: str = "delayed"
    lossless: bool = True
    uses_table: bool = True

    def lengths(self, view: RoundView) -> Integer[np.ndarray, " B"]:
        """The `capacity` largest current chances."""
        if view.requests == 1:
            return np.minimum(view.lens_B, self.capacity(view))
        return top_k_lengths(present(view.survival_BG, view.lens_B), self.capacity(view))

    def capacity(self, view: RoundView) -> int:
        """Drafts this round has room for."""
        if view.past_BG is None:
            raise ValueError("the delayed policy needs the chances of two rounds ago, got none")
        asked_B = np.full(view.requests, view.past_BG.shape[1]) if view.asked_B is None else view.asked_B
        if view.requests == 1:
            asked = int(asked_B[0])
            found = lone_rates(view.past_BG, asked, _round_s_N(self.table, view, asked))
            return found.index(max(found))
        falling_N = falling(present(view.past_BG, asked_B))
        return best_budget(rates(falling_N, view.requests, _round_s_N(self.table, view, len(falling_N))))


@dataclass(frozen=True, slots=True)
class Retrospective:
    """The best size of all by current chances. NOT lossless: it looks behind a drop, at tokens not yet decided."""

    table: CostTable
    name: str = "retrospective"
    lossless: bool = False
    uses_table: bool = True

    def lengths(self, view: RoundView) -> Integer[np.ndarray, " B"]:
        """The global search over current survival."""
        chances_BG = present(view.survival_BG, view.lens_B)
        falling_N = falling(chances_BG)
        budget = best_budget(rates(falling_N, view.requests, _round_s_N(self.table, view, len(falling_N))))
        return _admit(chances_BG, falling_N, budget)


@dataclass(frozen=True, slots=True)
class Oracle:
    """Exactly the drafts that will be accepted: an upper bound for plots. NOT lossless, and not to be had."""

    name: str = "oracle (lossy bound)"
    lossless: bool = False
    uses_table: bool = False

    def lengths(self, view: RoundView) -> Integer[np.ndarray, " B"]:
        """What will be accepted."""
        if view.accepted_B is None:
            raise ValueError("the oracle must be told what will be accepted; only a simulation can")
        return np.minimum(view.accepted_B, view.lens_B)


def useful_drafts(policy: Policy | None, gamma: int) -> int:
    """Drafts worth making for this policy: no more than a fixed length of at least 1 will verify, else the block."""
    if isinstance(policy, FixedLength) and policy.count:
        return min(policy.count, gamma)
    return gamma


# of the drafts that would be rejected, those that EarlyStop leaves unverified: a round number between what simulations
# of one request show on the cost tables of two CPUs
SPARED = 0.5


def spared_share(policy: Policy, requests: int) -> float:
    """Share of the drafts that would be rejected which `policy` is expected not to verify, for the gate before it.

    Early stopping knows the confidences of the round; a delayed capacity does not, but who fills it is chosen by them.
    """
    if isinstance(policy, EarlyStop):
        return SPARED
    return SPARED * (1 - 1 / requests) if isinstance(policy, Delayed) else 0.0


def _round_s_N(table: CostTable, view: RoundView, most: int) -> np.ndarray:
    return table.round_s_N(view.requests, most, draft_s=view.draft_s, context_tokens=view.context_tokens)


def _admit(chances_BG: np.ndarray, falling_N: np.ndarray, budget: int) -> np.ndarray:
    if budget == 0:
        return np.zeros(len(chances_BG), dtype=np.int64)
    return lengths_from(chances_BG, falling_N[budget - 1], budget)


# names on the command line; the table is used by those that say so
POLICIES: Mapping[str, Callable[[CostTable], Policy]] = {
    "early-stop": EarlyStop,
    "delayed": Delayed,
    "retrospective": Retrospective,
    "oracle": lambda table: Oracle(),
}
WORDS = "full, fixed-N, threshold-X, early-stop, delayed"


def policy_from_name(name: str, table: CostTable | None, *, lossy: bool = False) -> Policy:
    """The policy called `full`, `fixed-N`, `mtp-N`, `threshold-X`, `early-stop` or `delayed`.

    With `lossy` also `retrospective` and `oracle`. Raises `ValueError` for another name, for a table policy without a
    table, and for one with a flat table, which could only verify everything.
    """
    kind, _, value = name.partition("-")
    if name in ("full", "full-block"):
        return FullBlock()
    if kind in ("fixed", "mtp") and value.isdigit():
        return FixedLength(int(value))
    if kind == "threshold":
        try:
            return StaticThreshold(float(value))
        except ValueError as error:
            raise ValueError(f"threshold-X needs a number in 0..1, got {name!r}") from error
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}; known are {WORDS}")
    if name == "oracle" and lossy:
        return Oracle()
    if table is None:
        raise ValueError(f"the policy {name} needs a cost table; dspec profile makes one")
    policy = POLICIES[name](table)
    if not policy.lossless and not lossy:
        raise ValueError(f"the policy {name} is not lossless; it is for simulation and proofs only")
    if policy.uses_table and table.flat:
        raise ValueError(f"the policy {name} can trim nothing with this cost table: {table.findings()[0]}")
    return policy
