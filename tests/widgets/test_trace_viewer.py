"""The trace viewer: filters, outcomes, its panel, and its static file, also with 10^5 rounds."""

from __future__ import annotations

import json
import re
import time

import numpy as np
import pytest

from dspec_lab.config import DecodeConfig
from dspec_lab.drafters.autoregressive import AutoregressiveDrafter
from dspec_lab.models.toy import TableTarget
from dspec_lab.plots.style import LabFigure, png_bytes
from dspec_lab.verifier.decode import generate
from dspec_lab.verifier.trace import trace_rows, write_trace
from dspec_lab.widgets.trace_html import write_trace_html
from dspec_lab.widgets.trace_table import TraceTable, token_texts
from dspec_lab.widgets.trace_viewer import PAGE, TraceViewer, ViewerState

WORDS = ("the", " cat", "</script><b>", "\n", " sat", " on", " mat", ".")


class WordTokenizer:
    """A token is one of eight texts, one of them hostile."""

    def decode(self, token_ids, **options):
        return "".join(WORDS[token] for token in token_ids)


def row(index, num_accepted, confidence, *, request="a#0", domain="chat", own=7):
    gamma = len(confidence)
    return {
        "request_id": request, "prompt_id": request[:1], "domain": domain, "drafter": "d", "temperature": 1.0,
        "round": index, "context_tokens": 9, "gamma": gamma, "draft_ids": [k % 8 for k in range(gamma)],
        "confidence": confidence, "accepted": [k < num_accepted for k in range(gamma)], "num_accepted": num_accepted,
        "accept_prob": [0.5] * gamma, "target_entropy_bits": [1.25] * gamma, "draft_entropy_bits": [2.5] * gamma,
        "draft_s": 0.1, "verify_s": 0.1, "overhead_s": 0.0, "next_token": own,
    }  # fmt: skip


ROWS = [
    row(0, 3, [0.9, 0.8, 0.9]),
    row(1, 1, [0.9, 0.4, 0.9]),
    row(2, 0, [0.3, 0.9, 0.9], own=-1),
    row(0, 0, [], request="b#0", domain="math"),
]


@pytest.fixture
def table(tmp_path):
    return TraceTable.read(write_trace(tmp_path / "t.parquet", ROWS))


def test_a_file_and_rows_give_the_same_table(table):
    other = TraceTable.of_rows(ROWS)
    for index in range(4):
        assert [t.outcome for t in table.tokens(index)] == [t.outcome for t in other.tokens(index)]
    assert table.domains == ("chat", "math") and table.requests == ("a#0", "b#0")
    assert table.token_ids() == (0, 1, 2, 7)


def test_outcomes_and_numbers_of_a_round(table):
    first, second, third, own = table.tokens(1, threshold=0.5)
    assert [t.outcome for t in (first, second, third, own)] == ["accepted", "rejected", "discarded", "extra"]
    assert second.survival == pytest.approx(0.36) and third.survival == pytest.approx(0.324)
    assert [t.cut for t in (first, second, third, own)] == [False, True, True, False]
    assert (first.accept_prob, first.target_entropy_bits, first.draft_entropy_bits) == (0.5, 1.25, 2.5)
    assert (own.token_id, own.position) == (7, None)
    assert len(table.tokens(2)) == 3  # an end token left no token of the target's own


def test_filters(table):
    assert table.select().tolist() == [0, 1, 2, 3]
    assert table.select(domain="math").tolist() == [3] and table.select(request="a#0").tolist() == [0, 1, 2]
    shows = {show: table.select(show=show, threshold=0.5).tolist() for show in (
        "rejected", "whole block kept", "nothing kept", "cut by the threshold")}  # fmt: skip
    assert shows == {
        "rejected": [1, 2], "whole block kept": [0], "nothing kept": [2, 3], "cut by the threshold": [1, 2],
    }  # fmt: skip
    assert table.kept_lengths(0.5).tolist() == [3, 1, 0, 0]
    with pytest.raises(ValueError, match="no domain 'law'"):
        table.select(domain="law")


def test_a_trace_without_confidences_or_own_tokens_is_shown_too():
    rows = [{k: v for k, v in r.items() if k != "next_token"} | {"confidence": []} for r in ROWS]
    plain = TraceTable.of_rows(rows)
    assert plain.tokens(0)[0].survival is None and len(plain.tokens(0)) == 3
    assert plain.kept_lengths(0.9).tolist() == [3, 3, 3, 0]


