"""What all panels share: controls that redraw, an error line, one redraw at a time, results kept per view state."""

from __future__ import annotations

import html
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

import ipywidgets

from dspec_lab.plots.style import LabFigure

State = TypeVar("State", bound=Hashable)
Result = TypeVar("Result")

KEPT_RESULTS = 64
LABEL_STYLE = {"description_width": "7em"}
# Voila shrinks controls that stand beside an output to nothing unless told not to
RIGID = {"flex": "0 0 auto"}


class Panel(ABC, Generic[State, Result]):
    """A frozen view state read off the controls, a function from it to a result, and a drawing of the result.

    Widget messages may arrive on another thread than the notebook's cells, so one lock covers reading, computing and
    drawing. An error is shown in the panel and raised again: a broken panel breaks the notebook that sets its controls.
    """

    def __init__(self) -> None:
        self.status = ipywidgets.HTML()
        self.error = ipywidgets.HTML()
        self._lock = threading.RLock()
        self._shown: State | None = None
        self._results: OrderedDict[State, Result] = OrderedDict()

    @property
    @abstractmethod
    def view(self) -> ipywidgets.Widget:
        """The widget that a notebook displays."""

    @abstractmethod
    def state(self) -> State:
        """The frozen view state that the controls show. Raises `ValueError` for one that cannot be computed."""

    @abstractmethod
    def compute(self, state: State) -> Result:
        """The result of `state`; touches no widget."""

    @abstractmethod
    def show(self, state: State, result: Result) -> None:
        """Fill the result widgets."""

    @abstractmethod
    def figure(self, state: State, result: Result) -> LabFigure:
        """The result as one figure."""

    def watch(self, *controls: ipywidgets.Widget) -> None:
        """Redraw when the value of one of `controls` changes."""
        for control in controls:
            control.observe(self._on_change, names="value")

    def redraw(self) -> None:
        """Bring the results up to the controls; nothing happens where they are already."""
        with self._lock:
            try:
                state = self.state()
                if state != self._shown:
                    self._draw(state)
            except BaseException as error:
                self._tell(error)
                raise
            self.error.value = ""
            self.status.value = _line("Up to date.", "status")

    def static(self) -> LabFigure:
        """A figure of the current state, drawn without a front end."""
        with self._lock:
            state = self.state()
            return self.figure(state, self.result(state))

    def result(self, state: State) -> Result:
        """`compute(state)`, computed once per state (the latest 64 are kept)."""
        with self._lock:
            if state not in self._results:
                self._results[state] = self.compute(state)
                if len(self._results) > KEPT_RESULTS:
                    self._results.popitem(last=False)
            return self._results[state]

    def _draw(self, state: State) -> None:
        if state not in self._results:
            self.status.value = _line("Working ...", "status")
        result = self.result(state)
        self.show(state, result)
        self._shown = state

    def _tell(self, error: BaseException) -> None:
        text = f"{type(error).__name__}: {error}".strip()
        stale = "" if self._shown is None else " Below is still the last run that worked."
        self.error.value = _line(f"{text}.{stale}" if not text.endswith(".") else f"{text}{stale}", "alert")
        self.status.value = _line("Stopped by an error.", "status")

    def _on_change(self, change: Any) -> None:
        self.redraw()

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(self.view)


def _line(text: str, role: str) -> str:
    look = "color:#8B0000;background:#FFF0F0;border:1px solid #8B0000;padding:4px 6px" if role == "alert" else ""
    return f'<div role="{role}" style="{look}">{html.escape(text)}</div>'
