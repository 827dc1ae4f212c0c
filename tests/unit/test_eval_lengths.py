"""Draft lengths of an evaluation: within each drafter's reach, or several side by side."""

from __future__ import annotations

import argparse

import pytest

from dspec_lab.cli.eval import draft_lengths
from dspec_lab.cli.main import main
from dspec_lab.cli.options import within_reach as config_within_reach
from dspec_lab.config import DecodeConfig
from dspec_lab.drafters.autoregressive import AutoregressiveDrafter
from dspec_lab.drafters.prompt_lookup import PromptLookupDrafter
from dspec_lab.evaluation.evaluate import evaluate
from dspec_lab.evaluation.lengths import side_by_side, within_reach
from dspec_lab.evaluation.prompts import Prompt
from dspec_lab.models.toy import TableTarget

TARGET = TableTarget.random(6, order=2, sharpness=2.0, seed=1)


class ShortDrafter(AutoregressiveDrafter):
    """Trained for blocks of three."""

    max_gamma = 3


class Letters:
    """A token is one of six letters."""

    def apply_chat_template(self, messages, **options):
        return ["abcdef".index(letter) for message in messages for letter in message["content"]]

    def decode(self, token_ids, **options):
        return "".join("abcdef"[token] for token in token_ids)


def drafters():
    draft = TableTarget.random(6, sharpness=2.0, seed=2)
    return {"any": PromptLookupDrafter(), "short": ShortDrafter(draft, name="short")}


def test_the_usual_length_stays_within_each_drafters_reach():
    assert within_reach(drafters()) == {"any": 7, "short": 3}
    assert within_reach(drafters(), 2) == {"any": 2, "short": 2}
    # for one request the same, but never against a length that was asked for
    short = drafters()["short"]
    usual, asked = argparse.Namespace(gamma=None), argparse.Namespace(gamma=7)
    assert config_within_reach(DecodeConfig(gamma=7), short, usual).gamma == 3
    assert config_within_reach(DecodeConfig(gamma=7), short, asked).gamma == 7


def test_lengths_side_by_side_share_the_plain_runs():
    made, gammas = side_by_side({"short": drafters()["short"]}, [1, 3])
    assert gammas == {"short:1": 1, "short:3": 3}
    prompts = [Prompt(prompt_id="p/0", domain="math", benchmark="p", turns=("abcabc",))]
    rows = evaluate(
        TARGET, Letters(), made, prompts, DecodeConfig(gamma=3, max_new_tokens=24), repeats=1, gammas=gammas
    )
    assert [(row.drafter, row.gamma) for row in rows] == [("short:1", 1), ("short:3", 3)]
    assert rows[0].plain_tokens_per_s == rows[1].plain_tokens_per_s
    assert rows[0].accepted_length <= 2 and rows[1].accepted_length > rows[0].accepted_length
    # a drafter of short reach beside a longer usual length, the warm-up included
    made = drafters()
    rows = evaluate(
        TARGET, Letters(), made, prompts, DecodeConfig(max_new_tokens=9), repeats=1, gammas=within_reach(made)
    )
    assert [row.gamma for row in rows] == [7, 3]
    # one length keeps the name
    assert side_by_side(drafters(), [2])[1] == {"any": 2, "short": 2}


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        ([4], "short drafts at most 3 tokens a round, got gamma 4"),
        ([0], "at least 1"),
        ([2, 2], "once each"),
        ([], "none"),
    ],
)
def test_lengths_that_cannot_be_are_refused(lengths, words):
    with pytest.raises(ValueError, match=words):
        side_by_side({"short": drafters()["short"]}, lengths)


@pytest.mark.parametrize("text", ["", "2,x", "-1", "0", "1.5"])
def test_bad_lists_are_named(text, capsys):
    with pytest.raises(ValueError, match="gamma must be a whole number of at least 1"):
        draft_lengths(text)
    assert main(["eval", "--drafters", "prompt_lookup", "--prompts", "all", f"--gamma={text}"]) == 2
    assert "gamma" in capsys.readouterr().err
