"""Evaluation rows say what decoding did, and drafters are compared prompt by prompt."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dspec_lab.config import DecodeConfig
from dspec_lab.drafters.autoregressive import AutoregressiveDrafter
from dspec_lab.drafters.prompt_lookup import PromptLookupDrafter
from dspec_lab.evaluation.evaluate import evaluate
from dspec_lab.evaluation.paired import EVERYTHING, paired_rows, paired_table
from dspec_lab.evaluation.prompts import Prompt
from dspec_lab.verifier.tiny import tiny_decoder

CONFIG = DecodeConfig(gamma=3, max_new_tokens=12, ignore_eos=True)


class Letters:
    """Tokens 0..4 are the letters a..e."""

    def apply_chat_template(self, messages, **_options):
        return [ord(letter) - ord("a") for message in messages for letter in message["content"]]

    def decode(self, ids, **_options):
        return "".join("abcde"[token] for token in ids)


def prompts(texts, benchmark="one", domain="math"):
    return [Prompt(f"{benchmark}/{i}", domain, benchmark, (text,)) for i, text in enumerate(texts)]


@pytest.fixture(scope="module")
def rows():
    target = tiny_decoder(5)
    drafters = {
        "itself": AutoregressiveDrafter(target.keep_layers(range(3), name="all layers")),
        "truncated": AutoregressiveDrafter(target.keep_layers((0,), name="first layer")),
        "prompt_lookup": PromptLookupDrafter(),
    }
    texts = prompts(["abc", "ccda", "edeab"]) + prompts(["bad", "dade"], benchmark="two")
    return evaluate(target, Letters(), drafters, texts, CONFIG, repeats=1)


def test_a_drafter_that_is_the_target_is_never_rejected(rows):
    row = next(row for row in rows if (row.drafter, row.benchmark) == ("itself", "one"))
    # 12 tokens: one from the prompt's pass, then 4 a round until the last round is cut
    assert row.by_prompt == {f"one/{i}": (11, 3) for i in range(3)}
    assert row.accepted_length == pytest.approx(11 / 3) and row.accept_rate == 1.0
    assert row.outputs_equal_plain == "inconclusive"


def test_rows_add_up_and_texts_are_plain_decodings_own(rows):
    assert [(row.benchmark, row.drafter) for row in rows] == [
        (benchmark, name) for benchmark in ("one", "two") for name in ("itself", "truncated", "prompt_lookup")
    ]
    for row in rows:
        assert row.num_committed == sum(c for c, _ in row.by_prompt.values()) == 11 * row.samples
        assert row.rounds == sum(r for _, r in row.by_prompt.values())
        assert row.outputs_equal_plain in (True, "inconclusive")
        assert row.accepted_length_low <= row.accepted_length <= row.accepted_length_high
    assert any(row.outputs_equal_plain is True for row in rows)


def test_pairs_are_of_the_same_prompts_by_benchmark_and_domain(rows):
    pairs = paired_rows(rows)
    assert [(p.prompts_of, p.other, p.prompts) for p in pairs] == [
        (label, other, count)
        for label, count in (("one", 3), ("two", 2), ("math, all", 5))
        for other in ("truncated", "prompt_lookup")
    ]
    own = {row.drafter: row for row in rows if row.benchmark == "one"}
    first = pairs[0]
    assert first.difference == pytest.approx(own["itself"].accepted_length - own["truncated"].accepted_length)
    assert first.settled == (first.low > 0) and first.low <= first.difference <= first.high
    # the other way round, signs turn
    turned = next(p for p in paired_rows(rows, "truncated") if (p.other, p.prompts_of) == ("itself", "one"))
    assert turned.difference == pytest.approx(-first.difference)
    assert paired_table(pairs).row_count == 6


def test_pairs_over_all_prompts_come_with_a_second_domain(rows):
    two = [replace(row, domain="code") if row.benchmark == "two" else row for row in rows]
    pairs = {(pair.prompts_of, pair.other): pair for pair in paired_rows(two)}
    assert list(dict.fromkeys(label for label, _ in pairs)) == ["one", "two", EVERYTHING]
    # the same prompts as those of the one domain above, so the same numbers
    one = {pair.other: pair for pair in paired_rows(rows) if pair.prompts_of == "math, all"}
    for other, pair in one.items():
        assert replace(pair, prompts_of=EVERYTHING) == pairs[EVERYTHING, other]


def test_prompts_that_only_one_drafter_has_do_not_count(rows):
    cut = [replace(row, by_prompt={}) if row.drafter == "prompt_lookup" else row for row in rows]
    assert {pair.other for pair in paired_rows(cut)} == {"truncated"}
    with pytest.raises(ValueError, match="'oracle'"):
        paired_rows(rows, "oracle")
