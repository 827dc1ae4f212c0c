"""The panels of notebook 07: reliability before and after calibration, and the sweep over thresholds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import ipywidgets
import numpy as np
import pandas as pd

from dspec_lab.calibration.calibration import Calibration
from dspec_lab.calibration.maps import Method
from dspec_lab.calibration.metrics import BINNINGS, Binning, auroc, calibration_error
from dspec_lab.calibration.records import Rounds, survival
from dspec_lab.evaluation.thresholds import RoundCost, ThresholdRow, threshold_sweep
from dspec_lab.plots.calibration import reliability_figure
from dspec_lab.plots.style import LabFigure
from dspec_lab.plots.thresholds import threshold_figure
from dspec_lab.widgets.figure_panel import OPTIONS, FigurePanel, dropdown, whole_slider

MOST_BINS = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class ReliabilityState:
    """What the controls show."""

    method: Method
    domain: str
    position: int
    bins: int
    binning: Binning

    def __post_init__(self) -> None:
        if not 2 <= self.bins <= MOST_BINS:
            raise ValueError(f"bins must lie in 2..{MOST_BINS}, got {self.bins}")
        if self.position < 1:
            raise ValueError(f"the position must be at least 1, got {self.position}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReliabilityResult:
    """Errors of survival at the chosen position, and the rounds they belong to."""

    before: Rounds
    after: Rounds
    ece_before: float
    ece_after: float
    area: float  # AUROC, after


class ReliabilityPanel(FigurePanel[ReliabilityState, ReliabilityResult]):
    """Controls `Method`, `Domain`, `Position`, `Bins`, `Binning`; a reliability diagram of held-out survival.

    `rounds` are held out: a calibration that was fitted on one of their prompts is refused.
    """

    def __init__(
        self, rounds: Rounds, calibrations: Mapping[Method, Calibration], *, paper: pd.DataFrame | None = None
    ) -> None:
        super().__init__()
        if not calibrations:
            raise ValueError("the panel needs at least one calibration, got none")
        for calibration in calibrations.values():
            calibration.judge(rounds, resamples=1)  # refuses leakage and other drafters
        self._rounds, self._calibrations, self._paper = rounds, dict(calibrations), paper
        self.method = dropdown("Method", list(calibrations))
        self.domain = dropdown("Domain", ["all", *rounds.domains])
        self.position = whole_slider("Position", 1, 1, rounds.widest)
        self.bins = whole_slider("Bins", 20, 2, MOST_BINS)
        self.binning = dropdown("Binning", list(BINNINGS))
        self.arrange(self.method, self.domain, self.position, self.bins, self.binning)

    def state(self) -> ReliabilityState:
        """The controls' values."""
        return ReliabilityState(
            method=self.method.value, domain=self.domain.value, position=self.position.value, bins=self.bins.value,
            binning=self.binning.value,
        )  # fmt: skip

    def compute(self, state: ReliabilityState) -> ReliabilityResult:
        """Errors before and after."""
        before = self._rounds.of_domain(state.domain)
        after = self._calibrations[state.method].apply(before)
        k = state.position - 1
        there_I = before.proposed_IG[:, k]
        kept_N = before.survived_IG[there_I, k].astype(np.float64)
        stated = [survival(rounds.confidence_IG)[there_I, k] for rounds in (before, after)]
        errors = [calibration_error(a_N, kept_N, bins=state.bins, binning=state.binning) for a_N in stated]
        return ReliabilityResult(
            before=before, after=after, ece_before=errors[0], ece_after=errors[1], area=auroc(stated[1], kept_N)
        )

    def figure(self, state: ReliabilityState, result: ReliabilityResult) -> LabFigure:
        """The diagram of one position."""
        return reliability_figure(
            result.before, result.after, [state.position], bins=state.bins, binning=state.binning, paper=self._paper,
            title=f"{state.method}, {state.domain}",
        )  # fmt: skip

    def summary(self, state: ReliabilityState, result: ReliabilityResult) -> str:
        """Errors and area in one line."""
        return (
            f"position {state.position}, {len(result.before)} held-out rounds: ECE {100 * result.ece_before:.1f} % "
            f"before, {100 * result.ece_after:.1f} % after; AUROC {result.area:.3f}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepState:
    """What the controls show."""

    confidences: str
    domain: str
    threshold: float

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"the threshold must lie in 0..1, got {self.threshold}")


class ThresholdPanel(FigurePanel[SweepState, tuple[ThresholdRow, ...]]):
    """Controls `Confidences`, `Domain`, `Threshold`; what a threshold keeps, wastes and costs."""

    def __init__(
        self, rounds: Mapping[str, Rounds], *, cost: RoundCost | None = None, paper: pd.DataFrame | None = None
    ) -> None:
        super().__init__()
        if not rounds:
            raise ValueError("the panel needs at least one set of rounds, got none")
        self._rounds, self._cost, self._paper = dict(rounds), cost, paper
        first = next(iter(rounds.values()))
        self.confidences = dropdown("Confidences", list(rounds))
        self.domain = dropdown("Domain", ["all", *first.domains])
        self.threshold = ipywidgets.FloatSlider(
            value=0.3, min=0.0, max=0.95, step=0.05, description="Threshold", readout_format=".2f",
            continuous_update=False, **OPTIONS,
        )  # fmt: skip
        self.arrange(self.confidences, self.domain, self.threshold)

    def state(self) -> SweepState:
        """The controls' values."""
        return SweepState(
            confidences=self.confidences.value, domain=self.domain.value, threshold=round(self.threshold.value, 6)
        )

    def compute(self, state: SweepState) -> tuple[ThresholdRow, ...]:
        """The sweep, with a row at the chosen threshold."""
        rounds = self._rounds[state.confidences].of_domain(state.domain)
        points = sorted({*(round(0.05 * step, 2) for step in range(20)), state.threshold})
        return tuple(threshold_sweep(rounds, points, cost=self._cost))

    def figure(self, state: SweepState, result: tuple[ThresholdRow, ...]) -> LabFigure:
        """The sweep, the chosen threshold marked."""
        known = self._paper is not None and state.domain in set(self._paper["domain"])
        paper = self._paper if known else None
        title = f"{state.confidences} confidences, {state.domain}"
        return threshold_figure(result, chosen=state.threshold, paper=paper, domain=state.domain, title=title)

    def summary(self, state: SweepState, result: tuple[ThresholdRow, ...]) -> str:
        """The row of the chosen threshold."""
        (row,) = [row for row in result if row.threshold == state.threshold]
        speed = "" if row.tokens_per_s is None else f"; {row.tokens_per_s:.1f} tokens/s by measured cost"
        return (
            f"threshold {row.threshold:.2f}: {row.verified:.2f} drafts sent a round, {row.accepted:.2f} tokens gained, "
            f"{row.rejected:.2f} rejected, {row.verify_rate:.2f} gained per row sent{speed}"
        )
