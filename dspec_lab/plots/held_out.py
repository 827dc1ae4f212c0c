"""Held-out calibration by domain and method, and how well different signals tell good drafts."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from dspec_lab.calibration.held_out import GOAL_AREA, GOAL_ERROR, DomainScores
from dspec_lab.calibration.signals import SIGNALS, SignalArea
from dspec_lab.plots.style import GREY, LabFigure, add_legend, caption, new_figure, series_look, style_axes

SIGNAL_WORDS = {
    "confidence": "confidence",
    "draft_entropy": "draft's entropy",
    "both": "both, fitted",
    "chance": "1 - TV: the ceiling",
}


def held_out_figure(
    scores: Sequence[DomainScores], areas: Sequence[SignalArea], *, position: int = 1, title: str = ""
) -> LabFigure:
    """Left: mean ECE of survival by domain, before and after each method. Right: AUROC of signals at one position.

    Bars are 95 % over prompts. `scores` hold one fit of each domain and method.
    """
    chosen = [area for area in areas if area.position == position]
    if not scores or not chosen:
        raise ValueError(f"need scores and areas at position {position}, got {len(scores)} and {len(chosen)}")
    domains = list(dict.fromkeys(s.domain for s in scores))
    methods = list(dict.fromkeys(s.method for s in scores))
    if len(scores) != len(domains) * len(methods):
        raise ValueError(f"{len(scores)} scores for {len(domains)} domains and {len(methods)} methods")
    words = "; ".join(
        f"{s.domain}, {s.method}: {100 * s.mean_before.estimate:.1f} to {100 * s.mean_after.estimate:.1f} %"
        for s in scores
    )
    told = "; ".join(f"{a.domain}, {SIGNAL_WORDS[a.signal]}: {a.auroc:.2f}" for a in chosen)
    alt = f"Mean held-out ECE before and after calibration. {words}. AUROC at position {position}. {told}."
    figure = new_figure(11.0, 3.8, alt=alt)
    left, right = figure.subplots(1, 2)
    by_key = {(s.domain, s.method): s for s in scores}
    before = [by_key[domain, methods[0]].mean_before for domain in domains]
    _points(left, [(100 * m.estimate, 100 * m.low, 100 * m.high) for m in before], 0, len(methods) + 1, "before")
    for index, method in enumerate(methods, 1):
        after = [by_key[domain, method].mean_after for domain in domains]
        values = [(100 * m.estimate, 100 * m.low, 100 * m.high) for m in after]
        _points(left, values, index, len(methods) + 1, f"after, {method}")
    left.axhline(100 * GOAL_ERROR, color=GREY, linewidth=1, linestyle="--", label=f"{100 * GOAL_ERROR:.0f} %")
    told_of = list(dict.fromkeys(a.domain for a in chosen))
    for index, signal in enumerate(SIGNALS):
        mine = {a.domain: a for a in chosen if a.signal == signal}
        values = [(mine[d].auroc, mine[d].low, mine[d].high) for d in told_of]
        _points(right, values, index, len(SIGNALS), SIGNAL_WORDS[signal])
    right.axhline(GOAL_AREA, color=GREY, linewidth=1, linestyle="--", label=f"{GOAL_AREA:g}")
    left.set_xticks(range(len(domains)), domains)
    right.set_xticks(range(len(told_of)), told_of)
    left.set_ylim(0, None)
    style_axes(left, xlabel="judged on", ylabel="mean ECE of survival, %", title="held-out calibration error")
    style_axes(right, xlabel="judged on", ylabel="AUROC", title=f"verdict on draft {position}")
    for axes in (left, right):
        add_legend(axes, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    if title:
        figure.suptitle(title, x=0.01, ha="left")
    caption(figure, "Every prompt is judged by maps fitted on other prompts. Bars: 95 % over prompts.")
    return figure


def _points(axes: Axes, values: Sequence[tuple[float, float, float]], index: int, count: int, label: str) -> None:
    at = [x + 0.6 * ((index + 0.5) / count - 0.5) for x in range(len(values))]
    spread = [[max(0.0, v - low) for v, low, _ in values], [max(0.0, high - v) for v, _, high in values]]
    look = series_look(index)
    axes.errorbar(
        at, [v for v, _, _ in values], yerr=spread, linestyle="none", capsize=2, elinewidth=1, label=label, **look
    )
