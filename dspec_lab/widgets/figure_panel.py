"""A panel whose result is one figure and a line of numbers, with the figure's controls above it."""

from __future__ import annotations

import html
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import ipywidgets

from dspec_lab.plots.style import LabFigure, image_html
from dspec_lab.widgets.panel import LABEL_STYLE, RIGID, Panel, Result, State

OPTIONS: Mapping[str, Any] = {"style": LABEL_STYLE, "layout": RIGID}


class FigurePanel(Panel[State, Result]):
    """Give the controls to `arrange` at the end of `__init__`; `figure` and `summary` do the rest."""

    def arrange(self, *controls: ipywidgets.Widget) -> None:
        """Lay out the controls above the figure, watch them, and draw."""
        self.picture, self.numbers = ipywidgets.HTML(), ipywidgets.HTML()
        row = ipywidgets.HBox(list(controls), layout={"flex_flow": "row wrap", **RIGID})
        self._view = ipywidgets.VBox([row, self.status, self.error, self.numbers, self.picture])
        self.watch(*controls)
        self.redraw()

    @property
    def view(self) -> ipywidgets.Widget:
        """The whole panel."""
        return self._view

    @abstractmethod
    def summary(self, state: State, result: Result) -> str:
        """The result in one line."""

    def show(self, state: State, result: Result) -> None:
        """The line, then the figure."""
        self.numbers.value = f"<div>{html.escape(self.summary(state, result))}</div>"
        figure: LabFigure = self.figure(state, result)
        self.picture.value = image_html(figure)


def dropdown(label: str, options: list[Any]) -> ipywidgets.Dropdown:
    """A choice of the given options, the first at the start."""
    return ipywidgets.Dropdown(options=options, value=options[0], description=label, **OPTIONS)


def whole_slider(label: str, value: int, low: int, high: int) -> ipywidgets.IntSlider:
    """A slider over whole numbers that reports when it is let go."""
    return ipywidgets.IntSlider(
        value=value, min=low, max=high, description=label, continuous_update=False, **OPTIONS
    )  # fmt: skip
