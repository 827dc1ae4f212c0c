"""Kernels: bytes moved fused and unfused, the roofline, and who sees whom in a verification row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool
from torch import Tensor

from dspec_lab.bench.kernel_traffic import Traffic
from dspec_lab.plots.style import (
    BLUE,
    FONT_SIZE,
    GREY,
    INK,
    ORANGE,
    LabFigure,
    add_legend,
    caption,
    new_figure,
    series_look,
    style_axes,
)


def traffic_bars(traffic: Sequence[Traffic], *, title: str = "") -> LabFigure:
    """Bars of the MB that each op moves as one kernel and as separate torch operations, on a log axis."""
    if not traffic:
        raise ValueError("no op was given")
    words = "; ".join(f"{one.op} {one.torch_bytes / 1e6:.3g} and {one.fused_bytes / 1e6:.3g} MB" for one in traffic)
    figure = new_figure(8.0, 1.2 + 0.55 * len(traffic), alt=f"Bytes moved by torch operations and fused: {words}.")
    axes = figure.add_subplot()
    y = np.arange(len(traffic))
    bars = (("torch operations", -0.2, ORANGE, "//"), ("one kernel", 0.2, BLUE, ""))
    for label, shift, color, hatch in bars:
        values = [(one.torch_bytes if shift < 0 else one.fused_bytes) / 1e6 for one in traffic]
        axes.barh(y + shift, values, height=0.36, color=color, hatch=hatch, edgecolor="white", label=label)
    for index, one in enumerate(traffic):
        at = max(one.torch_bytes, one.fused_bytes) / 1e6
        axes.text(1.15 * at, index, f"{one.saved:.1f}x", va="center", fontsize=FONT_SIZE - 1, color=INK)
    axes.set_xscale("log")
    axes.set_yticks(y, [one.op for one in traffic])
    axes.invert_yaxis()
    left, right = axes.get_xlim()
    axes.set_xlim(left, 4 * right)
    style_axes(axes, xlabel="MB moved", ylabel="", title=title, grid="x")
    add_legend(axes, loc="lower right")
    return figure


def roofline(traffic: Sequence[Traffic], *, bytes_per_s: float, flops_per_s: float, name: str) -> LabFigure:
    """Attainable throughput over operations per byte, and where each op stands under the roof.

    Ops without products of matrices have no place on it: memory alone bounds them.
    """
    shown = [one for one in traffic if one.flops]
    if not shown:
        raise ValueError("none of the ops multiplies matrices")
    ridge = flops_per_s / bytes_per_s
    words = "; ".join(f"{one.op} {one.intensity:.3g}" for one in shown)
    figure = new_figure(6.8, 3.6, alt=f"Roofline of the {name}: bend at {ridge:.0f} operations a byte; ops at {words}.")
    axes = figure.add_subplot()
    x = np.geomspace(0.5, 20 * ridge, 200)
    roof = np.minimum(x * bytes_per_s, flops_per_s) / 1e12
    axes.plot(x, roof, color=GREY, linewidth=1.6, label=f"{name}, data sheet")
    for index, one in enumerate(shown):
        height = min(one.intensity * bytes_per_s, flops_per_s) / 1e12
        label = f"{one.op}: {one.shape}"
        axes.plot([one.intensity], [height], linestyle="none", markersize=8, label=label, **series_look(index))
    axes.set_xscale("log")
    axes.set_yscale("log")
    style_axes(axes, xlabel="operations per byte moved", ylabel="attainable TFLOPS")
    add_legend(axes, loc="lower right", fontsize=FONT_SIZE - 3)
    caption(figure, "Left of the bend memory is the limit. The marks are what the roof allows, not measurements.")
    return figure


def visible_picture(visible_NS: Bool[Tensor, "N S"], rows: Sequence[str], *, title: str = "") -> LabFigure:
    """Which cache place (column) each verified row sees: dark where it does."""
    if len(rows) != visible_NS.shape[0]:
        raise ValueError(f"{len(rows)} names for {visible_NS.shape[0]} rows")
    counts = ", ".join(f"{name} {int(seen.sum())}" for name, seen in zip(rows, visible_NS, strict=True))
    figure = new_figure(7.6, 1.1 + 0.24 * len(rows), alt=f"Places each row sees, by row: {counts}.")
    axes = figure.add_subplot()
    axes.imshow(visible_NS.numpy(), cmap="Greys", aspect="auto", vmin=0, vmax=1.3, interpolation="nearest")
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_xticks(np.arange(visible_NS.shape[1] + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(len(rows) + 1) - 0.5, minor=True)
    style_axes(axes, xlabel="place in the request's own cache", ylabel="", title=title, grid="x")
    axes.grid(visible=False)
    axes.grid(visible=True, which="minor", color="#BBBBBB", linewidth=0.5)
    return figure
