"""The course of a training run: loss, acceptance by position, and held-out measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from dspec_lab.plots.style import GREY, LabFigure, add_legend, caption, new_figure, series_look, style_axes
from dspec_lab.training.fit import StepReport


def training_course(
    steps: Sequence[StepReport], validations: Mapping[int, Mapping[str, Any]], *, title: str = ""
) -> LabFigure:
    """Loss (left) and chance of acceptance by position (right) over optimiser steps.

    Lines are running means of the training batches (they restart every 20 steps); markers are the held-out prompts,
    `all` domains, positions alike in colour. Chance of acceptance: 1 - TV at temperature 1, given the true prefix.
    """
    if not steps:
        raise ValueError("no step to draw")
    number = np.array([report.step for report in steps])
    positions = max(len(report.accept_rate) for report in steps)
    last = steps[-1].accept_rate
    words = ", ".join(f"{rate:.2f}" for rate in last)
    alt = (
        f"{title}. " * bool(title) + f"Training loss falls from {steps[0].loss:.2f} to {steps[-1].loss:.2f} in "
        f"{number[-1]} steps; acceptance by position at the end: {words}."
    )
    figure = new_figure(10.0, 3.4, alt=alt)
    left, right = figure.subplots(1, 2)
    left.plot(number, [report.loss for report in steps], color=GREY, linewidth=1.4)
    style_axes(left, xlabel="optimiser step", ylabel="loss", title="training loss")
    for k in range(positions):
        rates = [report.accept_rate[k] if k < len(report.accept_rate) else np.nan for report in steps]
        look = series_look(k)
        right.plot(number, rates, color=look["color"], linewidth=1.4, label=f"position {k + 1}")
        held_out = [(step, row["all"]["accept_rate"][k]) for step, row in validations.items() if "all" in row]
        known = [(step, rate) for step, rate in held_out if rate is not None]
        if known:
            right.plot(*zip(*known, strict=True), linestyle="none", markersize=6, **look)
    style_axes(right, xlabel="optimiser step", ylabel="chance of acceptance, 1 - TV", title="acceptance at T = 1")
    right.set_ylim(bottom=0)
    right.xaxis.set_major_locator(MaxNLocator(integer=True))
    add_legend(right, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    if title:
        figure.suptitle(title, x=0.01, ha="left")
    caption(figure, "Lines: training batches, running mean. Markers: held-out prompts.")
    return figure
