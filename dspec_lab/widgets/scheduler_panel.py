"""The panel of notebook 08: load, shape of the cost, confidence and policy; what the scheduler admits and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import ipywidgets
import numpy as np

from dspec_lab.plots.scheduling import search_figure
from dspec_lab.plots.style import LabFigure
from dspec_lab.scheduler.admission import falling, present, rates
from dspec_lab.scheduler.cost_table import CostTable
from dspec_lab.scheduler.policies import (
    Delayed,
    EarlyStop,
    FixedLength,
    FullBlock,
    Policy,
    Retrospective,
    RoundView,
    StaticThreshold,
)
from dspec_lab.widgets.figure_panel import OPTIONS, FigurePanel, dropdown, whole_slider

MOST_REQUESTS = 64
GAMMA = 7
LAST = MOST_REQUESTS * (GAMMA + 1)


def shapes() -> dict[str, CostTable]:
    """Cost tables of three shapes: flat then a slope, stairs every 64 rows, and one cliff."""
    bend = CostTable(rows=(1, 64, LAST), seconds=(0.010, 0.011, 0.045), name="bend")
    edges = range(64, LAST, 64)
    rows = (1, *(row for edge in edges for row in (edge, edge + 1)), LAST)
    steps = (0.010, *(0.010 + 0.0045 * stair for edge in edges for stair in (edge // 64 - 1, edge // 64)))
    stairs = CostTable(rows=rows, seconds=(*steps, 0.010 + 0.0045 * len(edges)), name="stairs")
    cliff = CostTable(rows=(1, 32, 33, LAST), seconds=(0.010, 0.011, 0.022, 0.030), name="cliff")
    return {"bend": bend, "stairs": stairs, "cliff": cliff}


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerState:
    """What the controls show."""

    requests: int
    shape: str
    confidence: float  # mean conditional chance of a draft
    policy: str

    def __post_init__(self) -> None:
        if not 1 <= self.requests <= MOST_REQUESTS:
            raise ValueError(f"requests must lie in 1..{MOST_REQUESTS}, got {self.requests}")
        if not 0 < self.confidence < 1:
            raise ValueError(f"confidence must lie between 0 and 1, got {self.confidence}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerResult:
    """One decision."""

    rates_N: np.ndarray
    lengths: dict[str, list[int]]
    rate: float  # expected tokens per second with these lengths
    rate_full: float
    rate_none: float
    lossless: bool


class SchedulerPanel(FigurePanel[SchedulerState, SchedulerResult]):
    """Controls `Requests`, `Cost`, `Confidence`, `Policy`. The same chances are drawn for the same controls."""

    def __init__(self, *, requests: int = 8, confidence: float = 0.75, seed: int = 0) -> None:
        super().__init__()
        self._tables: Mapping[str, CostTable] = shapes()
        self._seed = seed
        self.requests = whole_slider("Requests", requests, 1, MOST_REQUESTS)
        self.shape = dropdown("Cost", list(self._tables))
        self.confidence = ipywidgets.FloatSlider(
            value=confidence, min=0.05, max=0.95, step=0.05, description="Confidence", continuous_update=False,
            **OPTIONS,
        )  # fmt: skip
        self.policy = dropdown(
            "Policy", ["early-stop", "delayed", "threshold 0.5", "full block", "fixed-1", "look-ahead"]
        )
        self.arrange(self.requests, self.shape, self.confidence, self.policy)

    def state(self) -> SchedulerState:
        """The controls' values."""
        return SchedulerState(
            requests=self.requests.value, shape=self.shape.value, confidence=round(self.confidence.value, 6),
            policy=self.policy.value,
        )  # fmt: skip

    def compute(self, state: SchedulerState) -> SchedulerResult:
        """Draw chances, decide, and work out the expected rate of every size."""
        table, rng = self._tables[state.shape], np.random.default_rng(self._seed)
        a, b = 3 * state.confidence, 3 * (1 - state.confidence)
        now_BG, past_BG = rng.beta(a, b, (2, state.requests, GAMMA)).cumprod(axis=-1)
        view = RoundView(survival_BG=now_BG, lens_B=np.full(state.requests, GAMMA), past_BG=past_BG)
        policy = _policy(state.policy, table)
        lengths_B = policy.lengths(view)
        chances_BG = present(now_BG, view.lens_B)
        falling_N = falling(chances_BG)
        round_s_N = table.round_s_N(state.requests, len(falling_N))
        kept = float(now_BG[np.arange(GAMMA) < lengths_B[:, None]].sum())
        rates_N = rates(falling_N, state.requests, round_s_N)
        return SchedulerResult(
            rates_N=rates_N,
            lengths={policy.name: lengths_B.tolist()},
            rate=(state.requests + kept) / float(round_s_N[int(lengths_B.sum())]),
            rate_full=float(rates_N[-1]),
            rate_none=float(rates_N[0]),
            lossless=policy.lossless,
        )

    def figure(self, state: SchedulerState, result: SchedulerResult) -> LabFigure:
        """Rates by size, and lengths by request."""
        ((name, lengths),) = result.lengths.items()
        return search_figure(
            result.rates_N, result.lengths, {name: sum(lengths)}, title=f"{name}: {self.summary(state, result)}"
        )

    def summary(self, state: SchedulerState, result: SchedulerResult) -> str:
        """The decision in one line."""
        ((_, lengths),) = result.lengths.items()
        law = "" if result.lossless else "; NOT lossless"
        return (
            f"{sum(lengths)} of {state.requests * GAMMA} drafts of {state.requests} requests verified, "
            f"{result.rate:.0f} tokens/s expected (none {result.rate_none:.0f}, all {result.rate_full:.0f}){law}"
        )


def _policy(name: str, table: CostTable) -> Policy:
    made: dict[str, Policy] = {
        "early-stop": EarlyStop(table),
        "delayed": Delayed(table),
        "threshold 0.5": StaticThreshold(0.5),
        "full block": FullBlock(),
        "fixed-1": FixedLength(1),
        "look-ahead": Retrospective(table),
    }
    return made[name]
