"""The two figures of the demo: speed-up by domain, and prefix survival by position and domain."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.ticker import MaxNLocator

from dspec_lab.evaluation.evaluate import EvalRow
from dspec_lab.evaluation.report import verdict_text
from dspec_lab.plots.style import (
    FONT_SIZE,
    GREY,
    INK,
    LabFigure,
    add_legend,
    caption,
    new_figure,
    series_look,
    style_axes,
)


def speed_figure(rows: Sequence[EvalRow]) -> LabFigure:
    """Speed-up over the lean plain loop, a group of bars per benchmark, with its spread and the equality verdict."""
    benchmarks, drafters = _names(rows)
    words = "; ".join(f"{row.drafter} on {row.benchmark} {row.speedup:.2f}" for row in rows)
    figure = new_figure(8.5, 1.8 + 0.34 * len(rows), alt=f"Speed-up over plain decoding: {words}.")
    axes = figure.add_subplot()
    place, ticks = 0.0, []
    widest = max(row.speedup_max for row in rows)
    for benchmark in benchmarks:
        mine = [row for row in rows if row.benchmark == benchmark]
        ticks.append(place + (len(mine) - 1) / 2)
        for row in mine:
            look = series_look(drafters.index(row.drafter))
            label = row.drafter if benchmark == benchmarks[0] else None
            axes.barh(place, row.speedup, height=0.8, color=look["color"], edgecolor="white", label=label)
            axes.plot([row.speedup_min, row.speedup_max], [place, place], color=INK, linewidth=1.2, marker="|")
            note = f"{row.speedup:.2f}x, equal: {verdict_text(row.outputs_equal_plain, row.max_flip_gap)}"
            axes.text(row.speedup_max + 0.02 * widest, place, note, va="center", fontsize=FONT_SIZE - 2, color=INK)
            place += 1
        place += 0.6
    axes.axvline(1.0, color=GREY, linestyle="--", linewidth=1.2)
    axes.set_yticks(ticks, benchmarks)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.45 * max(1.0, widest))
    style_axes(axes, xlabel="tokens per second over those of the lean plain loop", ylabel="", grid="x")
    add_legend(axes, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(drafters))
    caption(figure, f"Bar: median over repeats; line: least to most. {rows[0].dtype}; prefill left out.")
    return figure


def acceptance_figure(rows: Sequence[EvalRow]) -> LabFigure:
    """Prefix survival by draft position, a panel per benchmark and a line per drafter."""
    benchmarks, drafters = _names(rows)
    words = "; ".join(
        f"{row.drafter} on {row.benchmark} accepted length "
        + ("unknown" if row.accepted_length is None else f"{row.accepted_length:.2f}")
        for row in rows
    )
    figure = new_figure(3.4 * len(benchmarks), 3.6, alt=f"Survival of drafts by position: {words}.")
    panels = np.atleast_1d(figure.subplots(1, len(benchmarks), sharey=True))
    for panel, benchmark in zip(panels, benchmarks, strict=True):
        for row in rows:
            if row.benchmark != benchmark or not row.survival_by_position:
                continue
            length = "" if row.accepted_length is None else f"  (tau {row.accepted_length:.2f})"
            positions = np.arange(1, len(row.survival_by_position) + 1)
            look = series_look(drafters.index(row.drafter))
            panel.plot(positions, row.survival_by_position, linewidth=1.6, label=f"{row.drafter}{length}", **look)
        panel.set_ylim(0, 1.03)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        ylabel = "share of rounds with drafts 1..k accepted" if panel is panels[0] else ""
        style_axes(panel, xlabel="draft position k", ylabel=ylabel, title=benchmark)
        if panel.get_legend_handles_labels()[0]:
            add_legend(panel, loc="upper right", fontsize=8)
    caption(figure, "Among the rounds that proposed k drafts or more. tau: tokens per round, the extra token included.")
    return figure


def _names(rows: Sequence[EvalRow]) -> tuple[list[str], list[str]]:
    if not rows:
        raise ValueError("no rows to draw")
    return list(dict.fromkeys(row.benchmark for row in rows)), list(dict.fromkeys(row.drafter for row in rows))
