"""Why the output law is the target's: the accepted part, the residual, and their sum; and rules that get it wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from torch import Tensor

from dspec_lab.core.acceptance import accept_rate
from dspec_lab.core.rejection import residual_probs
from dspec_lab.plots.style import (
    BLUE,
    FONT_SIZE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    VERMILION,
    LabFigure,
    add_legend,
    caption,
    new_figure,
    style_axes,
)
from dspec_lab.verifier.rule_gain import RuleGain

FLOOR = 1e-17  # where an exact zero stands on the log axis


def residual_picture(
    target_V: Float[Tensor, " V"], draft_V: Float[Tensor, " V"], tokens: Sequence[str], *, title: str = ""
) -> LabFigure:
    """Four panels: p_t and p_d; the accepted part min(p_t, p_d); the residual; accepted + rejected x residual."""
    if len(tokens) != target_V.shape[0] or target_V.shape != draft_V.shape:
        raise ValueError(f"{len(tokens)} tokens for laws of {target_V.shape[0]} and {draft_V.shape[0]} entries")
    p, q = target_V.double(), draft_V.double()
    kept = p.minimum(q)
    rate = float(accept_rate(p[None], q[None])[0])
    residual = residual_probs(p[None], q[None])[0].numpy()
    p, q, kept = p.numpy(), q.numpy(), kept.numpy()
    alt = (
        f"Laws of target and drafter over {len(tokens)} tokens. Accepted mass {rate:.3f}; the rejected rest is drawn "
        f"from the residual, and the two parts add up to the target's law."
    )
    figure = new_figure(10.0, 3.3, alt=alt)
    panels = figure.subplots(1, 4, sharey=True)
    x = np.arange(len(tokens))
    panels[0].bar(x - 0.2, p, width=0.38, color=BLUE, label="target, p_t")
    panels[0].bar(x + 0.2, q, width=0.38, color=ORANGE, hatch="//", edgecolor="white", label="drafter, p_d")
    panels[1].bar(x, kept, width=0.6, color=GREEN, label=f"min(p_t, p_d)\nsum {rate:.3f} = 1 - TV")
    refill = {"color": VERMILION, "hatch": "..", "edgecolor": "white", "width": 0.6}
    panels[2].bar(x, residual, label="max(p_t - p_d, 0),\nnormalised", **refill)
    panels[3].bar(x, kept, width=0.6, color=GREEN, label="accepted")
    panels[3].bar(x, (1 - rate) * residual, bottom=kept, label=f"{1 - rate:.3f} x residual", **refill)
    panels[3].plot(x, p, linestyle="none", marker="_", markersize=16, markeredgewidth=2, color=INK, label="p_t")
    names = ("the two laws", "accepted as drafted", "law of the replacement", "what comes out")
    for axes, name in zip(panels, names, strict=True):
        style_axes(axes, xlabel="token", ylabel="probability" if axes is panels[0] else "", title=name)
        axes.set_xticks(x, tokens)
        add_legend(axes, loc="upper right", fontsize=FONT_SIZE - 2)
    panels[0].set_ylim(0, 1.45 * float(max(p.max(), q.max(), residual.max())))
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=FONT_SIZE + 1)
    return figure


def gain_curves(gains: Mapping[int, RuleGain], *, title: str = "") -> LabFigure:
    """Expected tokens per round over the draft length, token-wise, by blocks, and the bound of any lossless rule."""
    if not gains:
        raise ValueError("no draft length was given")
    lengths = sorted(gains)
    last = gains[lengths[-1]]
    alt = (
        f"Expected tokens per round for {lengths[0]} to {lengths[-1]} drafts; at {lengths[-1]}: token-wise "
        f"{last.token:.3f}, by blocks {last.block:.3f}, at most {last.bound:.3f}."
    )
    figure = new_figure(6.4, 3.4, alt=alt)
    axes = figure.add_subplot()
    lines = (("bound", "no rule keeps more", "^"), ("block", "block verification", "s"), ("token", "token-wise", "o"))
    for (name, label, marker), color in zip(lines, (GREY, GREEN, BLUE), strict=True):
        values = [getattr(gains[length], name) for length in lengths]
        style = "--" if name == "bound" else "-"
        axes.plot(lengths, values, color=color, marker=marker, markersize=5, linestyle=style, label=label)
    axes.set_xticks(lengths)
    style_axes(axes, xlabel="drafted tokens per round", ylabel="expected tokens per round", title=title)
    add_legend(axes, loc="upper left")
    return figure


def law_gaps(gaps: Mapping[str, float], *, tolerance: float, title: str = "") -> LabFigure:
    """Bars of how far each rule's output law lies from the target's, on a log axis, with the limit of an exact rule.

    A gap is the total variation distance, in 0..1. Zeros stand at the axis' foot.
    """
    if not gaps or any(not 0 <= gap <= 1 for gap in gaps.values()):
        raise ValueError(f"gaps are total variation distances in [0, 1], got {dict(gaps)}")
    words = "; ".join(f"{name} {gap:.1e}" for name, gap in gaps.items())
    figure = new_figure(8.0, 1.0 + 0.42 * len(gaps), alt=f"Distance of each rule's law from the target's: {words}.")
    axes = figure.add_subplot()
    _draw_gaps(axes, gaps, tolerance)
    style_axes(axes, xlabel="total variation distance from the target's law", ylabel="", title=title, grid="x")
    caption(figure, f"Total variation distance: half the sum of |difference|. Green: within {tolerance:g}, exact.")
    return figure


def _draw_gaps(axes: Axes, gaps: Mapping[str, float], tolerance: float) -> None:
    names = list(gaps)
    values = [max(gaps[name], FLOOR) for name in names]
    good = [gaps[name] <= tolerance for name in names]
    axes.barh(
        range(len(names)), values, left=0, height=0.62, color=[GREEN if ok else VERMILION for ok in good],
        hatch=["" if ok else "//" for ok in good], edgecolor="white",
    )  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlim(FLOOR, 30.0)
    axes.axvline(tolerance, color=GREY, linestyle="--", linewidth=1.2)
    for row, (name, value, ok) in enumerate(zip(names, values, good, strict=True)):
        word = "exact" if ok else "wrong law"
        axes.text(value * 1.4, row, f"{gaps[name]:.1e}  {word}", va="center", fontsize=FONT_SIZE - 1, color=INK)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
