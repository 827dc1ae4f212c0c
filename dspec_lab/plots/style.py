"""The shared look of all figures: sizes, a colour-blind safe palette, and figures that carry a text alternative."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dspec_lab.core.types import TokenSource

# Okabe and Ito's palette: told apart with every common kind of colour blindness
BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, PURPLE, YELLOW, GREY = "#56B4E9", "#CC79A7", "#F0E442", "#6B6B6B"
SERIES = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)
MARKERS = ("o", "s", "^", "D", "v", "P")
INK, GRID = "#1A1A1A", "#DDDDDD"
FONT_SIZE = 10
DPI = 110

# where a token came from: words, background (dark ink on it has a contrast above 7), and an edge as a second cue
SOURCES: dict[TokenSource, tuple[str, str, str]] = {
    "draft": ("draft, accepted", "#BFE3F7", BLUE),
    "replacement": ("replacement (first rejection)", "#FFD9B8", VERMILION),
    "bonus": ("bonus (nothing rejected)", "#BFEBDD", GREEN),
    "prefill": ("first token (prompt pass)", "#E6E6E6", GREY),
    "plain": ("plain decoding", "#FFFFFF", "#A0A0A0"),
}


class LabFigure(Figure):
    """A Figure with a text alternative, which notebooks show as PNG whatever plotting backend is set."""

    alt: str = ""

    def _repr_png_(self) -> tuple[bytes, dict[str, str]]:
        return png_bytes(self), {"alt": self.alt}


def new_figure(width: float = 8.0, height: float = 3.4, *, alt: str) -> LabFigure:
    """An empty figure, size in inches; `alt` says in words what it shows."""
    if not alt.strip():
        raise ValueError(f"a figure needs a text alternative, got {alt!r}")
    figure = LabFigure(figsize=(width, height), layout="constrained", dpi=DPI)
    figure.alt = alt
    return figure


def png_bytes(figure: Figure, *, dpi: int = DPI) -> bytes:
    """The figure as a PNG file. Equal figures give equal bytes."""
    buffer = io.BytesIO()
    # without the software entry, which would change with the library's version
    metadata = {"Software": None, "Description": getattr(figure, "alt", "") or None}
    # packing harder takes a panel's redraw 50 ms and saves nothing on drawings like these
    options = {"compress_level": 1}
    figure.savefig(buffer, format="png", dpi=dpi, facecolor="white", metadata=metadata, pil_kwargs=options)
    # the layout is settled now; another pass over it would shift things by a fraction of a pixel
    figure.set_layout_engine("none")
    return buffer.getvalue()


def image_html(figure: LabFigure) -> str:
    """An `<img>` of the figure with its text alternative, which an Image widget has no place for."""
    data = base64.b64encode(png_bytes(figure)).decode("ascii")
    alt = html.escape(figure.alt, quote=True)
    return f'<img alt="{alt}" style="max-width:100%" src="data:image/png;base64,{data}">'


def style_axes(axes: Axes, *, xlabel: str, ylabel: str, title: str = "", grid: str = "y") -> None:
    """Labels, sizes, a light grid behind the data, and no box around it."""
    axes.set_xlabel(xlabel, fontsize=FONT_SIZE, color=INK)
    axes.set_ylabel(ylabel, fontsize=FONT_SIZE, color=INK)
    if title:
        axes.set_title(title, fontsize=FONT_SIZE + 1, color=INK, loc="left")
    axes.tick_params(labelsize=FONT_SIZE - 1, colors=INK)
    axes.grid(visible=True, axis=grid, color=GRID, linewidth=0.8)  # type: ignore[arg-type]
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def add_legend(axes: Axes, **options: Any) -> None:
    """The legend, without a frame that hides data."""
    axes.legend(**({"fontsize": FONT_SIZE - 1, "frameon": False} | options))


def series_look(index: int) -> dict[str, str]:
    """Colour and marker of series `index`, from 0; never told by colour alone."""
    return {"color": SERIES[index % len(SERIES)], "marker": MARKERS[index % len(MARKERS)]}


def caption(figure: Figure, text: str) -> None:
    """A line of definitions under the figure."""
    figure.supxlabel(text, fontsize=FONT_SIZE - 2, color=GREY, x=0.01, ha="left")


def whole_ticks(first: int, last: int, most: int = 12) -> Sequence[int]:
    """Whole numbers from `first` to `last`, thinned to at most `most` or so."""
    step = max(1, -(-(last - first + 1) // most))
    return range(first, last + 1, step)
