"""Whether speculation is worth it: verdicts over recorded rows, and the break-even map against the formula."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest

from dspec_lab.config import DecodeConfig
from dspec_lab.core.files import data_dir, read_json
from dspec_lab.drafters.prompt_lookup import PromptLookupDrafter
from dspec_lab.evaluation.evaluate import evaluate, rows_as_dicts
from dspec_lab.evaluation.prompts import Prompt
from dspec_lab.evaluation.worth import read_eval_rows, worth_rows, worth_words
from dspec_lab.scheduler.break_even import acceptance_of, block_speedup, break_even_map, gained_tokens
from dspec_lab.scheduler.cost_table import CostTable
from dspec_lab.serving.presets import recorded_cpu_table
from dspec_lab.verifier.tiny import tiny_decoder

TABLE = CostTable(rows=(1, 2, 5, 40), seconds=(0.010, 0.011, 0.014, 0.084))


class Letters:
    """Tokens 0..4 are the letters a..e."""

    def apply_chat_template(self, messages, **_options):
        return [ord(letter) - ord("a") for message in messages for letter in message["content"]]

    def decode(self, ids, **_options):
        return "".join("abcde"[token] for token in ids)


@pytest.fixture(scope="module")
def row():
    texts = [Prompt(f"one/{i}", "math", "one", (text,)) for i, text in enumerate(["abc", "ccda", "edeab"])]
    config = DecodeConfig(gamma=3, max_new_tokens=12, ignore_eos=True, temperature=0.0)
    return evaluate(tiny_decoder(5), Letters(), {"prompt_lookup": PromptLookupDrafter()}, texts, config, repeats=1)[0]


def timed(row, *, gain: float, cost: float, **options):
    """The row with `gain` tokens a round on average and rounds that take `cost` plain tokens."""
    counts = {f"one/{i}": (round(100 * gain) + d, 100) for i, d in enumerate((-4, 0, 4, 1))}
    times = {"draft_ms": 0.0, "verify_ms": 1e3 * cost / 50.0, "overhead_ms": 0.0, "plain_tokens_per_s": 50.0}
    speeds = {name: gain / cost for name in ("speedup", "speedup_min", "speedup_max")}
    return replace(row, by_prompt=counts, **times, **{**speeds, "outputs_equal_plain": True, **options})


@pytest.mark.parametrize(
    ("gain", "cost", "answer", "words"),
    [
        (2.5, 2.0, "yes", "worth it here."),
        (1.6, 2.0, "no", "Switch it off here (--drafter none)."),
        (2.0, 2.0, "unsettled", "not settled"),
    ],
)
def test_the_verdict_is_settled_by_the_interval(row, gain, cost, answer, words):
    (found,) = worth_rows([timed(row, gain=gain, cost=cost)])
    assert found.answer == answer and found.prompts == 4 and found.low < found.speedup < found.high
    assert found.speedup == pytest.approx(gain / cost, rel=0.01)
    assert found.accepted_length / found.break_even_length == pytest.approx(found.speedup)
    (line,) = worth_words([found])
    assert words in line and f"{found.low:.2f} to {found.high:.2f}" in line


def test_timing_that_scatters_unsettles_a_verdict(row):
    steady = timed(row, gain=2.2, cost=2.0)
    assert worth_rows([steady])[0].answer == "yes"
    assert worth_rows([replace(steady, speedup_min=0.9)])[0].answer == "unsettled"


def test_texts_that_differ_and_single_prompts_get_no_verdict(row):
    (broken,) = worth_rows([timed(row, gain=2.5, cost=2.0, outputs_equal_plain=False)])
    assert broken.answer == "texts differ" and "no verdict" in worth_words([broken])[0]
    (one,) = worth_rows([replace(timed(row, gain=2.5, cost=2.0), by_prompt={"one/0": (250, 100)})])
    assert one.answer == "unsettled" and one.low is None and "no interval" in worth_words([one])[0]


def test_two_prompts_settle_nothing(row):
    two = replace(timed(row, gain=2.5, cost=2.0), by_prompt={"one/0": (250, 100), "one/1": (250, 100)})
    (found,) = worth_rows([two])
    assert found.answer == "unsettled" and found.low == found.high == pytest.approx(1.25)


def test_advice_names_the_prompts_that_go_the_other_way(row):
    good = timed(row, gain=2.6, cost=2.0, benchmark="good", domain="math")
    bad = [timed(row, gain=1.2, cost=2.0, benchmark=name, domain="chat") for name in ("bad", "worse", "third")]
    found = worth_rows([good, *bad])
    # a domain of one benchmark is that benchmark's own set, told once
    assert [w.prompts_of for w in found] == ["all", "math", "chat", "bad", "worse", "third"]
    (line,) = worth_words(found)
    assert "NOT worth it" in line and "save for prompts like math (1.30)" in line
    (line,) = worth_words(worth_rows([good, replace(good, benchmark="too"), *bad[:2]]))
    assert "Switch it off for prompts like chat (0.60)." in line


def test_a_record_reads_back_as_the_rows_it_was_made_of(row):
    assert read_eval_rows({"rows": rows_as_dicts([row])}) == [row]
    with pytest.raises(ValueError, match="no record of dspec eval"):
        read_eval_rows({"rows": [{**asdict(row), "more": 1}]})
    recorded = read_eval_rows(read_json(data_dir() / "profiles" / "dspark_cpu.json"))
    for entry, made in zip(worth_rows(recorded)[-1:], recorded[-1:], strict=True):
        # the pooled time of rounds is the speed that was measured
        assert entry.speedup == pytest.approx(made.speedup, rel=0.05)


def test_the_map_is_the_formula_and_breaks_even_where_gain_pays_for_cost():
    accept, draft_s = np.array([0.5, 0.8]), np.array([0.0, 0.004])
    found = block_speedup(TABLE, accept, draft_s, requests=1, drafts=4)
    assert found[1, 1] == pytest.approx((1 + 0.8 + 0.64 + 0.512 + 0.4096) / (0.014 + 0.004) * 0.010)
    best = break_even_map(TABLE, most_drafts=1, draft_s_Q=np.array([0.002]))
    # one draft for 1 + 2 ms more than the plain 10: a = 0.3
    assert best.break_even_Q[0] == pytest.approx(0.3, abs=1e-9)
    assert gained_tokens(np.array([1.0]), 3).tolist() == [4.0]
    assert gained_tokens(np.array([acceptance_of(2.25, 3)]), 3)[0] == pytest.approx(2.25, abs=1e-3)
    with pytest.raises(ValueError, match="gain 1 to 4 tokens a round, got 5"):
        acceptance_of(5.0, 3)


def test_more_load_and_dearer_drafts_ask_for_more_acceptance():
    needed = [break_even_map(TABLE, requests=n, draft_s_Q=np.array([0.0, 0.004])).break_even_Q for n in (1, 5, 20)]
    assert needed[0][0] < needed[1][0] and needed[0][0] < needed[0][1]
    # every row costs what it brings at best, 2 ms a token: at this load and price nothing pays
    assert np.isnan(needed[2][1])


def test_the_recorded_table_of_this_machine_is_there():
    table = recorded_cpu_table()
    assert table.rows[0] == 1 and table.last_row >= 16 and table.source == "measured"
