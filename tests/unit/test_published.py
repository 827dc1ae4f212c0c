"""Published numbers beside ours: which are paired, and what is said of a pair."""

from __future__ import annotations

import pandas as pd
import pytest

from dspec_lab.core.files import data_dir, read_json
from dspec_lab.evaluation import published
from dspec_lab.evaluation.paper import paper_table
from dspec_lab.evaluation.published import Compared
from dspec_lab.evaluation.worth import read_eval_rows
from dspec_lab.plots.published import published_figure


def compared(paper: float, ours: float, low=None, high=None, neutral=None) -> Compared:
    return Compared(
        what="x", where="Table 1", unit="tokens", paper=paper, ours=ours, low=low, high=high, neutral=neutral
    )


@pytest.mark.parametrize(
    ("row", "outcome"),
    [
        (compared(1.0, 0.4, 0.1, 0.6, neutral=0.0), "repeated"),
        (compared(1.0, 0.4, -0.1, 0.6, neutral=0.0), "not settled"),
        (compared(1.0, 0.4, 0.0, 0.6, neutral=0.0), "not settled"),
        (compared(1.0, -0.4, -0.9, -0.1, neutral=0.0), "contrary"),
        (compared(-1.0, -0.4, -0.9, -0.1, neutral=0.0), "repeated"),
        (compared(0.2, 0.9, neutral=1.0), "repeated"),
        (compared(0.2, 1.1, neutral=1.0), "contrary"),
        (compared(5.0, 2.0, 1.8, 2.2), "size only"),
    ],
)
def test_the_outcome_is_the_side_of_no_effect_that_the_interval_lies_on(row, outcome):
    assert row.outcome == outcome and outcome in row.line()


@pytest.fixture(scope="module")
def rows():
    return read_eval_rows(read_json(data_dir() / "profiles" / "drafters_bf16.json"))


def test_lengths_and_leads_are_those_of_record_and_table(rows):
    table = paper_table("table1")
    lengths = {row.what: row for row in published.accepted_lengths(rows, table)}
    leads = {row.what: row for row in published.leads(rows, table)}
    assert len(lengths) == 9 and len(leads) == 2 * 3 + 2
    part = [row for row in rows if row.drafter == "dspark" and row.domain == "math"]
    mine = lengths["dspark, math"]
    assert mine.ours == pytest.approx(sum(r.num_committed for r in part) / sum(r.rounds for r in part))
    assert mine.low < mine.ours < mine.high
    theirs = table[(table["target"] == "Qwen3-4B") & (table["drafter"] == "DSpark") & (table["domain"] == "math")]
    assert mine.paper == pytest.approx(theirs["accepted_length"].mean()) and len(theirs) == 3
    lead = leads["dspark - dflash, math"]
    assert lead.ours == pytest.approx(mine.ours - lengths["dflash, math"].ours)
    assert lead.paper == pytest.approx(mine.paper - lengths["dflash, math"].paper)
    over_all, counts = leads["dspark - dflash, all"], {}
    for name in ("dspark", "dflash"):
        each = [row for row in rows if row.drafter == name]
        counts[name] = sum(r.num_committed for r in each) / sum(r.rounds for r in each)
    assert over_all.ours == pytest.approx(counts["dspark"] - counts["dflash"])
    mine = table[table["target"] == "Qwen3-4B"].groupby("drafter")["accepted_length"].mean()
    assert over_all.paper == pytest.approx(mine["DSpark"] - mine["DFlash"])
    with pytest.raises(ValueError, match="'GPT'"):
        published.leads(rows, table, "GPT")


def test_acceptance_kept_along_the_block_is_a_ratio_of_conditional_chances(rows):
    from dataclasses import replace

    row = next(row for row in rows if row.drafter == "dspark" and row.domain == "math")
    one = replace(row, rounds=10, survival_by_position=[0.8, 0.4, 0.2, 0.1])
    two = replace(row, rounds=30, survival_by_position=[0.4, 0.4, 0.2])
    figure2 = pd.DataFrame(
        {
            "domain": "math",
            "drafter": "DSpark",
            "position": [1, 2, 3, 4],
            "conditional_acceptance": [0.8, 0.4, 0.6, 0.8],
        }
    )
    (found,) = published.kept_along_block([one, two], figure2)
    # survival 0.5, 0.4, 0.2, 0.025 of forty rounds: conditional 0.8, 0.5, 0.125 after the first
    assert found.ours == pytest.approx((0.8 + 0.5 + 0.125) / 3 / 0.5) and found.paper == pytest.approx(0.6 / 0.8)
    with pytest.raises(ValueError, match="got 1"):
        published.kept_along_block(rows, figure2, positions=1)


def test_calibration_is_read_at_the_papers_positions():
    record = read_json(data_dir() / "profiles" / "dspark_calibration_chat.json")
    found = published.calibration(record, paper_table("fig6_summary"), "platt", "chat")
    assert [row.what for row in found[:2]] == ["ECE, draft 1", "AUROC, draft 1"] and len(found) == 8
    part = next(p for p in record["by_domain"] if p["method"] == "platt" and p["domain"] == "chat")
    first = part["positions"][0]
    assert found[0].ours == first["ece_after"] / first["ece_before"] and found[0].paper == pytest.approx(0.020 / 0.057)
    assert found[1].ours == first["auroc_after"] and found[1].paper == 0.818
    with pytest.raises(ValueError, match="'hope'"):
        published.calibration(record, paper_table("fig6_summary"), "hope", "chat")


def test_serving_gains_are_shares():
    gains = {"throughput_gain": {"ours": 0.5, "paper": 0.51}, "speed_gain": {"ours": -0.1, "paper": 0.6}}
    assert [row.outcome for row in published.serving(gains)] == ["repeated", "contrary"]


def test_the_figure_has_a_line_for_each_pair():
    pairs = [compared(5.0, 2.0, 1.8, 2.2), compared(4.0, 1.5)]
    figure = published_figure({"length": pairs, "lead": [compared(1.0, 0.4, neutral=0.0)]})
    length, lead = figure.axes
    assert [label.get_text() for label in length.get_yticklabels()] == ["x", "x"]
    drawn = {tuple(line.get_xdata()) for line in length.lines}
    assert {(5.0, 2.0), (4.0, 1.5), (1.8, 2.2), (5.0,), (2.0,)} <= drawn
    assert (0.0, 0.0) in {tuple(line.get_xdata()) for line in lead.lines}
    assert "paper 5.00, here 2.00 (1.80 to 2.20) tokens; size only" in figure.alt
    with pytest.raises(ValueError, match="every group"):
        published_figure({"length": []})
