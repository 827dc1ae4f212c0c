"""The panel of notebook 00: a prompt, a drafter, a draft length and a temperature; where each token came from."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ipywidgets

from dspec_lab.config import DecodeConfig
from dspec_lab.core.acceptance import acceptance_stats
from dspec_lab.core.types import Generation, RoundRecord, TokenSource
from dspec_lab.drafters.protocol import Drafter
from dspec_lab.evaluation.equality import Verdict, find_flip, verdict
from dspec_lab.models.protocol import Target
from dspec_lab.plots.accepted_length import accepted_per_round, draw_accepted_per_round
from dspec_lab.plots.outcomes import draw_outcomes, outcome_lines, token_pieces, tokens_html
from dspec_lab.plots.style import LabFigure, image_html, new_figure
from dspec_lab.verifier.decode import encode_chat, generate
from dspec_lab.widgets.panel import LABEL_STYLE, RIGID, Panel

OWN_TEXT = "custom"  # no blank: front ends show option names with no-break spaces
MAX_GAMMA, MAX_TEMPERATURE = 12, 1.5


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstRunState:
    """What the controls show."""

    prompt: str
    drafter: str
    gamma: int  # drafted tokens per round
    temperature: float
    seed: int = 0  # one more with each press of Run
    max_new_tokens: int = 32

    def __post_init__(self) -> None:
        if not self.prompt.strip():
            raise ValueError(f"the prompt is empty: {self.prompt!r}")
        _ = self.config  # its own checks

    @property
    def config(self) -> DecodeConfig:
        """The settings of the run."""
        return DecodeConfig(
            gamma=self.gamma, temperature=self.temperature, seed=self.seed, max_new_tokens=self.max_new_tokens
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstRunResult:
    """One run, and at temperature 0 plain decoding beside it. Rates count tokens after the first, per second."""

    pieces: tuple[str, ...]  # text of each token
    sources: tuple[TokenSource, ...]
    rounds: tuple[RoundRecord, ...]
    accepted_length: float
    tokens_per_s: float
    plain_tokens_per_s: float | None  # None above temperature 0
    equals_plain: Verdict  # None above temperature 0


class FirstRunPanel(Panel[FirstRunState, FirstRunResult]):
    """Controls `Prompt`, `Drafter`, `Draft length`, `Temperature`, `Run`, and what one generation did.

    `examples` maps a name to a prompt; the first is shown at the start. A change runs at once; `Run` repeats the run
    with the next seed: another sample above temperature 0, another timing of the same text at 0.
    """

    def __init__(
        self,
        target: Target,
        tokenizer: Any,
        drafters: Mapping[str, Drafter],
        examples: Mapping[str, str],
        *,
        gamma: int = 5,
        temperature: float = 0.0,
        max_new_tokens: int = 32,
    ) -> None:
        super().__init__()
        if not drafters:
            raise ValueError("the panel needs at least one drafter, got none")
        if not examples:
            raise ValueError("the panel needs at least one example prompt, got none")
        if not 1 <= gamma <= MAX_GAMMA:
            raise ValueError(f"the draft length must lie in 1..{MAX_GAMMA}, got {gamma}")
        if not 0 <= temperature <= MAX_TEMPERATURE:
            raise ValueError(f"the temperature must lie in 0..{MAX_TEMPERATURE}, got {temperature}")
        self._target, self._tokenizer = target, tokenizer
        self._drafters, self._examples = dict(drafters), dict(examples)
        self._plain_runs: dict[tuple[str, int, int], Generation] = {}
        self._seed, self._max_new_tokens, self._settling = 0, max_new_tokens, False
        self._make_controls(gamma, temperature)
        self.text, self.numbers, self.bars = ipywidgets.HTML(), ipywidgets.HTML(), ipywidgets.HTML()
        settings = ipywidgets.HBox(
            [self.drafter, self.draft_length, self.temperature, self.run], layout={"flex_flow": "row wrap", **RIGID}
        )
        self._view = ipywidgets.VBox(
            [self.example, self.prompt, settings, self.status, self.error, self.text, self.numbers, self.bars]
        )
        self.example.observe(self._on_example, names="value")
        self.watch(self.prompt, self.drafter, self.draft_length, self.temperature)
        # a Button's own dispatcher prints what `rerun` raises; called from Python, `rerun` raises
        self.run.on_click(lambda button: self.rerun())
        self.redraw()

    @property
    def view(self) -> ipywidgets.Widget:
        """The whole panel."""
        return self._view

    def state(self) -> FirstRunState:
        """The controls' values."""
        return FirstRunState(
            prompt=self.prompt.value,
            drafter=self.drafter.value,
            gamma=self.draft_length.value,
            temperature=round(self.temperature.value, 6),
            seed=self._seed,
            max_new_tokens=self._max_new_tokens,
        )

    def rerun(self) -> None:
        """What `Run` does: the same request with the next seed."""
        with self._lock:
            self._seed += 1
            self.redraw()

    def compute(self, state: FirstRunState) -> FirstRunResult:
        """Run the state's request; at temperature 0 also plain decoding, whose run is kept per prompt and seed."""
        if state.drafter not in self._drafters:
            raise ValueError(f"unknown drafter {state.drafter!r}; there are {', '.join(self._drafters)}")
        prompt_ids = encode_chat(self._tokenizer, [state.prompt])
        run = generate(self._target, self._drafters[state.drafter], prompt_ids, state.config)
        if not run.rounds:
            raise ValueError("the answer ended with its first token, so there was no round to show")
        plain_rate: float | None = None
        equal: Verdict = None
        if state.temperature == 0:
            plain = self._plain_run(state, prompt_ids)
            flip = find_flip(self._target, prompt_ids, plain.token_ids, run.token_ids)
            plain_rate, equal = _rate(plain), verdict([run], [flip])
        return FirstRunResult(
            pieces=tuple(token_pieces(self._tokenizer, run.token_ids)),
            sources=tuple(run.sources),
            rounds=tuple(run.rounds),
            accepted_length=acceptance_stats(run.rounds).accepted_length,
            tokens_per_s=_rate(run),
            plain_tokens_per_s=plain_rate,
            equals_plain=equal,
        )

    def show(self, state: FirstRunState, result: FirstRunResult) -> None:
        """Coloured text, a line of numbers, bars."""
        self.text.value = tokens_html(result.pieces, result.sources)
        self.numbers.value = f"<div>{html.escape(summary(result))}</div>"
        self.bars.value = image_html(accepted_per_round(result.rounds, title=_title(state)))

    def figure(self, state: FirstRunState, result: FirstRunResult) -> LabFigure:
        """Text and bars in one figure, with the numbers in its title."""
        lines = len(outcome_lines(result.pieces))
        figure = new_figure(9.0, 3.6 + 0.26 * lines, alt=f"{_title(state)}. {summary(result)}")
        upper, lower = figure.subfigures(2, 1, height_ratios=[0.9 + 0.26 * lines, 2.7])
        heading = f"{_title(state)}: {_verdict_words(result)}"
        draw_outcomes(upper.add_subplot(), result.pieces, result.sources, title=heading)
        draw_accepted_per_round(lower.add_subplot(), result.rounds, title=_numbers(result))
        return figure

    def _make_controls(self, gamma: int, temperature: float) -> None:
        first = next(iter(self._examples))
        wide = {"width": "98%", **RIGID}
        self.example = ipywidgets.Dropdown(
            options=[*self._examples, OWN_TEXT], value=first, description="Example", style=LABEL_STYLE, layout=RIGID
        )
        self.prompt = ipywidgets.Textarea(
            value=self._examples[first], description="Prompt", rows=4, continuous_update=False, style=LABEL_STYLE,
            layout=wide,
        )  # fmt: skip
        self.drafter = ipywidgets.Dropdown(
            options=list(self._drafters), description="Drafter", style=LABEL_STYLE, layout=RIGID
        )
        longest = self._reach(self.drafter.value)
        self.draft_length = ipywidgets.IntSlider(
            value=min(gamma, longest), min=1, max=longest, description="Draft length", continuous_update=False,
            style=LABEL_STYLE, layout=RIGID,
        )  # fmt: skip
        self.temperature = ipywidgets.FloatSlider(
            value=temperature, min=0.0, max=MAX_TEMPERATURE, step=0.1, description="Temperature", readout_format=".1f",
            continuous_update=False, style=LABEL_STYLE, layout=RIGID,
        )  # fmt: skip
        self.run = ipywidgets.Button(description="Run", tooltip="Run again with the next seed", layout=RIGID)

    def _on_example(self, change: Any) -> None:
        if change["new"] in self._examples:
            self.prompt.value = self._examples[change["new"]]

    def _reach(self, name: str) -> int:
        """The longest proposal of a drafter, within the slider's own limit."""
        return min(MAX_GAMMA, self._drafters[name].max_gamma or MAX_GAMMA)

    def _on_change(self, change: Any) -> None:
        if self._settling:
            return
        if change["owner"] is self.drafter:
            # a shorter reach moves the slider too; that is one change, not two
            self._settling = True
            try:
                self.draft_length.max = self._reach(self.drafter.value)
            finally:
                self._settling = False
        if change["owner"] is self.prompt:
            names = [name for name, text in self._examples.items() if text == self.prompt.value]
            self.example.value = names[0] if names else OWN_TEXT
        self.redraw()

    def _plain_run(self, state: FirstRunState, prompt_ids: Sequence[int]) -> Generation:
        key = (state.prompt, state.seed, state.max_new_tokens)
        if key not in self._plain_runs:
            self._plain_runs[key] = generate(self._target, None, prompt_ids, state.config)
        return self._plain_runs[key]


