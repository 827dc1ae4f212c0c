"""The first-run panel without a front end: what it computes, redraws, refuses and draws."""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest

from dspec_lab.core.acceptance import acceptance_stats
from dspec_lab.drafters.autoregressive import AutoregressiveDrafter
from dspec_lab.drafters.prompt_lookup import PromptLookupDrafter
from dspec_lab.models.toy import TableTarget
from dspec_lab.plots.style import LabFigure, png_bytes
from dspec_lab.verifier.decode import encode_chat, generate
from dspec_lab.widgets import first_run, panel
from dspec_lab.widgets.first_run import FirstRunPanel, FirstRunState

LETTERS = "abcdef"
EXAMPLES = {"one": "abc abc", "two": "fade"}


class LetterTokenizer:
    """A token is one of six letters; other characters are dropped."""

    def apply_chat_template(self, messages, **options):
        return [LETTERS.index(letter) for message in messages for letter in message["content"] if letter in LETTERS]

    def decode(self, token_ids, **options):
        return "".join(LETTERS[token] for token in token_ids)


class ShortDrafter(AutoregressiveDrafter):
    """Trained for blocks of three."""

    max_gamma = 3


class BrokenDrafter(AutoregressiveDrafter):
    """Cannot start."""

    def start(self, target, *, capacity):
        raise ValueError("no such weights")


TARGET = TableTarget.random(len(LETTERS), order=2, sharpness=2.0, seed=1)
DRAFT = TableTarget.random(len(LETTERS), order=1, sharpness=2.0, seed=2)


def make(**options) -> FirstRunPanel:
    drafters = {
        "prompt_lookup": PromptLookupDrafter(),
        "autoregressive": AutoregressiveDrafter(DRAFT),
        "short": ShortDrafter(DRAFT, name="short"),
        "broken": BrokenDrafter(DRAFT, name="broken"),
    }
    return FirstRunPanel(TARGET, LetterTokenizer(), drafters, EXAMPLES, **options)


# state


def test_the_state_is_frozen_and_checked():
    state = FirstRunState(prompt="abc", drafter="x", gamma=3, temperature=0.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.gamma = 4
    assert hash(state) == hash(FirstRunState(prompt="abc", drafter="x", gamma=3, temperature=0.0))
    for change, message in (
        ({"prompt": " \n"}, "prompt is empty"),
        ({"gamma": 0}, "gamma must be at least 1, got 0"),
        ({"temperature": -1.0}, "temperature must be 0 or more and finite, got -1.0"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(state, **change)


def test_the_state_is_what_the_controls_show():
    shown = make(gamma=4, temperature=0.3, max_new_tokens=20)
    assert shown.state() == FirstRunState(
        prompt="abc abc", drafter="prompt_lookup", gamma=4, temperature=0.3, seed=0, max_new_tokens=20
    )
    labels = [w.description for w in (shown.prompt, shown.drafter, shown.draft_length, shown.temperature, shown.run)]
    assert labels == ["Prompt", "Drafter", "Draft length", "Temperature", "Run"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 0}, r"draft length must lie in 1..12, got 0"),
        ({"gamma": 13}, r"got 13"),
        ({"temperature": 1.6}, r"temperature must lie in 0..1.5, got 1.6"),
    ],
)
def test_bad_starting_values_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_a_panel_needs_drafters_and_examples():
    with pytest.raises(ValueError, match="at least one drafter"):
        FirstRunPanel(TARGET, LetterTokenizer(), {}, EXAMPLES)
    with pytest.raises(ValueError, match="at least one example"):
        FirstRunPanel(TARGET, LetterTokenizer(), {"p": PromptLookupDrafter()}, {})


