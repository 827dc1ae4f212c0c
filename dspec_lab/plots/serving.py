"""Serving under load: throughput against the user's speed, and verified rows per request against concurrency."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
from matplotlib.axes import Axes

from dspec_lab.plots.style import GREY, LabFigure, add_legend, caption, new_figure, series_look, style_axes
from dspec_lab.serving.paper_fit import Curve

PAPER_STYLE = {"mtp": ":", "dspark": "--"}
PAPER_NAMES = {"mtp": "paper, MTP-1", "dspark": "paper, DSpark"}


def load_figure(
    curves: Mapping[str, Curve],
    *,
    model: str | None = None,
    paper_frontier: pd.DataFrame | None = None,
    paper_budget: pd.DataFrame | None = None,
    sla_tok_per_s: float | None = None,
    point: tuple[float, float, float, float] | None = None,
    title: str = "",
) -> LabFigure:
    """Frontier (left) and budget (right) of simulated policies, beside the lines of the paper's Figures 7 and 8.

    The paper's tables are `fig7_frontier` and `fig8_budget`, of which the fitted lines of `model` are drawn. `point` is
    one more simulated load: user tok/s, throughput, requests, budget.
    """
    if not curves:
        raise ValueError("no curve to draw")
    figure = new_figure(11.0, 4.0, alt=_words(curves, model))
    left, right = figure.subplots(1, 2)
    if paper_frontier is not None and model is not None:
        _paper(left, paper_frontier, model, "tps_per_user", "throughput_per_gpu")
    if paper_budget is not None and model is not None:
        _paper(right, paper_budget, model, "concurrency", "verification_budget")
    for index, (name, curve) in enumerate(curves.items()):
        look = {**series_look(index), "markersize": 5, "linewidth": 1.5, "label": name}
        left.plot(curve.user_tok_per_s_N, curve.throughput_N, **look)
        right.plot(curve.requests_N, curve.budget_N, **look)
    if point is not None:
        user, throughput, requests, budget = point
        for axes, x, y in ((left, user, throughput), (right, requests, budget)):
            axes.plot([x], [y], "*", color="black", markersize=14, label="this load", zorder=5)
    if sla_tok_per_s is not None:
        left.axvline(sla_tok_per_s, color=GREY, linewidth=1)
    style_axes(left, xlabel="tokens per second a user sees", ylabel="tokens per second of a GPU", grid="both")
    style_axes(right, xlabel="requests in flight on a GPU", ylabel="rows verified per request and round", grid="both")
    left.set_ylim(bottom=0)
    right.set_ylim(bottom=0)
    add_legend(left)
    if title:
        figure.suptitle(title, x=0.01, ha="left")
    if paper_frontier is not None:
        caption(
            figure, "Grey: lines drawn in the DSpark paper, Figures 7 and 8 (whole systems: drafter and scheduler)."
        )
    return figure


def _paper(axes: Axes, table: pd.DataFrame, model: str, x: str, y: str) -> None:
    rows = table[(table["model"] == model) & (table["kind"] == "fit")]
    if rows.empty:
        raise ValueError(f"the paper's table has no line for {model!r}; it has {sorted(set(table['model']))}")
    for method, line in rows.groupby("method", sort=False):
        axes.plot(
            line[x], line[y], color=GREY, linestyle=PAPER_STYLE[str(method)], linewidth=1.6,
            label=PAPER_NAMES[str(method)],
        )  # fmt: skip


def _words(curves: Mapping[str, Curve], model: str | None) -> str:
    parts = [
        f"{name}: {c.throughput_N[0]:.0f} to {c.throughput_N[-1]:.0f} tokens/s a GPU, budget {c.budget_N[0]:.2f} to "
        f"{c.budget_N[-1]:.2f} rows"
        for name, c in curves.items()
    ]
    of = "" if model is None else f" of {model}"
    return f"Throughput against the user's speed, and budget against requests in flight{of}. {'; '.join(parts)}."