def summary(result: FirstRunResult) -> str:
    """Accepted length, speed and verdict in one line."""
    return f"{_numbers(result)}; {_verdict_words(result)}"


def _numbers(result: FirstRunResult) -> str:
    plain = "" if result.plain_tokens_per_s is None else f", plain {result.plain_tokens_per_s:.1f}"
    return (
        f"accepted length {result.accepted_length:.2f} tokens a round ({len(result.rounds)} rounds); "
        f"{result.tokens_per_s:.1f} tokens/s in one run{plain}"
    )


def _verdict_words(result: FirstRunResult) -> str:
    if result.equals_plain is None:
        return "sampled: the law is the target's, the text need not be plain decoding's"
    if result.equals_plain is True:
        return "the same text as plain decoding"
    if result.equals_plain is False:
        return "NOT the text of plain decoding"
    if result.equals_plain == "near_tie":
        return "differs from plain decoding at a tie within rounding"
    proposed = sum(record.gamma for record in result.rounds)
    accepted = sum(record.num_accepted for record in result.rounds)
    missing = "proposed" if not proposed else "accepted" if not accepted else "rejected"
    return f"the same text as plain decoding, but no draft was {missing}"


def _title(state: FirstRunState) -> str:
    return f"{state.drafter}, draft length {state.gamma}, temperature {state.temperature:g}, seed {state.seed}"


def _rate(run: Generation) -> float:
    return (len(run.token_ids) - 1) / run.decode_s if run.decode_s > 0 else 0.0
