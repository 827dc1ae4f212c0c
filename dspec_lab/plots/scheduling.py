"""The scheduler's search in pictures: what a round costs, and how the rate changes as drafts are admitted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.ticker import MaxNLocator

from dspec_lab.plots.style import GREY, LabFigure, add_legend, caption, new_figure, series_look, style_axes
from dspec_lab.scheduler.cost_table import CostTable

MOST_BARS = 40


def cost_figure(tables: Mapping[str, CostTable], *, title: str = "") -> LabFigure:
    """Milliseconds of a pass (left) and rows per second (right) by rows, one line per table."""
    if not tables:
        raise ValueError("no cost table to draw")
    words = "; ".join(f"{name}: {1e3 * t.seconds[0]:.3g} to {1e3 * t.seconds[-1]:.3g} ms" for name, t in tables.items())
    figure = new_figure(10.0, 3.4, alt=f"Cost of a pass by rows sent to the target. {words}.")
    left, right = figure.subplots(1, 2)
    for index, (name, table) in enumerate(tables.items()):
        rows, seconds = np.arange(1, table.last_row + 1), table.verify_s_N[1:]
        left.plot(rows, 1e3 * seconds, color=series_look(index)["color"], label=name)
        right.plot(rows, rows / seconds, color=series_look(index)["color"], label=name)
        if table.samples:
            left.plot(
                [s.rows for s in table.samples], [1e3 * s.seconds for s in table.samples], ".", color=GREY, markersize=3
            )
    parted = any(table.request_probes for table in tables.values())
    style_axes(
        left, xlabel="rows sent to the target", ylabel="ms",
        title="one pass, less its term by requests" if parted else "one pass",
    )  # fmt: skip
    style_axes(right, xlabel="rows sent to the target", ylabel="rows per second", title="work done")
    left.set_ylim(bottom=0)
    right.set_ylim(bottom=0)
    add_legend(left)
    if title:
        figure.suptitle(title, x=0.01, ha="left")
    return figure


def search_figure(
    rates_N: np.ndarray, lengths: Mapping[str, Sequence[int]], budgets: Mapping[str, int], *, title: str = ""
) -> LabFigure:
    """Tokens per second by admitted drafts with each policy's choice (left), and drafts per request (right)."""
    if len(rates_N) < 1:
        raise ValueError("no rate to draw: at least that of no draft is needed")
    words = "; ".join(f"{name} admits {budget}, {rates_N[budget]:.4g} tokens/s" for name, budget in budgets.items())
    figure = new_figure(10.0, 3.6, alt=f"Expected tokens per second by the number of admitted drafts. {words}.")
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    left.plot(np.arange(len(rates_N)), rates_N, color=GREY, linewidth=1.4, zorder=1)
    for index, (name, budget) in enumerate(budgets.items()):
        look = series_look(index)
        left.scatter(
            [budget], [rates_N[budget]], color=look["color"], marker=look["marker"], s=60, zorder=3, label=name
        )
    style_axes(left, xlabel="drafts admitted, by falling survival", ylabel="expected tokens per second")
    add_legend(left)
    wide = 0.8 / max(1, len(lengths))
    for index, (name, counts) in enumerate(lengths.items()):
        shown = list(counts)[:MOST_BARS]
        right.bar(
            np.arange(len(shown)) + 1 + (index - (len(lengths) - 1) / 2) * wide, shown, wide,
            color=series_look(index)["color"], label=name,
        )  # fmt: skip
    style_axes(right, xlabel="request", ylabel="drafts verified")
    right.xaxis.set_major_locator(MaxNLocator(integer=True))
    right.yaxis.set_major_locator(MaxNLocator(integer=True))
    if title:
        figure.suptitle(title, x=0.01, ha="left")
    most = max((len(counts) for counts in lengths.values()), default=0)
    if most > MOST_BARS:
        caption(figure, f"Right: the first {MOST_BARS} of {most} requests.")
    return figure
