"""How many tokens each round gained, round by round and as a histogram."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from dspec_lab.core.acceptance import acceptance_stats
from dspec_lab.core.types import RoundRecord
from dspec_lab.plots.style import (
    BLUE,
    FONT_SIZE,
    GREY,
    INK,
    ORANGE,
    SERIES,
    LabFigure,
    add_legend,
    caption,
    new_figure,
    style_axes,
    whole_ticks,
)

HATCHES = ("", "//", "..", "xx", "\\\\", "++")


def accepted_per_round(rounds: Sequence[RoundRecord], *, title: str = "") -> LabFigure:
    """Bars of the tokens gained in each round: accepted drafts, the extra token on top, and what was drafted."""
    tau = _accepted_length(rounds)
    alt = f"{title}. " * bool(title) + f"Tokens gained in each of {len(rounds)} rounds; mean {tau:.2f} tokens a round."
    figure = new_figure(8.0, 3.0, alt=alt)
    draw_accepted_per_round(figure.add_subplot(), rounds, title=title)
    caption(figure, "Extra token, the target's own: a replacement at the first rejection, a bonus after a full block.")
    return figure


def draw_accepted_per_round(axes: Axes, rounds: Sequence[RoundRecord], *, title: str = "") -> None:
    """Draw the bars of `accepted_per_round` into `axes`."""
    tau = _accepted_length(rounds)
    x = np.arange(1, len(rounds) + 1)
    # an accepted end token is the last of its round, which then has no extra one
    kept = np.array([min(r.num_accepted, r.num_committed) for r in rounds])
    extra = np.array([r.num_committed for r in rounds]) - kept
    drafted = np.array([r.gamma for r in rounds])
    axes.bar(x, kept, color=BLUE, width=0.75, label="accepted drafts")
    axes.bar(x, extra, bottom=kept, color=ORANGE, hatch="//", edgecolor="white", width=0.75, label="extra token")
    axes.plot(x, drafted, linestyle="none", marker="_", markersize=9, markeredgewidth=1.6, color=INK, label="drafted")
    axes.axhline(tau, color=GREY, linestyle="--", linewidth=1.2, label=f"mean gained: {tau:.2f}")
    axes.set_xlim(0.4, len(rounds) + 0.6)
    axes.set_ylim(0, max(int(drafted.max()), int((kept + extra).max())) * 1.08 + 0.3)
    axes.set_xticks(whole_ticks(1, len(rounds), 16))
    style_axes(axes, xlabel="round", ylabel="tokens")
    if title:
        axes.set_title(title, fontsize=FONT_SIZE + 1, color=INK, loc="left", pad=22)
    add_legend(axes, ncols=4, loc="lower left", bbox_to_anchor=(0, 1.0), borderaxespad=0.1)


def accepted_histogram(rounds_by_drafter: Mapping[str, Sequence[RoundRecord]], *, title: str = "") -> LabFigure:
    """Share of rounds that gained 1, 2, ... tokens, for each drafter, with its accepted length."""
    if not rounds_by_drafter:
        raise ValueError("no drafter to draw a histogram of")
    taus = {name: _accepted_length(rounds) for name, rounds in rounds_by_drafter.items()}
    words = ", ".join(f"{name} {tau:.2f}" for name, tau in taus.items())
    figure = new_figure(8.0, 3.2, alt=f"Histogram of tokens gained per round; accepted length: {words}.")
    axes = figure.add_subplot()
    widest = max(r.num_committed for rounds in rounds_by_drafter.values() for r in rounds)
    width = 0.8 / len(rounds_by_drafter)
    x = np.arange(1, widest + 1)
    for index, (name, rounds) in enumerate(rounds_by_drafter.items()):
        counts = Counter(r.num_committed for r in rounds)
        share = np.array([counts[value] / len(rounds) for value in x])
        at = x + (index - (len(rounds_by_drafter) - 1) / 2) * width
        axes.bar(
            at, share, width=width * 0.95, color=SERIES[index % len(SERIES)], hatch=HATCHES[index % len(HATCHES)],
            edgecolor="white", label=f"{name}: mean {taus[name]:.2f}, {len(rounds)} rounds",
        )  # fmt: skip
    axes.set_xticks(whole_ticks(1, widest, 16))
    axes.set_ylim(0, 1.05)
    style_axes(axes, xlabel="tokens gained in a round, the extra token included", ylabel="share of rounds", title=title)
    add_legend(axes, loc="upper right")
    return figure


def _accepted_length(rounds: Sequence[RoundRecord]) -> float:
    if not rounds:
        raise ValueError("no rounds to draw: 0 were given")
    return acceptance_stats(rounds).accepted_length
