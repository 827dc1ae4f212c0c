"""Stated survival against what survived: reliability diagrams with histograms, and errors by position."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from dspec_lab.calibration.metrics import BINS, Binning, reliability
from dspec_lab.calibration.records import Rounds, survival
from dspec_lab.calibration.score import Score
from dspec_lab.plots.style import (
    BLUE,
    FONT_SIZE,
    GREY,
    SKY,
    VERMILION,
    LabFigure,
    add_legend,
    caption,
    new_figure,
    style_axes,
)

LOOKS = {"before": {"color": VERMILION, "marker": "s"}, "after": {"color": BLUE, "marker": "o"}}


def reliability_figure(
    before: Rounds,
    after: Rounds,
    positions: Sequence[int],
    *,
    bins: int = BINS,
    binning: Binning = "width",
    paper: pd.DataFrame | None = None,
    title: str = "",
) -> LabFigure:
    """Observed by stated survival at some positions, before and after calibration, over histograms of the statements.

    Both sets hold the same rounds. `paper` is the table of the paper's Figure 6, drawn in grey where it has the
    position (after calibration; another target).
    """
    if not positions or not all(1 <= k <= before.widest for k in positions):
        raise ValueError(f"positions must lie in 1..{before.widest}, got {list(positions)}")
    tables = {}
    for stage, rounds in (("before", before), ("after", after)):
        stated_IG = survival(rounds.confidence_IG)
        for k in positions:
            there_I = rounds.proposed_IG[:, k - 1]
            kept_N = rounds.survived_IG[there_I, k - 1].astype(np.float64)
            tables[stage, k] = reliability(stated_IG[there_I, k - 1], kept_N, bins=bins, binning=binning)
    words = "; ".join(
        f"position {k}: ECE {100 * tables['before', k].error:.1f} before, {100 * tables['after', k].error:.1f} % after"
        for k in positions
    )
    width = 2.1 + (3.4 if len(positions) == 1 else 2.7 * len(positions))
    figure = new_figure(width, 4.4, alt=f"Reliability of stated survival. {words}.")
    # fixed margins, with room for the legend: working them out anew slows the panel's redraws
    figure.set_layout_engine(None)
    figure.subplots_adjust(left=0.6 / width, right=1 - 1.5 / width, top=0.86, bottom=0.17, hspace=0.12, wspace=0.22)
    grid = figure.subplots(2, len(positions), sharex=True, squeeze=False, height_ratios=[3, 1])
    for column, k in enumerate(positions):
        upper, lower = grid[0, column], grid[1, column]
        _curves(upper, {stage: tables[stage, k] for stage in LOOKS}, paper, k)
        for stage, colour in (("before", VERMILION), ("after", SKY)):
            table = tables[stage, k]
            lower.bar(
                table.low_C, table.count_C / table.count_C.sum(), width=table.high_C - table.low_C, align="edge",
                color=colour, alpha=0.55, edgecolor="white", linewidth=0.5,
            )  # fmt: skip
        errors = f"ECE {100 * tables['before', k].error:.1f} -> {100 * tables['after', k].error:.1f} %"
        style_axes(upper, xlabel="", ylabel="" if column else "survived", title=f"k = {k}: {errors}", grid="both")
        style_axes(lower, xlabel="stated survival", ylabel="" if column else "share")
        upper.set_ylim(0, 1.02)
        upper.title.set_fontsize(FONT_SIZE)
    grid[0, 0].set_xlim(0, 1)
    add_legend(grid[0, -1], loc="upper left", bbox_to_anchor=(1.0, 1.0))
    if title:
        figure.suptitle(title, x=0.01, ha="left")
    caption(figure, "Hollow: fewer than 20 rounds in the bin. Histograms share the colours of the curves.")
    return figure


def _curves(axes: Axes, tables: dict, paper: pd.DataFrame | None, k: int) -> None:
    axes.plot([0, 1], [0, 1], color=GREY, linewidth=1)
    if paper is not None:
        rows = paper[(paper["position"] == k) & (paper["stage"] == "after")]
        if len(rows):
            axes.plot(rows["predicted"], rows["observed"], "--", color=GREY, linewidth=1.2, label="paper, after")
    for stage, table in tables.items():
        look = LOOKS[stage]
        axes.plot(table.predicted_C, table.observed_C, color=look["color"], linewidth=1.2)
        for enough, fill in ((table.count_C >= 20, "full"), (table.count_C < 20, "none")):
            axes.plot(
                table.predicted_C[enough], table.observed_C[enough], linestyle="none", fillstyle=fill, markersize=5,
                label=stage if fill == "full" else None, **look,
            )  # fmt: skip


def errors_figure(
    before: Sequence[Score], after: Sequence[Score], *, paper: pd.DataFrame | None = None, title: str = ""
) -> LabFigure:
    """ECE by position before and after calibration with 95 % intervals (left), AUROC (right).

    `paper` is the table `fig6_summary`, in grey.
    """
    pairs = [(b, a) for b, a in zip(before, after, strict=True) if b.position is not None]
    if not pairs:
        raise ValueError("there is no score of a position")
    k = np.array([b.position for b, _ in pairs])
    words = ", ".join(f"{100 * b.ece:.1f} to {100 * a.ece:.1f} % at {b.position}" for b, a in pairs)
    figure = new_figure(10.5, 3.6, alt=f"Calibration error of survival by position, before and after: {words}.")
    left, right = figure.subplots(1, 2)
    for scores, stage, offset in (([b for b, _ in pairs], "before", -0.12), ([a for _, a in pairs], "after", 0.12)):
        look = LOOKS[stage]
        for axes, quantity in ((left, "ece"), (right, "auroc")):
            _points(axes, k + offset, scores, quantity, stage, look)
    left.plot(k, [100 * a.ece_floor for _, a in pairs], ":", color=BLUE, label="floor: perfect chances")
    if paper is not None:
        left.plot(paper["position"], 100 * paper["ece_before"], "s--", color=GREY, mfc="none", label="paper, before")
        left.plot(paper["position"], 100 * paper["ece_after"], "o--", color=GREY, mfc="none", label="paper, after")
        right.plot(paper["position"], paper["auc"], "o--", color=GREY, mfc="none", label="paper")
    left.axhline(2, color=GREY, linewidth=0.8)
    style_axes(left, xlabel="draft position k", ylabel="ECE of survival, %", title="calibration error")
    style_axes(right, xlabel="draft position k", ylabel="AUROC", title="tells survivors from others")
    right.set_ylim(0.45, 1.0)
    left.set_ylim(bottom=0)
    for axes in (left, right):
        axes.set_xticks(k)
        add_legend(axes, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    if title:
        figure.suptitle(title, x=0.01, ha="left")
    caption(figure, "Held-out prompts. Bars: 95 % over prompts. Grey: the DSpark paper, Figure 6, another target.")
    return figure


def _points(axes: Axes, x: np.ndarray, scores: list[Score], quantity: str, stage: str, look: dict) -> None:
    scale = 100 if quantity == "ece" else 1
    known = [i for i, score in enumerate(scores) if getattr(score, quantity) is not None]
    values = [scale * getattr(scores[i], quantity) for i in known]
    spread = [[0.0] * len(known), [0.0] * len(known)]
    for place, i in enumerate(known):
        low, high = getattr(scores[i], f"{quantity}_low"), getattr(scores[i], f"{quantity}_high")
        if low is not None and high is not None:
            spread[0][place] = max(0.0, values[place] - scale * low)
            spread[1][place] = max(0.0, scale * high - values[place])
    axes.errorbar(
        x[known], values, yerr=spread, linestyle="none", capsize=2, elinewidth=1, markersize=6, label=stage, **look
    )
