"""Do sampled outcomes follow a known law? A chi-square test with its power, and a test that may be read at any time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

MIN_EXPECTED = 5.0  # cells with fewer expected counts are merged, else the statistic is not chi-square


@dataclass(frozen=True, slots=True)
class ChiSquare:
    """Pearson's test over one or more groups of outcomes, each group with its own law."""

    statistic: float
    dof: int
    samples: int
    impossible: int  # outcomes seen that the law excludes

    @property
    def p_value(self) -> float:
        """Chance of a statistic this large under the law; 0 as soon as an impossible outcome was seen."""
        from scipy.stats import chi2

        if self.impossible:
            return 0.0
        return float(chi2.sf(self.statistic, self.dof)) if self.dof else 1.0

    def power(self, effect: float, alpha: float) -> float:
        """Chance to see p < alpha when the true law differs by `effect`, w = sqrt(sum (found - wanted)^2 / wanted).

        The total variation of such a law is at most w / 2.
        """
        from scipy.stats import chi2, ncx2

        if not self.dof:
            return 0.0
        return float(ncx2.sf(chi2.isf(alpha, self.dof), self.dof, self.samples * effect**2))


def chi_square(groups: Iterable[tuple[Mapping[Hashable, int], Mapping[Hashable, float]]]) -> ChiSquare:
    """The test of all `(counts, law)` groups together. Rare outcomes of a group share a cell."""
    statistic, dof, samples, impossible = 0.0, 0, 0, 0
    for counts, law in groups:
        total = sum(counts.values())
        samples += total
        impossible += sum(count for outcome, count in counts.items() if not law.get(outcome, 0.0) > 0)
        cells: list[tuple[float, int]] = []
        rare_expected, rare_count = 0.0, 0
        for outcome, chance in sorted(law.items(), key=lambda item: item[1]):
            expected, count = total * chance, counts.get(outcome, 0)
            if rare_expected < MIN_EXPECTED:
                rare_expected, rare_count = rare_expected + expected, rare_count + count
            else:
                cells.append((expected, count))
        cells.append((rare_expected, rare_count))
        cells = [cell for cell in cells if cell[0] >= MIN_EXPECTED]
        if len(cells) > 1:
            statistic += sum((count - expected) ** 2 / expected for expected, count in cells)
            dof += len(cells) - 1
    return ChiSquare(statistic, dof, samples, impossible)


class EvidenceAgainst:
    """Evidence against a law, valid at any time: stop when you like, the level still holds.

    `e_value` is the likelihood of a forecaster that learns the counts, over that of the law, averaged over how fast it
    learns: a martingale under the law, so it reaches 1 / alpha with a chance of at most alpha (Ville's inequality).
    """

    def __init__(self, law: Mapping[Hashable, float], *, caution: Sequence[float] = (10.0, 100.0, 1000.0)) -> None:
        self._law = dict(law)
        self._caution = tuple(caution)  # how many samples the law itself counts for in the forecast
        self._logs = [0.0] * len(self._caution)
        self._counts: Counter[Hashable] = Counter()
        self.samples = 0

    def add(self, outcome: Hashable) -> None:
        """One more sample."""
        chance = self._law.get(outcome, 0.0)
        for i, weight in enumerate(self._caution):
            forecast = (self._counts[outcome] + weight * chance) / (self.samples + weight)
            self._logs[i] += math.log(forecast / chance) if chance > 0 else math.inf
        self._counts[outcome] += 1
        self.samples += 1

    @property
    def log10_e(self) -> float:
        """log10 of the e-value; infinite once the law's impossible was seen."""
        top = max(self._logs)
        if math.isinf(top):
            return top
        return (top + math.log(sum(math.exp(value - top) for value in self._logs) / len(self._logs))) / math.log(10)

    def exceeds(self, alpha: float) -> bool:
        """Whether the law is rejected at level `alpha`."""
        return self.log10_e >= -math.log10(alpha)
