"""The panel of notebook 11: one simulated load of a preset, on the frontier and budget curves of its policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from dspec_lab.plots.serving import load_figure
from dspec_lab.plots.style import LabFigure
from dspec_lab.scheduler.policies import policy_from_name
from dspec_lab.serving.paper_fit import Curve
from dspec_lab.serving.presets import Preset
from dspec_lab.serving.simulator import SimConfig, simulate
from dspec_lab.serving.summary import LoadSummary
from dspec_lab.serving.workload import ClosedLoop
from dspec_lab.widgets.figure_panel import FigurePanel, dropdown, whole_slider

NAMES = ("delayed", "early-stop", "full", "fixed-1", "fixed-3", "threshold-0.5")
REQUEST_ROUNDS = 12_000


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadState:
    """What the controls show."""

    policy: str
    requests: int
    seed: int

    def __post_init__(self) -> None:
        if self.requests < 1:
            raise ValueError(f"requests must be at least 1, got {self.requests}")


class LoadPanel(FigurePanel[LoadState, LoadSummary]):
    """Controls `Policy`, `Requests`, `Seed`; the load is simulated anew and drawn as a star on the given curves."""

    def __init__(
        self,
        preset: Preset,
        curves: Mapping[str, Curve],
        *,
        paper_frontier: pd.DataFrame | None = None,
        paper_budget: pd.DataFrame | None = None,
        names: Sequence[str] = NAMES,
        most_requests: int = 260,
    ) -> None:
        super().__init__()
        self._preset, self._curves = preset, dict(curves)
        self._paper_frontier, self._paper_budget = paper_frontier, paper_budget
        self.policy = dropdown("Policy", list(names))
        self.requests = whole_slider("Requests", min(100, most_requests), 1, most_requests)
        self.seed = whole_slider("Seed", 0, 0, 9)
        self.arrange(self.policy, self.requests, self.seed)

    def state(self) -> LoadState:
        """The controls' values."""
        return LoadState(policy=self.policy.value, requests=self.requests.value, seed=self.seed.value)

    def compute(self, state: LoadState) -> LoadSummary:
        """Simulate the load."""
        preset = self._preset
        config = SimConfig(
            load=ClosedLoop(concurrency=state.requests), policy=policy_from_name(state.policy, preset.table),
            table=preset.table, acceptance=preset.acceptance, seed=state.seed,
            max_rounds=max(40, REQUEST_ROUNDS // state.requests),
        )  # fmt: skip
        return simulate(config)

    def figure(self, state: LoadState, result: LoadSummary) -> LabFigure:
        """The star on the curves."""
        at = (result.user_tok_per_s, result.throughput_tok_per_s, float(state.requests), result.budget)
        return load_figure(
            self._curves, model=self._preset.name, paper_frontier=self._paper_frontier, paper_budget=self._paper_budget,
            sla_tok_per_s=self._preset.sla_tok_per_s, point=at, title=self.summary(state, result),
        )  # fmt: skip

    def summary(self, state: LoadState, result: LoadSummary) -> str:
        """The load in one line."""
        return (
            f"{state.policy}, {state.requests} requests: {result.throughput_tok_per_s:.0f} tokens/s, "
            f"{result.user_tok_per_s:.1f} a user, {result.budget:.2f} rows a request, "
            f"{result.wasted_rows:.0%} of them wasted"
        )
