"""Acceptance by draft position: prefix survival, and the conditional chance given that all before were accepted."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from dspec_lab.core.acceptance import AcceptanceStats
from dspec_lab.plots.style import GREY, LabFigure, add_legend, caption, new_figure, series_look, style_axes

FEW = 10  # a share of fewer rounds than this is drawn hollow
PAPER_LINES = ("--", ":", "-.")


def acceptance_by_position(
    stats: Mapping[str, AcceptanceStats], *, paper: pd.DataFrame | None = None, domain: str = "math", title: str = ""
) -> LabFigure:
    """Survival (left) and conditional acceptance (right) by position, beside the paper's Figure 2.

    `stats` maps a label to the pooled counts of its rounds. `paper` is the table `fig2_conditional_acceptance`, of
    which the rows of `domain` are drawn; they are another target's (Qwen3-4B), and are labelled so.
    """
    if not stats or all(not s.proposed for s in stats.values()):
        raise ValueError(f"no drafted position in {list(stats)}")
    figure = new_figure(10.5, 3.6, alt=_words(stats, paper, domain))
    left, right = figure.subplots(1, 2, sharey=True)
    for index, (name, s) in enumerate(stats.items()):
        positions = np.arange(1, len(s.proposed) + 1)
        _draw(left, positions, s.survival_by_position, s.proposed, name, index)
        _draw(right, positions, s.accept_by_position, s.reached, name, index)
    if paper is not None:
        draw_paper(right, paper, domain)
    style_axes(left, xlabel="draft position k", ylabel="share of rounds", title="survival: drafts 1..k all accepted")
    style_axes(right, xlabel="draft position k", ylabel="", title="conditional: k accepted given 1..k-1")
    for axes in (left, right):
        axes.set_ylim(0, 1.03)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    # beside the axes, where it hides no point
    add_legend(right, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    if title:
        figure.suptitle(title, x=0.01, ha="left")
    note = f"Position k divides by the rounds that proposed k drafts or more. Hollow: fewer than {FEW} rounds."
    caption(figure, note if paper is None else f"{note} Grey lines: the DSpark paper, Figure 2, another target.")
    return figure


def _draw(
    axes: Axes, positions: np.ndarray, shares: list[float], counts: tuple[int, ...], name: str, index: int
) -> None:
    look = series_look(index)
    values = np.array(shares)
    axes.plot(positions, values, linewidth=1.6, color=look["color"])
    for k, (value, count) in enumerate(zip(values, counts, strict=True), 1):
        axes.plot(
            [k], [value], linestyle="none", markersize=6, **look, fillstyle="full" if count >= FEW else "none",
            label=name if k == 1 else None,
        )  # fmt: skip


def draw_paper(axes: Axes, paper: pd.DataFrame, domain: str) -> None:
    """Add the curves of the paper's Figure 2 for `domain`, in grey; `ValueError` for one that the table lacks."""
    rows = paper[paper["domain"] == domain]
    if rows.empty:
        raise ValueError(f"the paper's table has no domain {domain!r}; it has {sorted(set(paper['domain']))}")
    for index, (drafter, curve) in enumerate(rows.groupby("drafter", sort=False)):
        axes.plot(
            curve["position"], curve["conditional_acceptance"], color=GREY, linewidth=1.4,
            linestyle=PAPER_LINES[index % len(PAPER_LINES)], label=f"paper, Qwen3-4B,\n{domain}: {drafter}",
        )  # fmt: skip


def _words(stats: Mapping[str, AcceptanceStats], paper: pd.DataFrame | None, domain: str) -> str:
    first = "; ".join(
        f"{name} {s.survival_by_position[0]:.2f} at position 1, {s.survival_by_position[-1]:.2f} at {len(s.proposed)}"
        for name, s in stats.items()
        if s.proposed
    )
    beside = "" if paper is None else f" Beside it the DSpark paper's curves for Qwen3-4B on {domain}."
    return f"Prefix survival and conditional acceptance by draft position. Survival: {first}.{beside}"
