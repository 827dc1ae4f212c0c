"""Sequential heads: the collision of parallel guesses, agreement by position, depth and block length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator

from dspec_lab.plots.style import GREY, INK, LabFigure, add_legend, caption, new_figure, series_look, style_axes

FEW = 10  # a share of fewer blocks than this is drawn hollow


def pair_laws(laws: Mapping[str, np.ndarray], words: Sequence[str], *, title: str = "") -> LabFigure:
    """Heat maps of laws over pairs of tokens (first by second), side by side; each entry is a chance."""
    if not laws or any(law.shape != (len(words), len(words)) for law in laws.values()):
        raise ValueError(
            f"laws over pairs of {len(words)} words must be square, got {[v.shape for v in laws.values()]}"
        )
    said = "; ".join(f"{name}: {np.round(law, 2).tolist()}" for name, law in laws.items())
    figure = new_figure(3.1 * len(laws), 3.3, alt=f"Chances of pairs of tokens. {said}.")
    panels = np.atleast_1d(figure.subplots(1, len(laws)))
    for axes, (name, law) in zip(panels, laws.items(), strict=True):
        axes.imshow(law, cmap="Blues", vmin=0, vmax=1)
        for (row, column), chance in np.ndenumerate(law):
            axes.text(column, row, f"{chance:.2f}", ha="center", va="center", color="white" if chance > 0.6 else INK)
        axes.set_xticks(range(len(words)), words)
        axes.set_yticks(range(len(words)), words)
        style_axes(axes, xlabel="second token", ylabel="first token", title=name)
        axes.grid(visible=False)
    if title:
        figure.suptitle(title, x=0.01, ha="left")
    return figure


def agreement_by_position(
    curves: Mapping[str, tuple[np.ndarray, np.ndarray]], *, paper: pd.DataFrame | None = None, domain: str = "math"
) -> LabFigure:
    """Conditional agreement with the target's greedy text by position; `curves` maps a label to (shares, counts).

    Beside it the paper's Figure 2 for `domain` (DFlash and DSpark on Qwen3-4B), another target.
    """
    if not curves:
        raise ValueError("no curve to draw")
    words = "; ".join(f"{name} {np.round(shares, 2).tolist()}" for name, (shares, _) in curves.items())
    figure = new_figure(9.5, 3.6, alt=f"Agreement by position given that all before agree: {words}.")
    left, right = figure.subplots(1, 2, sharey=True)
    for index, (name, (shares, counts)) in enumerate(curves.items()):
        look = series_look(index)
        positions = np.arange(1, len(shares) + 1)
        left.plot(positions, shares, linewidth=1.6, color=look["color"])
        for k, (share, count) in enumerate(zip(shares, counts, strict=True), 1):
            fill = "full" if count >= FEW else "none"
            label = name if k == 1 else None
            left.plot([k], [share], linestyle="none", markersize=6, fillstyle=fill, label=label, **look)
    style_axes(left, xlabel="position k", ylabel="k right, given 1..k-1 right", title="here, greedy")
    add_legend(left, loc="upper right", fontsize=8)
    if paper is not None:
        rows = paper[(paper["domain"] == domain) & paper["drafter"].isin(["DFlash", "DSpark"])]
        if rows.empty:
            raise ValueError(f"the paper's table has no domain {domain!r}; it has {sorted(set(paper['domain']))}")
        for index, (drafter, curve) in enumerate(rows.groupby("drafter", sort=False)):
            look = series_look(index)
            right.plot(curve["position"], curve["conditional_acceptance"], linewidth=1.6, label=drafter, **look)
        add_legend(right, loc="lower left", fontsize=8)
    style_axes(right, xlabel="position k", ylabel="", title=f"paper, Figure 2: Qwen3-4B, {domain}, T = 1")
    left.set_ylim(0, 1.03)
    for axes in (left, right):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    caption(figure, f"Hollow: fewer than {FEW} blocks got there.")
    return figure


def depth_and_length(
    depth: pd.DataFrame, length: pd.DataFrame, ours: Mapping[str, Mapping[int, float]], *, domain: str = "math"
) -> LabFigure:
    """The paper's Figures 3 (layers) and 4 (block length), and our accepted length by draft length.

    `depth` is the table `fig3_depth`, `length` `fig4_block_size`; `ours` maps a label to {draft length: tau}.
    """
    benchmark = {"math": "GSM8K", "code": "HumanEval", "chat": "MT-Bench"}[domain]
    said = "; ".join(f"{name} {dict(curve)}" for name, curve in ours.items())
    figure = new_figure(11.0, 3.5, alt=f"Accepted length by layers, by block length, and here by draft length: {said}.")
    first, second, third = figure.subplots(1, 3)
    rows = depth[depth["benchmark"] == benchmark]
    for index, (method, curve) in enumerate(rows.groupby("method", sort=False)):
        first.plot(curve["layers"], curve["accepted_length"], linewidth=1.6, label=method, **series_look(index))
    style_axes(first, xlabel="draft layers", ylabel="accepted length", title=f"paper, Fig. 3: {benchmark}")
    for index, (method, curve) in enumerate(length[length["domain"] == domain].groupby("method", sort=False)):
        label = method.replace("dspark_", "DSpark, ").replace("dflash", "DFlash")
        second.plot(curve["draft_length"], curve["accepted_length"], linewidth=1.6, label=label, **series_look(index))
    style_axes(second, xlabel="block length", ylabel="", title=f"paper, Fig. 4: {domain}")
    for index, (name, curve) in enumerate(ours.items()):
        third.plot(list(curve), list(curve.values()), linewidth=1.6, label=name, **series_look(index))
    third.axhline(1.0, color=GREY, linestyle="--", linewidth=1.0)
    style_axes(third, xlabel="draft length", ylabel="", title=f"here: {domain}, greedy")
    for axes in (first, second, third):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        add_legend(axes, loc="lower right", fontsize=8)
    caption(
        figure, "Paper: Qwen3-4B, T = 1; each block length is a model of its own. Here: one model, drafts cut short."
    )
    return figure
