"""The panel that walks through a trace: text coloured by outcome, round by round, with confidences and entropies."""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import Any

import ipywidgets
from matplotlib.patches import Rectangle

from dspec_lab.plots.outcomes import MONO
from dspec_lab.plots.style import INK, LabFigure, caption, new_figure
from dspec_lab.widgets.panel import LABEL_STYLE, RIGID, Panel
from dspec_lab.widgets.trace_table import SHOWS, Show, TokenView, TraceTable, token_texts

PAGE = 12  # rounds at once
# background, edge, line through
LOOKS = {
    "accepted": ("#BFE3F7", "#0072B2", False),
    "rejected": ("#FFD9B8", "#D55E00", True),
    "discarded": ("#EDEDED", "#6B6B6B", True),
    "extra": ("#BFEBDD", "#009E73", False),
}
CUT = "#CC79A7"
NOTE = "Blue: accepted. Orange, struck: rejected. Grey, struck: discarded behind a rejection. Green: the target's own."


@dataclass(frozen=True, kw_only=True, slots=True)
class ViewerState:
    """What the controls show."""

    domain: str = "all"
    request: str = "all"
    show: Show = "all"
    threshold: float = 0.0  # on survival; marks what it would cut
    page: int = 0  # from 0

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"the threshold must lie in 0..1, got {self.threshold}")
        if self.page < 0:
            raise ValueError(f"the page must be at least 0, got {self.page}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ViewerPage:
    """The rounds of one page, and how many there are."""

    rounds: tuple[tuple[str, tuple[TokenView, ...]], ...]  # heading and tokens
    found: int
    page: int  # the last one where fewer pages were found than asked for
    pages: int


class TraceViewer(Panel[ViewerState, ViewerPage]):
    """Controls `Domain`, `Request`, `Show`, `Threshold`, `Page`, and one page of rounds."""

    def __init__(self, table: TraceTable, tokenizer: Any) -> None:
        super().__init__()
        self._table = table
        self._texts = token_texts(tokenizer, table.token_ids())
        options = {"style": LABEL_STYLE, "layout": RIGID}
        self.domain = ipywidgets.Dropdown(options=["all", *table.domains], description="Domain", **options)
        self.request = ipywidgets.Dropdown(options=["all", *table.requests], description="Request", **options)
        self.shown = ipywidgets.Dropdown(options=list(SHOWS), description="Show", **options)
        self.threshold = ipywidgets.FloatSlider(
            value=0.0, min=0.0, max=1.0, step=0.05, description="Threshold", readout_format=".2f",
            continuous_update=False, **options,
        )  # fmt: skip
        self.page = ipywidgets.BoundedIntText(value=1, min=1, max=len(table), description="Page", **options)
        self.text = ipywidgets.HTML()
        controls = ipywidgets.HBox(
            [self.domain, self.request, self.shown, self.threshold, self.page],
            layout={"flex_flow": "row wrap", **RIGID},
        )
        self._view = ipywidgets.VBox([controls, self.status, self.error, self.text])
        self.watch(self.domain, self.request, self.shown, self.threshold, self.page)
        self.redraw()

    @property
    def view(self) -> ipywidgets.Widget:
        """The whole panel."""
        return self._view

    def state(self) -> ViewerState:
        """The controls' values."""
        return ViewerState(
            domain=self.domain.value, request=self.request.value, show=self.shown.value,
            threshold=round(self.threshold.value, 6), page=self.page.value - 1,
        )  # fmt: skip

    def compute(self, state: ViewerState) -> ViewerPage:
        """The rounds that pass the filters, and those of the page."""
        found = self._table.select(
            domain=state.domain, request=state.request, show=state.show, threshold=state.threshold
        )
        pages = max(1, -(-len(found) // PAGE))
        page = min(state.page, pages - 1)
        rounds = []
        for row in found[page * PAGE : (page + 1) * PAGE].tolist():
            values = {name: self._table.columns[name][row] for name in ("request_id", "round", "gamma", "num_accepted")}
            heading = f"{values['request_id']}, round {values['round']}: {values['num_accepted']} of {values['gamma']}"
            rounds.append((heading, tuple(self._table.tokens(row, threshold=state.threshold))))
        return ViewerPage(rounds=tuple(rounds), found=len(found), page=page, pages=pages)

    def show(self, state: ViewerState, result: ViewerPage) -> None:
        """One line a round."""
        lines = [
            f'<div style="border-top:1px solid #ddd;padding:3px 0"><span style="color:#555;font-size:90%">'
            f"{html.escape(heading)}</span><br>{''.join(self._span(token) for token in tokens)}</div>"
            for heading, tokens in result.rounds
        ]
        self.text.value = (
            f'<div role="group" aria-label="Rounds of the trace" style="color:{INK};background:#fff;padding:6px">'
            f"<div>{self._summary(result)}</div>{''.join(lines)}<div style='font-size:90%'>{NOTE} Framed: below the "
            "threshold. Under a token: confidence, target's entropy in bits.</div></div>"
        )

    def figure(self, state: ViewerState, result: ViewerPage) -> LabFigure:
        """The page as a picture."""
        alt = f"Rounds of a trace, tokens coloured by outcome. {self._summary(result)}."
        figure = new_figure(10.0, 0.8 + 0.42 * max(1, len(result.rounds)), alt=alt)
        axes = figure.add_subplot()
        axes.set_xlim(0, 118)
        axes.set_ylim(max(1, len(result.rounds)), 0)
        axes.axis("off")
        for line, (heading, tokens) in enumerate(result.rounds):
            axes.text(0, line + 0.5, heading[:38], fontsize=7, color=INK, va="center", parse_math=False)
            column = 33.0
            for token in tokens:
                text = self._texts[token.token_id][:14] or " "
                fill, edge, _ = LOOKS[token.outcome]
                width = 1.05 * len(text) + 0.6
                if column + width > 118:
                    break
                line_width = 1.6 if token.cut else 0.8
                box = {"facecolor": fill, "edgecolor": CUT if token.cut else edge, "linewidth": line_width}
                axes.add_patch(Rectangle((column, line + 0.08), width, 0.6, **box))
                axes.text(
                    column + width / 2, line + 0.38, text, fontproperties=MONO, fontsize=7.5, color=INK, ha="center",
                    va="center", parse_math=False,
                )  # fmt: skip
                axes.text(
                    column + width / 2, line + 0.84, _numbers(token), fontsize=5, color="#444444", ha="center",
                    va="center",
                )  # fmt: skip
                column += width + 0.5
        axes.set_title(self._summary(result), fontsize=10, loc="left", color=INK)
        caption(figure, NOTE)
        return figure

    def _summary(self, result: ViewerPage) -> str:
        return f"{result.found} of {len(self._table)} rounds, page {result.page + 1} of {result.pages}"

    def _span(self, token: TokenView) -> str:
        fill, edge, struck = LOOKS[token.outcome]
        frame = f"outline:2px solid {CUT};" if token.cut else ""
        line = "text-decoration:line-through;" if struck else ""
        return (
            f'<span title="{html.escape(_words(token), quote=True)}" style="display:inline-block;font-family:monospace;'
            f"background:{fill};border-bottom:2px solid {edge};margin:1px;padding:0 2px;text-align:center;{frame}"
            f'{line}">{html.escape(self._texts[token.token_id]) or "&#8203;"}'
            f'<span style="display:block;font-size:70%;color:#444">{_numbers(token) or "&nbsp;"}</span></span>'
        )


def _numbers(token: TokenView) -> str:
    parts = [] if token.confidence is None else [f"{token.confidence:.2f}"]
    return " ".join(parts + ([] if token.target_entropy_bits is None else [f"{token.target_entropy_bits:.1f}b"]))


def _words(token: TokenView) -> str:
    text = "the target's own token" if token.position is None else f"draft {token.position}: {token.outcome}"
    for name, value, unit in (
        ("confidence", token.confidence, ""), ("survival", token.survival, ""), ("1 - TV", token.accept_prob, ""),
        ("target", token.target_entropy_bits, " bits"), ("drafter", token.draft_entropy_bits, " bits"),
    ):  # fmt: skip
        text += "" if value is None else f", {name} {value:.3f}{unit}"
    return f"{text}, cut by the threshold" if token.cut else text
