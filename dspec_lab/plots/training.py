"""The course of a training run: loss, acceptance by position, and held-out measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from dspec_lab.plots.style import GREY, LabFigure, add_legend, caption, new_figure, series_look, style_axes
from dspec_lab.training.budget import Stage
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


def budget_course(stages: Mapping[str, Sequence[Stage]], *, title: str = "") -> LabFigure:
    """Agreement on held-out greedy responses over the positions trained on, one line a drafter and one panel a domain.

    `stages` are each drafter's (`training.budget.read_stages`), oldest first. Drawn are those whose data are the last
    stage's of the first drafter, since other data have other held-out prompts; drafters without such a stage are named
    below. Accepted length of blocks that start anywhere: 1 plus the mean number of leading tokens that agree with the
    target's.
    """
    if not stages or not all(stages.values()):
        raise ValueError("every drafter needs a stage of training")
    data = next(iter(stages.values()))[-1].data
    alike = {name: [stage for stage in each if stage.data == data] for name, each in stages.items()}
    others = [name for name, each in alike.items() if not each]
    alike = {name: each for name, each in alike.items() if each}
    domains = [name for name in next(iter(alike.values()))[-1].history[-1]["measures"] if name != "all"]
    lines = {
        (domain, name): [
            ((stage.first_position + entry["anchors"]) / 1e6, entry["measures"][domain]["tau_greedy"])
            for stage in each
            for entry in stage.history
            if entry["measures"][domain]["tau_greedy"] is not None
        ]
        for domain in domains
        for name, each in alike.items()
    }
    ends = ((*key, *points[-1]) for key, points in lines.items() if points)
    words = "; ".join(
        f"{name} on {domain} {value:.2f} after {millions:.2f} million" for domain, name, millions, value in ends
    )
    figure = new_figure(
        10.5, 3.4, alt=f"{title}. " * bool(title) + f"Accepted length over positions trained on: {words}."
    )
    for at, domain in enumerate(domains):
        axes = figure.add_subplot(1, len(domains), at + 1)
        for index, name in enumerate(alike):
            if points := lines[domain, name]:
                axes.plot(*zip(*points, strict=True), linewidth=1.4, markersize=4, label=name, **series_look(index))
        axes.set_ylim(bottom=1.0)
        style_axes(axes, xlabel="million positions", ylabel="accepted length" if at == 0 else "", title=domain)
    add_legend(figure.axes[0], loc="upper left", bbox_to_anchor=(0.0, -0.24), ncols=len(alike))
    if title:
        figure.suptitle(title, x=0.01, ha="left")
    note = f" Trained on other data, not drawn: {', '.join(others)}." if others else ""
    caption(figure, f"Held-out prompts, greedy responses, blocks that start anywhere.{note}")
    return figure
