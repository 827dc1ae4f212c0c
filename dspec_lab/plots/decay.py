"""Position decay: survival measured, as p^k and as independent positions would have it, and the paper's curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from dspec_lab.evaluation.decay import DecayRow
from dspec_lab.evaluation.intervals import Interval
from dspec_lab.plots.position import draw_paper
from dspec_lab.plots.style import GREY, LabFigure, add_legend, caption, new_figure, series_look, style_axes

FEW = 10  # a conditional share of fewer rounds than this is not drawn
# prefix survival of an independent run of Qwen3-4B's DSpark on one RTX A6000: first and last of seven positions
A6000: Mapping[str, tuple[float, float]] = {"GSM8K": (0.92, 0.53), "MT-Bench": (0.78, 0.13)}


def decay_figure(
    rows: Mapping[str, Sequence[DecayRow]], *, paper: pd.DataFrame | None = None, domain: str = "chat", title: str = ""
) -> LabFigure:
    """Left: survival with 95 % intervals, p^k and the product of independent positions. Right: conditional acceptance.

    `rows` maps a label to its positions. `paper` is the table of the paper's Figure 2, of which the rows of `domain`
    are drawn; its target is Qwen3-4B, and so is that of the run on an A6000 at the left.
    """
    if not rows or not all(rows.values()):
        raise ValueError(f"there is a label without positions among {list(rows)}")
    words = "; ".join(
        f"{name}: {r[-1].survival:.2f} at position {r[-1].position}, p^k {r[-1].geometric:.2f}"
        for name, r in rows.items()
    )
    beside = "" if paper is None else f" Grey: the paper's conditional acceptance on {domain}, and a run on an A6000."
    figure = new_figure(11.0, 3.8, alt=f"Survival and conditional acceptance by draft position. {words}.{beside}")
    # fixed margins, with room for the legends: working them out anew slows the panel's redraws
    figure.set_layout_engine(None)
    left, right = figure.subplots(1, 2, sharey=True)
    figure.subplots_adjust(left=0.06, right=0.83, top=0.82, bottom=0.22, wspace=0.62)
    for index, (name, r) in enumerate(rows.items()):
        look, k = series_look(index), [row.position for row in r]
        _bars(left, r, "survival", name, look)
        left.plot(k, [row.geometric for row in r], ":", color=look["color"], linewidth=1.4, label=f"{name}: p^k")
        if all(row.independent is not None for row in r):
            apart = [row.independent for row in r]
            left.plot(k, apart, "--", color=look["color"], linewidth=1.4, label=f"{name}: independent")
        _bars(right, [row for row in r if row.reached >= FEW], "conditional", name, look)
    if paper is not None:
        draw_paper(right, paper, domain)
        for marker, (name, ends) in zip(("x", "+"), A6000.items(), strict=True):
            left.plot([1, 7], ends, linestyle="none", color=GREY, marker=marker, label=f"A6000 run: {name}")
    style_axes(left, xlabel="draft position k", ylabel="share of rounds", title="survival: drafts 1..k all accepted")
    style_axes(right, xlabel="draft position k", ylabel="", title="conditional: k accepted given 1..k-1")
    left.set_ylim(0, 1.03)
    for axes in (left, right):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        add_legend(axes, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    if title:
        figure.suptitle(title, x=0.01, ha="left")
    note = f"Bars: 95 % over prompts. Independent: product of mean 1 - TV. Right: positions that {FEW} rounds reached."
    caption(figure, note if paper is None else f"{note} Grey: Qwen3-4B; of the A6000 run the ends are known.")
    return figure


def autocorrelation_figure(found: Mapping[str, Mapping[int, Interval]], *, title: str = "") -> LabFigure:
    """Correlation of 1 - TV between positions of a round, by their distance; bars are 95 % over prompts."""
    if not found or not all(found.values()):
        raise ValueError(f"there is a label without lags among {list(found)}")
    words = "; ".join(f"{name}: {next(iter(lags.values())).estimate:.2f} at lag 1" for name, lags in found.items())
    figure = new_figure(6.0, 3.2, alt=f"Autocorrelation of acceptance chances within a round. {words}.")
    axes = figure.add_subplot()
    for index, (name, lags) in enumerate(found.items()):
        y = [value.estimate for value in lags.values()]
        spread = [
            [max(0.0, v.estimate - v.low) for v in lags.values()],
            [max(0.0, v.high - v.estimate) for v in lags.values()],
        ]
        look = series_look(index)
        axes.errorbar(list(lags), y, yerr=spread, capsize=2, elinewidth=1, linewidth=1.4, label=name, **look)
    axes.axhline(0, color=GREY, linewidth=1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    style_axes(axes, xlabel="distance of positions in a round", ylabel="correlation of 1 - TV", title=title)
    add_legend(axes, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def _bars(axes: Axes, rows: Sequence[DecayRow], quantity: str, name: str, look: dict[str, str]) -> None:
    values = [getattr(row, quantity) for row in rows]
    lows = [getattr(row, f"{quantity}_low") for row in rows]
    highs = [getattr(row, f"{quantity}_high") for row in rows]
    spread = [
        [0.0 if low is None else max(0.0, value - low) for value, low in zip(values, lows, strict=True)],
        [0.0 if high is None else max(0.0, high - value) for value, high in zip(values, highs, strict=True)],
    ]
    axes.errorbar(
        [row.position for row in rows], values, yerr=spread, capsize=2, elinewidth=1, linewidth=1.6, markersize=6,
        label=f"{name}: measured", **look,
    )  # fmt: skip
