"""The panels of notebooks 02 and 03: acceptance by entropy, and by position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from dspec_lab.calibration.records import Rounds
from dspec_lab.evaluation.decay import DecayRow, decay_rows
from dspec_lab.evaluation.entropy import EntropyBin, Whose, entropy_bins, rank_correlation
from dspec_lab.plots.decay import decay_figure
from dspec_lab.plots.entropy import acceptance_by_entropy
from dspec_lab.plots.style import LabFigure
from dspec_lab.widgets.figure_panel import FigurePanel, dropdown, whole_slider

MOST_BINS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class EntropyState:
    """What the controls show."""

    trace: str  # label of a trace: drafter and temperature
    domain: str
    whose: Whose
    bins: int

    def __post_init__(self) -> None:
        if not 1 <= self.bins <= MOST_BINS:
            raise ValueError(f"bins must lie in 1..{MOST_BINS}, got {self.bins}")


class EntropyPanel(FigurePanel[EntropyState, tuple[EntropyBin, ...]]):
    """Controls `Trace`, `Domain`, `Entropy of`, `Bins`; acceptance by entropy."""

    def __init__(self, traces: Mapping[str, Rounds], *, bins: int = 6) -> None:
        super().__init__()
        self._traces = _checked(traces)
        self.trace = dropdown("Trace", list(traces))
        self.domain = dropdown("Domain", ["all", *_domains(traces)])
        self.whose = dropdown("Entropy of", ["target", "draft"])
        self.bins = whole_slider("Bins", bins, 1, MOST_BINS)
        self.arrange(self.trace, self.domain, self.whose, self.bins)

    def state(self) -> EntropyState:
        """The controls' values."""
        return EntropyState(
            trace=self.trace.value, domain=self.domain.value, whose=self.whose.value, bins=self.bins.value
        )

    def compute(self, state: EntropyState) -> tuple[EntropyBin, ...]:
        """The bins of the chosen trace and domain."""
        rounds = self._traces[state.trace].of_domain(state.domain)
        return tuple(entropy_bins(rounds, whose=state.whose, bins=state.bins))

    def figure(self, state: EntropyState, result: tuple[EntropyBin, ...]) -> LabFigure:
        """Acceptance by entropy."""
        return acceptance_by_entropy({state.domain: result}, whose=state.whose, title=state.trace)

    def summary(self, state: EntropyState, result: tuple[EntropyBin, ...]) -> str:
        """Cases, rank correlation."""
        rounds = self._traces[state.trace].of_domain(state.domain)
        cases = sum(row.cases for row in result)
        return f"{cases} drafts reached; rank correlation with 1 - TV {rank_correlation(rounds, state.whose):+.2f}"


@dataclass(frozen=True, kw_only=True, slots=True)
class DecayState:
    """What the controls show."""

    trace: str
    domain: str
    gamma: int  # draft length looked at

    def __post_init__(self) -> None:
        if self.gamma < 1:
            raise ValueError(f"the draft length must be at least 1, got {self.gamma}")


class DecayPanel(FigurePanel[DecayState, tuple[DecayRow, ...]]):
    """Controls `Trace`, `Domain`, `Draft length`; survival and conditional acceptance by position."""

    def __init__(self, traces: Mapping[str, Rounds], *, paper: pd.DataFrame | None = None) -> None:
        super().__init__()
        self._traces, self._paper = _checked(traces), paper
        widest = max(rounds.widest for rounds in traces.values())
        self.trace = dropdown("Trace", list(traces))
        self.domain = dropdown("Domain", ["all", *_domains(traces)])
        self.gamma = whole_slider("Draft length", widest, 1, widest)
        self.arrange(self.trace, self.domain, self.gamma)

    def state(self) -> DecayState:
        """The controls' values."""
        return DecayState(trace=self.trace.value, domain=self.domain.value, gamma=self.gamma.value)

    def compute(self, state: DecayState) -> tuple[DecayRow, ...]:
        """The positions of the chosen trace and domain."""
        rounds = self._traces[state.trace].of_domain(state.domain)
        return tuple(decay_rows(rounds, longest=min(state.gamma, rounds.widest)))

    def figure(self, state: DecayState, result: tuple[DecayRow, ...]) -> LabFigure:
        """Both curves, with the paper's where it has the domain."""
        paper = self._paper if state.domain != "all" else None
        return decay_figure({state.domain: result}, paper=paper, domain=state.domain, title=state.trace)

    def summary(self, state: DecayState, result: tuple[DecayRow, ...]) -> str:
        """Accepted length if the block ended here, and the prediction's miss."""
        length = 1 + sum(row.survival for row in result)
        last = result[-1]
        return (
            f"accepted length {length:.2f} tokens a round with {len(result)} drafts; at position {last.position} "
            f"{last.survival:.3f} survived, p^k says {last.geometric:.3f}"
        )


def _checked(traces: Mapping[str, Rounds]) -> dict[str, Rounds]:
    if not traces:
        raise ValueError("the panel needs at least one trace, got none")
    return dict(traces)


def _domains(traces: Mapping[str, Rounds]) -> Sequence[str]:
    # of all traces: a choice that one lacks is told as an error
    return sorted({domain for rounds in traces.values() for domain in rounds.domains})