def test_the_panel_shows_a_page_and_follows_its_controls(table):
    shown = TraceViewer(table, WordTokenizer())
    assert shown.state() == ViewerState() and "4 of 4 rounds" in shown.text.value
    assert "<b>" not in shown.text.value and "&lt;/script&gt;" in shown.text.value and "↵" not in WORDS
    shown.shown.value = "rejected"
    assert "2 of 4 rounds" in shown.text.value
    assert "outline" not in shown.text.value
    shown.threshold.value = 0.5
    assert "cut by the threshold" in shown.text.value and "outline" in shown.text.value
    shown.domain.value, shown.shown.value = "math", "all"
    assert "1 of 4 rounds" in shown.text.value
    figure = shown.static()
    assert isinstance(figure, LabFigure) and "1 of 4 rounds" in figure.alt
    assert png_bytes(figure).startswith(b"\x89PNG")


def test_a_page_past_the_end_is_the_last_one(table):
    many = TraceTable.of_rows([row(i, 1, [0.9, 0.2]) for i in range(PAGE + 3)])
    shown = TraceViewer(many, WordTokenizer())
    shown.page.value = 9
    assert "page 2 of 2" in shown.text.value and f"round {PAGE + 2}:" in shown.text.value
    with pytest.raises(ValueError, match="at least 0, got -1"):
        ViewerState(page=-1)
    with pytest.raises(ValueError, match="0..1, got 2.0"):
        ViewerState(threshold=2.0)


def test_the_static_file_holds_the_trace_and_no_live_markup(table, tmp_path):
    path = write_trace_html(tmp_path / "v.html", table, WordTokenizer(), title="a <trace>")
    page = path.read_text()
    assert "<title>a &lt;trace&gt;</title>" in page and "http" not in page.split("<script")[0]
    (text,) = re.findall(r'id="data">(.*?)</script>', page, flags=re.S)
    data = json.loads(text)
    assert data["texts"]["2"] == "</script><b>" and page.count("</script>") == 2
    assert data["gamma"] == [3, 3, 3, 0] and data["next_token"] == [7, 7, -1, 7]
    assert data["start"]["confidence"] == [0, 3, 6, 9, 9] and data["confidence"][:3] == [900, 800, 900]


def test_a_hundred_thousand_rounds(tmp_path):
    count, gamma = 100_000, 7
    generator = np.random.default_rng(0)
    kept = generator.integers(0, gamma + 1, count)
    columns = {
        "request_id": np.char.add("r", (np.arange(count) // 500).astype(str)), "prompt_id": np.full(count, "p"),
        "domain": np.full(count, "chat"), "drafter": np.full(count, "d"), "temperature": np.ones(count),
        "round": np.arange(count) % 500, "context_tokens": np.ones(count), "gamma": np.full(count, gamma),
        "num_accepted": kept, "next_token": np.full(count, 3),
    }  # fmt: skip
    flat = {name: generator.random(count * gamma) for name in (
        "confidence", "accept_prob", "target_entropy_bits", "draft_entropy_bits")}  # fmt: skip
    flat["draft_ids"] = generator.integers(0, 8, count * gamma)
    table = TraceTable(columns, flat, {name: np.full(count, gamma) for name in flat})
    shown = TraceViewer(table, WordTokenizer())
    start = time.process_time()
    shown.threshold.value = 0.4
    shown.shown.value = "cut by the threshold"
    # two changes; each must take less than half a second, with room for a slow machine
    assert time.process_time() - start < 2.0
    assert f"of {count} rounds" in shown.text.value
    assert write_trace_html(tmp_path / "v.html", table, WordTokenizer()).stat().st_size < 40e6


@pytest.mark.parametrize("eos_ids", [(), (5,)])
def test_a_recorded_trace_holds_the_whole_text_but_its_first_token(eos_ids, tmp_path):
    target = TableTarget.random(8, order=2, sharpness=1.5, seed=1, eos_ids=eos_ids)
    drafter = AutoregressiveDrafter(TableTarget.random(8, sharpness=1.5, seed=2))
    for seed in range(4):
        config = DecodeConfig(gamma=3, temperature=1.0, max_new_tokens=20, seed=seed)
        run = generate(target, drafter, [0, 1], config, trace=True)
        rows = trace_rows(run, request_id="r", prompt_id="p", domain="d", drafter="x", temperature=1.0)
        if not rows:
            continue
        table = TraceTable.read(write_trace(tmp_path / "t.parquet", rows))
        kept = [token.token_id for index in range(len(table)) for token in table.tokens(index)
                if token.outcome in ("accepted", "extra")]  # fmt: skip
        assert kept == run.token_ids[1:]


def test_token_texts_make_blanks_visible():
    assert token_texts(WordTokenizer(), [1, 3]) == {1: "·cat", 3: "↵"}