# compute


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_compute_is_one_generation_of_the_real_loop(temperature):
    shown = make()
    state = FirstRunState(prompt="abcabc", drafter="autoregressive", gamma=3, temperature=temperature, seed=5)
    result = shown.compute(state)
    prompt_ids = encode_chat(LetterTokenizer(), ["abcabc"])
    run = generate(TARGET, AutoregressiveDrafter(DRAFT), prompt_ids, state.config)
    assert "".join(result.pieces) == LetterTokenizer().decode(run.token_ids)
    assert result.sources == tuple(run.sources) and len(result.rounds) == len(run.rounds)
    assert result.accepted_length == acceptance_stats(run.rounds).accepted_length > 1
    assert result.tokens_per_s > 0
    if temperature == 0:
        assert result.equals_plain is True and result.plain_tokens_per_s > 0
    else:
        assert result.equals_plain is None and result.plain_tokens_per_s is None


def test_the_verdict_sees_a_text_that_is_not_plain_decodings(monkeypatch):
    shown = make()
    state = FirstRunState(prompt="abcabc", drafter="autoregressive", gamma=3, temperature=0.0)
    honest = first_run.generate

    def one_token_changed(target, drafter, prompt_ids, config):
        run = honest(target, drafter, prompt_ids, config)
        if drafter is not None:
            run.token_ids[7] = (run.token_ids[7] + 1) % len(LETTERS)
        return run

    monkeypatch.setattr(first_run, "generate", one_token_changed)
    result = shown.compute(state)
    assert result.equals_plain is False and "NOT the text" in first_run.summary(result)


def test_an_inconclusive_verdict_says_what_was_missing():
    shown = make()
    # the draft model is the target, so nothing is rejected
    shown._drafters["autoregressive"] = AutoregressiveDrafter(TARGET)
    result = shown.compute(FirstRunState(prompt="abc", drafter="autoregressive", gamma=2, temperature=0.0))
    assert result.equals_plain == "inconclusive" and "no draft was rejected" in first_run.summary(result)


# redraw


def test_a_changed_control_redraws_everything():
    shown = make()
    seen = [(shown.text.value, shown.numbers.value, shown.bars.value)]
    for control, value in (
        (shown.draft_length, 2), (shown.temperature, 1.0), (shown.drafter, "autoregressive"), (shown.prompt, "fab"),
    ):  # fmt: skip
        control.value = value
        seen.append((shown.text.value, shown.numbers.value, shown.bars.value))
        assert shown.error.value == "" and "Up to date" in shown.status.value
    # numbers and bars name the settings or the speed, so each differs; the text may stay the same at temperature 0
    assert len({numbers for _, numbers, _ in seen}) == len({bars for _, _, bars in seen}) == 5
    assert len({text for text, _, _ in seen}) >= 4
    assert '<img alt="autoregressive, draft length 2, temperature 1, seed 0. Tokens gained in' in shown.bars.value


def test_results_of_a_state_are_computed_once():
    shown = make()
    calls = []
    honest = shown.compute
    shown.compute = lambda state: calls.append(state) or honest(state)
    first = shown.numbers.value
    shown.draft_length.value = 2
    shown.draft_length.value = 5
    assert [state.gamma for state in calls] == [2] and shown.numbers.value == first


def test_kept_results_are_limited(monkeypatch):
    monkeypatch.setattr(panel, "KEPT_RESULTS", 2)
    shown = make()
    for gamma in (1, 2, 3, 4):
        shown.draft_length.value = gamma
    assert [state.gamma for state in shown._results] == [3, 4]


def test_it_says_that_it_is_working():
    shown = make()
    said = []
    shown.status.observe(lambda change: said.append(change["new"]), names="value")
    shown.draft_length.value = 2
    assert [("Working" in text, "Up to date" in text) for text in said] == [(True, False), (False, True)]


def test_run_draws_another_sample():
    shown = make(temperature=1.0)
    before = shown.text.value
    shown.run.click()
    assert shown.state().seed == 1 and shown.text.value != before


def test_examples_fill_the_prompt_and_own_text_is_told():
    shown = make()
    shown.example.value = "two"
    assert shown.prompt.value == EXAMPLES["two"] and shown.state().prompt == "fade"
    shown.prompt.value = "dead beef"
    assert shown.example.value == first_run.OWN_TEXT
    shown.prompt.value = EXAMPLES["one"]
    assert shown.example.value == "one"


