"""When speculation pays: the break-even map over acceptance, cost of drafting and load, and verdicts with intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import BoundaryNorm

from dspec_lab.evaluation.worth import Worth
from dspec_lab.plots.style import (
    GREEN,
    GREY,
    INK,
    VERMILION,
    LabFigure,
    add_legend,
    caption,
    new_figure,
    series_look,
    style_axes,
)
from dspec_lab.scheduler.break_even import BreakEvenMap

LOOKS = {"yes": (GREEN, "o"), "no": (VERMILION, "X"), "unsettled": (GREY, "s"), "texts differ": (INK, "P")}
SPEEDS = (0.4, 0.55, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 3.0)  # 1 in the middle, where the colours turn
COLOURS = colormaps["RdBu"]
LABEL_STEP = 0.05  # of the axis of acceptance between two names


def break_even_figure(
    maps: Sequence[BreakEvenMap],
    *,
    shown: int = 0,
    points: Mapping[str, tuple[float, float, str]] | None = None,
    title: str = "",
) -> LabFigure:
    """Left: speed-up at the load of `maps[shown]`. Right: acceptance needed by load, for three costs of drafting.

    `points`: name -> (acceptance, seconds of drafting, answer of a verdict), drawn on the left.
    """
    if not maps:
        raise ValueError("no break-even map to draw")
    here = maps[shown]
    draft_ms_Q = 1e3 * here.draft_s_Q
    first, last = here.break_even_Q[0], here.break_even_Q[-1]
    words = (
        f"Speed-up by acceptance and cost of drafting at {here.requests} requests: break-even at {_needed(first)} with "
        f"free drafts, {_needed(last)} where a block costs {draft_ms_Q[-1]:.0f} ms."
    )
    figure = new_figure(10.5, 4.0, alt=words)
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    filled = left.contourf(
        draft_ms_Q,
        here.accept_P,
        here.speedup_PQ,
        levels=SPEEDS,
        cmap=COLOURS,
        norm=BoundaryNorm(SPEEDS, COLOURS.N, extend="both"),
        extend="both",
        alpha=0.75,
    )
    if here.speedup_PQ.min() < 1 < here.speedup_PQ.max():
        left.contour(draft_ms_Q, here.accept_P, here.speedup_PQ, levels=[1.0], colors=INK, linewidths=2)
    figure.colorbar(filled, ax=left, label="tokens per second over plain")
    label_at = -1.0
    for name, (accept, draft_s, answer) in sorted((points or {}).items(), key=lambda item: item[1][0]):
        colour, marker = LOOKS[answer]
        label_at = max(accept, label_at + LABEL_STEP)
        left.plot([1e3 * draft_s], [accept], marker=marker, color=colour, markersize=8, markeredgecolor="white")
        left.annotate(
            name, (1e3 * draft_s, accept), xytext=(1e3 * draft_s + 0.05 * draft_ms_Q[-1], label_at), fontsize=7,
            color=INK, va="center", arrowprops={"arrowstyle": "-", "color": INK, "linewidth": 0.6},
        )  # fmt: skip
    style_axes(
        left, xlabel="drafting a block, ms a request", ylabel="acceptance of each draft",
        title=f"{here.requests} request{'s' * (here.requests != 1)}; line: break-even",
    )  # fmt: skip
    left.set_ylim(0, 1)
    loads = [entry.requests for entry in maps]
    for index, at in enumerate((0, len(draft_ms_Q) // 4, len(draft_ms_Q) // 2)):
        needed = [entry.break_even_Q[at] for entry in maps]
        right.plot(loads, needed, label=f"{draft_ms_Q[at]:.0f} ms a block", **series_look(index))
    style_axes(right, xlabel="requests in the batch", ylabel="acceptance needed", title="by load")
    right.set_ylim(0, 1.02)
    right.set_xscale("log", base=2)
    right.set_xticks(loads, [str(n) for n in loads])
    add_legend(right)
    if title:
        figure.suptitle(title, x=0.01, ha="left")
    caption(figure, "The best block length everywhere. Where a line on the right ends, no acceptance is enough.")
    return figure


def worth_figure(found: Sequence[Worth], *, title: str = "") -> LabFigure:
    """Speed-up with its interval by set of prompts, one line each; colour and marker tell the verdict."""
    if not found:
        raise ValueError("no verdict to draw")
    words = "; ".join(f"{w.drafter} on {w.prompts_of}: {w.speedup:.2f}, {w.answer}" for w in found)
    figure = new_figure(8.0, 1.4 + 0.28 * len(found), alt=f"Speed-up over plain decoding: {words}.")
    axes = figure.add_subplot()
    axes.axvline(1.0, color=INK, linestyle="--", linewidth=1.2)
    told = set()
    for row, entry in enumerate(found):
        colour, marker = LOOKS[entry.answer]
        label = None if entry.answer in told else entry.answer
        told.add(entry.answer)
        if entry.low is not None:
            axes.plot([entry.low, entry.high], [row, row], color=colour, linewidth=2)
        axes.plot([entry.speedup], [row], marker=marker, color=colour, linestyle="none", markersize=7, label=label)
    axes.set_yticks(range(len(found)), [f"{entry.drafter}, {entry.prompts_of}" for entry in found])
    axes.invert_yaxis()
    style_axes(axes, xlabel="tokens per second over plain decoding", ylabel="", title=title, grid="x")
    add_legend(axes, title="worth it here?", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    caption(figure, "Lines: 95 % bootstrap over prompts, widened by the spread of the timed repeats.")
    return figure


def _needed(accept: float) -> str:
    return "no acceptance" if np.isnan(accept) else f"{accept:.2f}"
