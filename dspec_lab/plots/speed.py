"""Measured tokens per second of plain decoding and of drafters, with their spread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dspec_lab.plots.style import FONT_SIZE, GREY, INK, SKY, LabFigure, caption, new_figure, style_axes


def speed_bars(
    rates: Mapping[str, Sequence[float]],
    *,
    threads: int,
    verdicts: Mapping[str, str],
    plain: str = "plain",
    title: str = "",
) -> LabFigure:
    """Bars of the median rate, each run a dot, and the ratio to plain decoding; rates in tokens per second.

    `verdicts` says for each drafter how its output compared with plain decoding: a speed is shown beside it only.
    """
    if plain not in rates:
        raise ValueError(f"the rates of {plain!r} are missing among {list(rates)}")
    for name, values in rates.items():
        if not len(values) or not np.isfinite(values).all() or min(values) <= 0:
            raise ValueError(f"rates must be positive numbers, got {list(values)} for {name}")
        if name != plain and name not in verdicts:
            raise ValueError(f"no verdict on the output of {name}: its speed is not shown")
    medians = {name: float(np.median(values)) for name, values in rates.items()}
    words = "; ".join(f"{name} {median:.1f}" for name, median in medians.items())
    figure = new_figure(8.0, 1.3 + 0.5 * len(rates), alt=f"Median tokens per second: {words}.")
    axes = figure.add_subplot()
    fastest = max(max(values) for values in rates.values())
    for row, (name, values) in enumerate(rates.items()):
        is_plain = name == plain
        look = {"color": GREY} if is_plain else {"color": SKY, "hatch": "//"}
        axes.barh(row, medians[name], height=0.6, edgecolor="white", **look)
        axes.plot(values, [row] * len(values), linestyle="none", marker="|", markersize=11, color=INK)
        ratio = "baseline" if is_plain else f"{medians[name] / medians[plain]:.2f}x; {verdicts[name]}"
        note = f"{medians[name]:.1f}  ({ratio})"
        axes.text(max(values) + 0.02 * fastest, row, note, va="center", fontsize=FONT_SIZE - 1, color=INK)
    axes.set_yticks(range(len(rates)), list(rates))
    axes.invert_yaxis()
    axes.set_xlim(0, 1.6 * fastest)
    style_axes(axes, xlabel="tokens per second, after the prompt pass", ylabel="", title=title, grid="x")
    runs = sorted({len(values) for values in rates.values()})
    count = str(runs[0]) if len(runs) == 1 else f"{runs[0]} to {runs[-1]}"
    what = "one run" if count == "1" else f"median of {count} runs, each a tick"
    caption(figure, f"Bar: {what}. {threads} thread{'s' * (threads != 1)}.")
    return figure
