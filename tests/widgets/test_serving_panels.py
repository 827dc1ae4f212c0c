"""The panels of notebooks 08 and 11: what they decide, redraw and refuse; and the figures behind them."""

from __future__ import annotations

import numpy as np
import pytest

from dspec_lab.evaluation.paper import paper_table
from dspec_lab.plots.scheduling import cost_figure, search_figure
from dspec_lab.plots.serving import load_figure
from dspec_lab.plots.style import png_bytes
from dspec_lab.scheduler.cost_table import CostSample, CostTable
from dspec_lab.serving.paper_fit import Curve
from dspec_lab.serving.presets import load_preset
from dspec_lab.widgets.load_panel import LoadPanel
from dspec_lab.widgets.scheduler_panel import SchedulerPanel, SchedulerState, shapes

CURVE = Curve(
    requests_N=np.array([20.0, 200.0]), user_tok_per_s_N=np.array([190.0, 78.0]), budget_N=np.array([5.1, 3.5])
)  # fmt: skip


def test_the_scheduler_panel_redraws_for_every_control():
    panel = SchedulerPanel(requests=4)
    seen = [(panel.numbers.value, panel.picture.value)]
    changes = (
        (panel.requests, 12), (panel.shape, "cliff"), (panel.confidence, 0.4), (panel.policy, "full block"),
        (panel.policy, "look-ahead"),
    )  # fmt: skip
    for control, value in changes:
        control.value = value
        seen.append((panel.numbers.value, panel.picture.value))
        assert panel.error.value == "" and "Up to date" in panel.status.value
    assert len({picture for _, picture in seen}) == len(seen)
    assert "NOT lossless" in seen[-1][0] and "NOT" not in seen[-2][0]
    assert "84 of 84 drafts of 12 requests" in seen[-2][0]
    assert panel.static().alt.startswith("Expected tokens per second")


def test_the_rate_it_states_is_that_of_the_lengths_it_shows():
    panel = SchedulerPanel()
    for policy in ("early-stop", "delayed", "fixed-1"):
        result = panel.compute(SchedulerState(requests=9, shape="stairs", confidence=0.7, policy=policy))
        ((_, lengths),) = result.lengths.items()
        best = result.rates_N[sum(lengths)]
        # the best filling of that many places, for policies that fill by survival; no better for others
        assert result.rate <= best * (1 + 1e-6)
        if policy != "fixed-1":
            assert result.rate == pytest.approx(best, rel=1e-6)


def test_its_cost_shapes_are_what_they_are_called():
    tables = shapes()
    stairs, cliff = tables["stairs"].verify_s_N, tables["cliff"].verify_s_N
    assert stairs[64] == pytest.approx(stairs[2]) and stairs[65] > 1.3 * stairs[64]
    assert (np.diff(stairs[1:]) > 1e-3).sum() == 7
    assert cliff[33] == 2 * cliff[32]
    with pytest.raises(ValueError, match="requests must lie in 1..64, got 65"):
        SchedulerState(requests=65, shape="bend", confidence=0.5, policy="delayed")


def test_the_load_panel_simulates_the_load_it_shows():
    preset = load_preset("v4-flash")
    panel = LoadPanel(
        preset, {"delayed": CURVE}, paper_frontier=paper_table("fig7_frontier"), paper_budget=paper_table("fig8_budget")
    )
    busy = panel.result(panel.state())
    panel.requests.value = 10
    quiet = panel.result(panel.state())
    assert panel.error.value == "" and "10 requests" in panel.numbers.value
    assert quiet.user_tok_per_s > busy.user_tok_per_s and quiet.budget > busy.budget
    alt = panel.static().alt
    assert "budget 5.10 to 3.50 rows" in alt and "v4-flash" in alt


def test_figures_are_labelled_and_draw_the_same_twice():
    table = CostTable(
        rows=(1, 8), seconds=(0.010, 0.020),
        samples=(CostSample(rows=1, context_tokens=4, requests=1, seconds=0.011),),
    )  # fmt: skip
    paper = {
        "model": "v4-pro",
        "paper_frontier": paper_table("fig7_frontier"),
        "paper_budget": paper_table("fig8_budget"),
    }
    makers = (
        lambda: cost_figure({"a": table}, title="t"),
        lambda: search_figure(np.array([1.0, 1.2, 1.1]), {"x": [1, 0]}, {"x": 1}),
        lambda: search_figure(np.array([1.0]), {"x": [0] * 50}, {"x": 0}),
        lambda: load_figure({"a": CURVE}, **paper, sla_tok_per_s=35.0, point=(50.0, 900.0, 18.0, 4.0)),
    )
    for make in makers:
        figure = make()
        assert figure.alt and png_bytes(figure) == png_bytes(make())
        assert all(axes.get_xlabel() and axes.get_ylabel() for axes in figure.axes)
    with pytest.raises(ValueError, match="no line for 'v5'"):
        load_figure({"a": CURVE}, **{**paper, "model": "v5"})
    for empty in (lambda: cost_figure({}), lambda: load_figure({})):
        with pytest.raises(ValueError, match="no "):
            empty()
