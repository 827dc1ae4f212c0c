"""The sweep over confidence thresholds: tokens kept and wasted, acceptance, speed; the paper's Figure 5 beside."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from dspec_lab.evaluation.thresholds import ThresholdRow, best_threshold
from dspec_lab.plots.style import (
    BLUE,
    GREEN,
    GREY,
    VERMILION,
    LabFigure,
    add_legend,
    caption,
    new_figure,
    style_axes,
)


def threshold_figure(
    rows: Sequence[ThresholdRow],
    *,
    chosen: float | None = None,
    paper: pd.DataFrame | None = None,
    domain: str = "chat",
    title: str = "",
) -> LabFigure:
    """Tokens per round (left), tokens gained per row sent (middle), tokens per second by measured cost (right).

    `chosen` marks one threshold. `paper` is the table of the paper's Figure 5, of which `domain` is drawn in grey; its
    "acceptance rate" is tokens gained per row sent, and whether its threshold is on survival is not said.
    """
    if not rows:
        raise ValueError("the sweep has no row")
    timed = all(row.tokens_per_s is not None for row in rows)
    best = best_threshold(rows) if timed else None
    figure = new_figure(11.5 if timed else 8.5, 3.7, alt=_words(rows, best))
    # fixed margins: working them out anew takes a quarter of the drawing, and the panel redraws with each change
    figure.set_layout_engine(None)
    axes = figure.subplots(1, 3 if timed else 2)
    figure.subplots_adjust(left=0.04, right=0.99, top=0.84, bottom=0.36, wspace=0.14)
    x = [row.threshold for row in rows]
    kept = [row.accepted for row in rows]
    axes[0].stackplot(
        x, kept, [row.rejected for row in rows], colors=["#BFE3F7", "#FFD9B8"],
        labels=["gained, extra token included", "rejected"],
    )  # fmt: skip
    axes[0].plot(x, kept, color=BLUE, linewidth=1.5)
    axes[1].plot(x, [row.verify_rate for row in rows], color=BLUE, linewidth=1.8, label="ours: gained per row sent")
    some = [row for row in rows if row.accept_rate is not None]
    axes[1].plot(
        [row.threshold for row in some], [row.accept_rate for row in some], "--", color=GREEN, linewidth=1.4,
        label="ours: accepted per draft sent",
    )  # fmt: skip
    if paper is not None:
        part = paper[paper["domain"] == domain]
        if part.empty:
            raise ValueError(f"the paper's table has no domain {domain!r}; it has {sorted(set(paper['domain']))}")
        axes[0].plot(
            part["threshold"], part["accepted_tokens_per_step"], ":", color=GREY, label=f"paper, {domain}: gained"
        )
        axes[1].plot(part["threshold"], part["acceptance_rate"], ":", color=GREY, label=f"paper, {domain}")
    axes[1].set_ylim(0, 1.02)
    titles = ["tokens per round", "share that was worth it", "tokens per second"]
    if best is not None:
        axes[2].plot(x, [row.tokens_per_s for row in rows], color=BLUE, linewidth=1.8, label="ours, measured cost")
        axes[2].plot([best.threshold], [best.tokens_per_s], "D", color=VERMILION, label=f"best: {best.threshold:g}")
        axes[2].set_ylim(bottom=0)
    for place, name in zip(axes, titles, strict=False):
        style_axes(place, xlabel="threshold on survival", ylabel="", title=name)
        # text is what takes time to draw
        place.locator_params(nbins=5)
        if chosen is not None:
            place.axvline(chosen, color=GREY, linewidth=1, linestyle="--")
        # below the axes, where it hides no curve
        add_legend(place, loc="upper left", bbox_to_anchor=(0.0, -0.22), fontsize=8)
    if title:
        figure.suptitle(title, x=0.01, ha="left")
    beside = "" if paper is None else " Grey: the DSpark paper, Figure 5, another target."
    caption(figure, f"Recorded whole blocks, cut after the fact.{beside}")
    return figure


def _words(rows: Sequence[ThresholdRow], best: ThresholdRow | None) -> str:
    first, last = rows[0], rows[-1]
    text = (
        f"Threshold {first.threshold:g} to {last.threshold:g}: tokens gained per round {first.accepted:.2f} to "
        f"{last.accepted:.2f}, rejected {first.rejected:.2f} to {last.rejected:.2f}, gained per row sent "
        f"{first.verify_rate:.2f} to {last.verify_rate:.2f}."
    )
    return text if best is None else f"{text} Fastest at {best.threshold:g}, {best.tokens_per_s:.1f} tokens per second."