# errors


def test_an_error_is_shown_and_raised_again_and_goes_with_the_next_good_state():
    shown = make()
    kept = shown.text.value
    with pytest.raises(ValueError, match="the prompt is empty: ' '"):
        shown.prompt.value = " "
    assert "the prompt is empty" in shown.error.value and 'role="alert"' in shown.error.value
    assert "Stopped" in shown.status.value and shown.text.value == kept
    shown.prompt.value = "abc"
    assert shown.error.value == "" and "Up to date" in shown.status.value


def test_an_error_while_decoding_is_shown_too():
    shown = make(gamma=5)
    with pytest.raises(ValueError, match="no such weights"):
        shown.drafter.value = "broken"
    assert "no such weights" in shown.error.value
    # going back to what is still shown clears it
    shown.drafter.value = "prompt_lookup"
    assert shown.error.value == "" and "Up to date" in shown.status.value


def test_the_draft_length_follows_the_drafters_reach():
    shown = make(gamma=5)
    drawn = []
    shown._draw = lambda state, draw=shown._draw: (drawn.append(state.gamma), draw(state))
    shown.drafter.value = "short"
    assert (shown.draft_length.max, shown.draft_length.value, shown.state().gamma) == (3, 3, 3)
    assert drawn == [3], "one change, one run"
    shown.drafter.value = "prompt_lookup"
    assert (shown.draft_length.max, shown.draft_length.value) == (first_run.MAX_GAMMA, 3)


def test_messages_of_the_error_are_escaped():
    shown = make()
    with pytest.raises(ValueError, match="unknown drafter"):
        shown._draw(dataclasses.replace(shown.state(), drafter="<b>"))
    try:
        shown._draw(dataclasses.replace(shown.state(), drafter="<b>"))
    except ValueError as error:
        shown._tell(error)
    assert "&lt;b&gt;" in shown.error.value and "<b>" not in shown.error.value


# threads, static twin


def test_two_threads_do_not_compute_at_once_and_the_last_state_is_shown():
    shown = make()
    inside, overlaps = [], []
    honest = shown.compute

    def slow(state):
        inside.append(state)
        overlaps.append(len(inside))
        time.sleep(0.02)
        result = honest(state)
        inside.pop()
        return result

    shown.compute = slow

    def turn(values):
        for value in values:
            shown.draft_length.value = value

    threads = [threading.Thread(target=turn, args=(values,)) for values in ((1, 2, 3), (7, 8, 9))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert max(overlaps) == 1 and len(overlaps) >= 3
    shown.redraw()
    assert shown._shown == shown.state()
    assert f"draft length {shown.draft_length.value}," in shown.static().alt


def test_static_is_a_figure_of_the_current_state():
    shown = make()
    shown.draft_length.value = 3
    figure = shown.static()
    assert isinstance(figure, LabFigure) and png_bytes(figure).startswith(b"\x89PNG")
    assert "draft length 3" in figure.alt and "accepted length" in figure.alt
    text_axes, bar_axes = (sub.axes[0] for sub in figure.subfigs)
    result = shown.result(shown.state())
    assert len(text_axes.patches) == len(result.pieces)
    assert sum(bar.get_height() for bars in bar_axes.containers[:2] for bar in bars) == len(result.pieces) - 1


@pytest.mark.model
def test_the_panel_decodes_with_the_real_model(default_model_dir):
    from dspec_lab.models.load import load_target, load_tokenizer

    target, tokenizer = load_target(), load_tokenizer()
    shown = FirstRunPanel(
        target, tokenizer, {"prompt_lookup": PromptLookupDrafter()},
        {"list": "Repeat after me: red, green, blue, red, green, blue, red, green, blue."}, max_new_tokens=16,
    )  # fmt: skip
    result = shown.result(shown.state())
    assert len(result.pieces) == len(result.sources) <= 16 and "".join(result.pieces).strip()
    assert result.equals_plain in (True, "inconclusive", "near_tie")
    assert "plain decoding" in shown.numbers.value
