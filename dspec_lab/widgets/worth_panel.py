"""The panel of notebook 10: is a drafter of this acceptance and cost worth it at this load?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ipywidgets
import numpy as np

from dspec_lab.plots.style import LabFigure
from dspec_lab.plots.worth import break_even_figure
from dspec_lab.scheduler.break_even import BreakEvenMap, block_speedup, break_even_map
from dspec_lab.scheduler.cost_table import CostTable
from dspec_lab.widgets.figure_panel import OPTIONS, FigurePanel, whole_slider


@dataclass(frozen=True, kw_only=True, slots=True)
class WorthState:
    """What the controls show."""

    requests: int
    accept: float
    draft_ms: float
    most_drafts: int

    def __post_init__(self) -> None:
        if not 0 <= self.accept <= 1 or self.draft_ms < 0:
            raise ValueError(f"acceptance lies in 0..1 and time is not negative, got {self.accept}, {self.draft_ms} ms")


@dataclass(frozen=True, kw_only=True, slots=True)
class WorthResult:
    """The chosen drafter's best block, and the maps by load."""

    maps: tuple[BreakEvenMap, ...]
    drafts: int  # 0: plain decoding is best
    speedup: float  # of the best block, also where it is below 1


class WorthPanel(FigurePanel[WorthState, WorthResult]):
    """Controls `Requests`, `Acceptance`, `Drafting, ms`, `Most drafts`; a star on the break-even map, and advice."""

    def __init__(
        self,
        table: CostTable,
        *,
        loads: Sequence[int] = (1, 2, 4, 8, 16),
        most_drafts: int = 7,
        points: Mapping[str, tuple[float, float, str]] | None = None,
    ) -> None:
        super().__init__()
        covered = [n for n in loads if 2 * n <= table.last_row]
        if not covered:
            raise ValueError(f"the cost table ends at {table.last_row} rows: no draft fits {min(loads)} requests")
        self._table, self._loads, self._points = table, covered, dict(points or {})
        token_ms = 1e3 * float(table.round_s_N(1, 0)[0])
        self.requests = ipywidgets.SelectionSlider(
            options=covered, value=covered[0], description="Requests", continuous_update=False, **OPTIONS
        )
        self.accept = ipywidgets.FloatSlider(
            value=0.6, min=0, max=1, step=0.05, description="Acceptance", continuous_update=False, **OPTIONS
        )
        self.draft_ms = ipywidgets.FloatSlider(
            value=round(token_ms / 3), min=0, max=round(token_ms), step=1, description="Drafting, ms",
            continuous_update=False, **OPTIONS,
        )  # fmt: skip
        self.most_drafts = whole_slider("Most drafts", most_drafts, 1, most_drafts)
        self.arrange(self.requests, self.accept, self.draft_ms, self.most_drafts)

    def state(self) -> WorthState:
        """The controls' values."""
        return WorthState(
            requests=self.requests.value, accept=self.accept.value, draft_ms=self.draft_ms.value,
            most_drafts=self.most_drafts.value,
        )  # fmt: skip

    def compute(self, state: WorthState) -> WorthResult:
        """Maps of all loads, and the best block of the chosen drafter."""
        accept_1, draft_s_1 = np.array([state.accept]), np.array([1e-3 * state.draft_ms])
        speeds = [
            float(block_speedup(self._table, accept_1, draft_s_1, requests=state.requests, drafts=n)[0, 0])
            for n in range(1, state.most_drafts + 1)
        ]
        best = int(np.argmax(speeds))
        maps = tuple(break_even_map(self._table, requests=n, most_drafts=state.most_drafts) for n in self._loads)
        return WorthResult(maps=maps, drafts=best + 1 if speeds[best] > 1 else 0, speedup=speeds[best])

    def figure(self, state: WorthState, result: WorthResult) -> LabFigure:
        """The star on the map of the chosen load."""
        star = {"yours": (state.accept, 1e-3 * state.draft_ms, "yes" if result.drafts else "no")}
        points = {**(self._points if state.requests == 1 else {}), **star}
        return break_even_figure(
            result.maps, shown=self._loads.index(state.requests), points=points, title=self.summary(state, result)
        )

    def summary(self, state: WorthState, result: WorthResult) -> str:
        """The advice in one line."""
        what = f"{state.requests} requests, acceptance {state.accept:.2f}, {state.draft_ms:.0f} ms a block"
        if result.drafts:
            return f"{what}: draft {result.drafts}, {result.speedup:.2f} times plain decoding"
        return f"{what}: do not speculate; the best block reaches {result.speedup:.2f} of plain decoding"
