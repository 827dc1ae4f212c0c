"""Drafters side by side: accepted length by domain beside the paper's, and whether a round's cost is earned back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from dspec_lab.evaluation.evaluate import EvalRow
from dspec_lab.evaluation.published import IN_PAPER
from dspec_lab.plots.style import GREY, INK, LabFigure, add_legend, caption, new_figure, series_look, style_axes


def accepted_by_drafter(
    rows: Sequence[EvalRow], *, paper: pd.DataFrame | None = None, target: str = "Qwen3-4B", title: str = ""
) -> LabFigure:
    """Accepted length by domain and drafter with 95 % intervals; on the right the paper's Table 1 for `target`.

    `paper` is the table `table1`; its bars are means over a domain's three benchmarks, at temperature 1, and another
    target's, so only the order and the shape compare.
    """
    known = [row for row in rows if row.accepted_length is not None]
    if not known:
        raise ValueError("no row has an accepted length")
    drafters = list(dict.fromkeys(row.drafter for row in known))
    domains = list(dict.fromkeys(row.domain for row in known))
    words = "; ".join(f"{row.drafter} on {row.benchmark} {row.accepted_length:.2f}" for row in known)
    figure = new_figure(10.5, 3.8, alt=f"Accepted length: {words}.")
    panels = np.atleast_1d(
        figure.subplots(1, 1 if paper is None else 2, width_ratios=None if paper is None else (3, 2))
    )
    width = 0.84 / len(drafters)
    for index, name in enumerate(drafters):
        look = series_look(index)
        for row in known:
            if row.drafter != name:
                continue
            at = domains.index(row.domain) + (index - (len(drafters) - 1) / 2) * width
            label = name if row.domain == domains[0] else None
            panels[0].bar(at, row.accepted_length, width=0.92 * width, color=look["color"], label=label)
            if row.accepted_length_low is not None:
                panels[0].plot([at, at], [row.accepted_length_low, row.accepted_length_high], color=INK, linewidth=1.2)
    _domains(panels[0], domains, title="here: SmolLM2-135M-Instruct")
    if paper is not None:
        _draw_paper(panels[1], paper, target, drafters, domains)
    add_legend(panels[0], loc="upper left", bbox_to_anchor=(0.0, -0.12), ncols=min(len(drafters), 7))
    if title:
        figure.suptitle(title, x=0.01, ha="left")
    note = "Tokens per round, the extra token included; lines: 95 % bootstrap over prompts."
    caption(figure, note if paper is None else f"{note} Right: DSpark paper, Table 1, T = 1, another target.")
    return figure


def cost_and_gain(rows: Sequence[EvalRow], *, title: str = "") -> LabFigure:
    """Accepted length against the cost of a round in plain tokens; above the diagonal a drafter is faster.

    A round's cost is what it takes (draft, verify, the loop's own work) over what plain decoding takes for a token.
    """
    known = [row for row in rows if row.accepted_length is not None and row.plain_tokens_per_s > 0]
    if not known:
        raise ValueError("no row has an accepted length and a speed")
    drafters = list(dict.fromkeys(row.drafter for row in known))
    domains = list(dict.fromkeys(row.domain for row in known))
    points = [(_round_cost(row), row.accepted_length) for row in known]
    words = "; ".join(
        f"{row.drafter} on {row.benchmark}: cost {cost:.2f}, gain {tau:.2f}"
        for row, (cost, tau) in zip(known, points, strict=True)
    )
    figure = new_figure(7.5, 4.0, alt=f"Cost of a round in plain tokens and tokens gained: {words}.")
    axes = figure.add_subplot()
    most = 1.1 * max(max(point) for point in points)
    axes.plot([0, most], [0, most], color=GREY, linestyle="--", linewidth=1.2, label="break-even")
    fills = ("full", "none", "left", "right", "top")
    for row, (cost, tau) in zip(known, points, strict=True):
        look = series_look(drafters.index(row.drafter))
        first = row.domain == domains[0]
        fill = fills[domains.index(row.domain) % len(fills)]
        label = row.drafter if first else None
        axes.plot([cost], [tau], linestyle="none", markersize=8, fillstyle=fill, label=label, **look)
    axes.set_xlim(0.8, most)
    axes.set_ylim(0.8, most)
    style_axes(
        axes,
        xlabel="cost of a round, in plain tokens",
        ylabel="accepted length (tokens a round)",
        title=title,
        grid="both",
    )
    add_legend(axes, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    marks = ", ".join(f"{domain}: {fills[i % len(fills)]}" for i, domain in enumerate(domains))
    caption(figure, f"Above the line a drafter is faster than plain decoding. Marker fill: {marks}.")
    return figure


def _round_cost(row: EvalRow) -> float:
    return (row.draft_ms + row.verify_ms + row.overhead_ms) * row.plain_tokens_per_s / 1e3


def _domains(axes: Axes, domains: Sequence[str], *, title: str) -> None:
    axes.axhline(1.0, color=GREY, linestyle="--", linewidth=1.0)
    axes.set_xticks(range(len(domains)), domains)
    style_axes(axes, xlabel="", ylabel="accepted length (tokens a round)", title=title)


def _draw_paper(axes: Axes, paper: pd.DataFrame, target: str, drafters: Sequence[str], domains: Sequence[str]) -> None:
    table = paper[paper["target"] == target]
    if table.empty:
        raise ValueError(f"the paper's table has no target {target!r}; it has {sorted(set(paper['target']))}")
    means = table.groupby(["drafter", "domain"])["accepted_length"].mean()
    shared = [name for name in drafters if name in IN_PAPER] or list(IN_PAPER)
    width = 0.84 / len(shared)
    for index, name in enumerate(shared):
        look = series_look(drafters.index(name) if name in drafters else index)
        heights = [means.get((IN_PAPER[name], domain), np.nan) for domain in domains]
        at = np.arange(len(domains)) + (index - (len(shared) - 1) / 2) * width
        axes.bar(at, heights, width=0.92 * width, color=look["color"], hatch="//", edgecolor="white", label=name)
    _domains(axes, domains, title=f"paper: {target}")
