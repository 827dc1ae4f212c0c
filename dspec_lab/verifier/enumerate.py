"""The exact output law of the very code that runs: every outcome of every draw is explored, with its probability.

Randomness enters decoding only through a `Chooser`. The one here prescribes the outcome of each draw and backtracks,
so a run of the real loop is one leaf of the tree of outcomes, and the leaves' chances add up to the output law in
float64, without sampling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from dspec_lab.core.streams import Chooser, Purpose

Address = tuple[Purpose, int, int]  # purpose, round, slot
IMPURE = "the code is not a function of its draws alone"
Outcome = TypeVar("Outcome", bound=Hashable)


class SharedNoiseError(RuntimeError):
    """One random number was used for two decisions."""


@dataclass(slots=True)
class _Draw:
    """One draw on the current path: its live branches (outcome, chance) and the one taken."""

    address: Address
    branches: tuple[tuple[int, float], ...]
    taken: int = 0


class EnumeratingChooser:
    """Explores all outcomes depth first: call `paths`, run the code once for each path, read `chance` after the run.

    Branches of probability 0 are skipped. A number drawn twice (the same purpose, round and slot) raises
    `SharedNoiseError`; with `follow_shared` it is followed instead, as the streams would: the second decision sees the
    same uniform, so the law of code with that fault is exact too.
    """

    def __init__(self, *, follow_shared: bool = False) -> None:
        self._follow = follow_shared
        self._path: list[_Draw] = []
        self._depth = 0
        self._where: dict[Address, tuple[float, float]] = {}  # the interval in which each number drawn so far lies
        self.chance = 1.0

    def paths(self) -> Iterator[int]:
        """0, 1, 2, ...: one for each leaf; the body of the loop must run the code to its end."""
        count = 0
        while True:
            self._depth, self._where, self.chance = 0, {}, 1.0
            yield count
            if self._depth != len(self._path):
                raise RuntimeError(f"run {count} made {self._depth} draws, {len(self._path)} were due; {IMPURE}")
            count += 1
            while self._path and self._path[-1].taken + 1 == len(self._path[-1].branches):
                self._path.pop()
            if not self._path:
                return
            self._path[-1].taken += 1

    def categorical(self, purpose: Purpose, round_index: int, slot: int, probs_V: Tensor) -> int:
        """The token of the branch taken; each token with mass is one branch."""
        weights = probs_V.double().tolist()
        return self._draw((purpose, round_index, slot), weights)

    def bernoulli(self, purpose: Purpose, round_index: int, slot: int, prob: float) -> bool:
        """The branch taken; both are explored unless `prob` is 0 or 1."""
        if not 0 <= prob <= 1:
            raise ValueError(f"the chance of {purpose} in round {round_index}, slot {slot} is {prob}")
        return self._draw((purpose, round_index, slot), [prob, 1 - prob]) == 0

    def _draw(self, address: Address, weights: list[float]) -> int:
        total = math.fsum(weights)
        if not (0 < total < math.inf) or min(weights) < 0:
            raise ValueError(f"draw {address} has weights that sum to {total}, smallest {min(weights)}")
        within = self._where.get(address, (0.0, 1.0))
        if address in self._where and not self._follow:
            purpose, round_index, slot = address
            where = f"{purpose}, round {round_index}, slot {slot}"
            raise SharedNoiseError(f"the number of {where} was drawn twice in one run")
        branches, spans = [], {}
        begin = 0.0
        for outcome, weight in enumerate(weights):
            end = begin + weight / total
            low, high = max(begin, within[0]), min(end, within[1])
            if weight > 0 and high > low:
                # the plain chance where the number is fresh: differences of sums would round
                chance = weight / total if within == (0.0, 1.0) else (high - low) / (within[1] - within[0])
                branches.append((outcome, chance))
                spans[outcome] = (low, high)
            begin = end
        draw = self._step(address, tuple(branches))
        outcome, chance = draw.branches[draw.taken]
        self._where[address] = spans[outcome]
        self.chance *= chance
        return outcome

    def _step(self, address: Address, branches: tuple[tuple[int, float], ...]) -> _Draw:
        if self._depth == len(self._path):
            self._path.append(_Draw(address, branches))
        draw = self._path[self._depth]
        if (draw.address, draw.branches) != (address, branches):
            raise RuntimeError(
                f"a replay drew {address} of {branches}, before {draw.address} of {draw.branches}; {IMPURE}"
            )
        self._depth += 1
        return draw


def output_law(
    run: Callable[[Chooser], Outcome], *, follow_shared: bool = False, max_runs: int = 200_000
) -> dict[Outcome, float]:
    """Chance of each result of `run`, exactly; `run` must draw through its chooser alone and start afresh each time.

    Raises `ValueError` after `max_runs` leaves, so that a case too large to enumerate says so.
    """
    chooser = EnumeratingChooser(follow_shared=follow_shared)
    parts: dict[Outcome, list[float]] = {}
    for count in chooser.paths():
        if count >= max_runs:
            raise ValueError(f"more than {max_runs} outcomes: too large a case to enumerate")
        result = run(chooser)
        parts.setdefault(result, []).append(chooser.chance)
    return {result: math.fsum(chances) for result, chances in parts.items()}


def max_deviation(found: dict[Outcome, float], wanted: dict[Outcome, float]) -> tuple[float, Outcome | None]:
    """The largest difference of two laws over all outcomes, and the outcome that has it."""
    gaps = {outcome: abs(found.get(outcome, 0.0) - wanted.get(outcome, 0.0)) for outcome in {**found, **wanted}}
    worst = max(gaps, key=lambda outcome: gaps[outcome], default=None)
    return (0.0, None) if worst is None else (gaps[worst], worst)


def total_variation(found: dict[Outcome, float], wanted: dict[Outcome, float]) -> float:
    """Half the summed difference of two laws: 0 equal, 1 disjoint."""
    outcomes = {**found, **wanted}
    return 0.5 * math.fsum(abs(found.get(outcome, 0.0) - wanted.get(outcome, 0.0)) for outcome in outcomes)
