"""Acceptance by entropy, beside what theory expects of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dspec_lab.evaluation.entropy import SURE_LAW, WIDE_LAW, EntropyBin, Whose, entropy_bits
from dspec_lab.plots.style import GREY, LabFigure, add_legend, caption, new_figure, series_look, style_axes


def acceptance_by_entropy(
    bins: Mapping[str, Sequence[EntropyBin]], *, whose: Whose = "target", title: str = ""
) -> LabFigure:
    """Share accepted by mean entropy, with 95 % intervals over prompts, and the line 1 - TV of the same drafts.

    `bins` maps a label (a domain, a temperature) to its bins. Two marks stand at the entropies of a law (0.9, 0.1)
    and of ten equal chances.
    """
    if not bins or not all(bins.values()):
        raise ValueError(f"there is a label without bins among {list(bins)}")
    words = "; ".join(
        f"{name}: {rows[0].accepted:.2f} at {rows[0].entropy:.1f} bits, {rows[-1].accepted:.2f} at "
        f"{rows[-1].entropy:.1f} bits"
        for name, rows in bins.items()
    )
    figure = new_figure(8.6, 3.8, alt=f"Share of drafts accepted by the {whose}'s entropy. {words}.")
    # fixed margins, with room for the legend: working them out anew slows the panel's redraws
    figure.set_layout_engine(None)
    axes = figure.add_subplot()
    figure.subplots_adjust(left=0.075, right=0.74, top=0.8, bottom=0.21)
    for index, (name, rows) in enumerate(bins.items()):
        look, x, y = series_look(index), [row.entropy for row in rows], [row.accepted for row in rows]
        # without an interval (one prompt) the bar has no length
        below = [row.accepted - (row.accepted if row.accepted_low is None else row.accepted_low) for row in rows]
        above = [(row.accepted if row.accepted_high is None else row.accepted_high) - row.accepted for row in rows]
        limits = [[max(0.0, value) for value in side] for side in (below, above)]
        bars = {"linestyle": "none", "markersize": 6, "capsize": 2, "elinewidth": 1, **look}
        axes.errorbar(x, y, yerr=limits, label=f"{name}: accepted", **bars)
        theory = [(row.entropy, row.accept_prob) for row in rows if row.accept_prob is not None]
        if theory:
            axes.plot(*zip(*theory, strict=True), linewidth=1.5, color=look["color"], label=f"{name}: theory, 1 - TV")
    for law, word in ((SURE_LAW, "0.9 / 0.1"), (WIDE_LAW, "ten alike")):
        bits = entropy_bits(law)
        axes.axvline(bits, color=GREY, linestyle=":", linewidth=1.2)
        axes.text(bits, 1.02, f" {word}\n {bits:.2f} bits", fontsize=8, color=GREY, va="bottom")
    axes.set_ylim(0, 1.02)
    axes.set_xlim(left=0)
    style_axes(axes, xlabel=f"{whose}'s entropy at temperature 1, bits", ylabel="share of drafts accepted")
    add_legend(axes, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    if title:
        figure.suptitle(title, x=0.01, ha="left")
    caption(figure, "Drafts that the verifier reached, in bins of equally many. Bars: 95 % over prompts.")
    return figure
