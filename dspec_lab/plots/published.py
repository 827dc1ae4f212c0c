"""Published numbers and ours, one line each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dspec_lab.evaluation.published import Compared
from dspec_lab.plots.style import GREY, LabFigure, add_legend, caption, new_figure, series_look, style_axes


def published_figure(groups: Mapping[str, Sequence[Compared]], *, title: str = "") -> LabFigure:
    """A panel a group: the paper's number (grey ring) and ours (with its interval) on one line, names on the left.

    All numbers of a group share one axis and unit. A thin line marks "no effect" where the group has such a value.
    """
    if not groups or not all(groups.values()):
        raise ValueError("every group needs a comparison")
    tallest = max(len(rows) for rows in groups.values())
    words = "; ".join(row.line() for rows in groups.values() for row in rows)
    figure = new_figure(5.4 * len(groups), 1.2 + 0.3 * tallest, alt=f"{title}. " * bool(title) + words)
    look = series_look(0)
    for axes, (name, rows) in zip(np.atleast_1d(figure.subplots(1, len(groups))), groups.items(), strict=True):
        neutral = {row.neutral for row in rows if row.neutral is not None}
        if len(neutral) == 1:
            axes.axvline(neutral.pop(), color=GREY, linewidth=0.8)
        for at, row in enumerate(rows):
            height = len(rows) - at
            axes.plot([row.paper, row.ours], [height, height], color=GREY, linewidth=0.8, zorder=1)
            axes.plot(
                [row.paper], [height], marker="o", fillstyle="none", markersize=7, linestyle="none", color=GREY,
                label="paper" if at == 0 else None,
            )  # fmt: skip
            if row.low is not None:
                axes.plot([row.low, row.high], [height, height], color=look["color"], linewidth=2.2)
            axes.plot([row.ours], [height], linestyle="none", markersize=6, label="here" if at == 0 else None, **look)
        axes.set_yticks(range(len(rows), 0, -1), [row.what for row in rows])
        style_axes(axes, xlabel=rows[0].unit, ylabel="", title=f"{name} ({rows[0].where})", grid="x")
    add_legend(figure.axes[0], loc="upper left", bbox_to_anchor=(1.0, 1.0))
    if title:
        figure.suptitle(title, x=0.01, ha="left")
    caption(
        figure, "Ours: SmolLM2-135M-Instruct, CPU; bars: 95 % over prompts. Paper: arXiv 2607.05147, its own targets."
    )
    return figure
