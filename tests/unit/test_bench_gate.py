"""The simulated comparison of gated policies with fixed lengths: sets of texts, ratios, bad arguments."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dspec_lab.bench.gate import LENGTHS, POLICIES, gate_rows, main, text_sets, throughput
from dspec_lab.scheduler.cost_table import CostTable, DraftCost, save_table
from dspec_lab.scheduler.policies import FixedLength
from dspec_lab.serving.measured import MeasuredAcceptance, MeasuredText

CHEAP = CostTable(rows=(1, 400), seconds=(0.010, 0.014), draft=DraftCost(joint=True, per_request_s=0.0005))
DEAR = CostTable(rows=(1, 400), seconds=(0.010, 2.000), draft=DraftCost(joint=True, per_request_s=0.0050))


def measured(texts: int = 6, seed: int = 0) -> MeasuredAcceptance:
    """Texts of two domains, each accepting geometrically, with confidences that know something of it."""
    rng, gamma, found = np.random.default_rng(seed), 5, []
    for index in range(texts):
        chance = 0.8 if index % 2 else 0.5
        accepted = np.minimum(rng.geometric(1 - chance, 30) - 1, gamma)
        told = [[0.9 if k < kept else 0.4 for k in range(gamma)] for kept in accepted]
        found.append(
            MeasuredText(
                domain=("math", "chat")[index % 2], prompt_tokens=20, accepted=tuple(accepted.tolist()),
                confidence=tuple(map(tuple, told)),
            )
        )  # fmt: skip
    return MeasuredAcceptance(drafter="dspark", gamma=gamma, texts=tuple(found))


def test_sets_hold_as_many_texts_of_each_domain_and_no_text_twice():
    whole = measured(8)
    sets = text_sets(whole, 5, 3, seed=1)
    assert len(sets) == 5 and len({tuple(map(id, each.texts)) for each in sets}) > 1
    for each in sets:
        assert sorted(text.domain for text in each.texts) == ["chat"] * 3 + ["math"] * 3
        assert len({id(text) for text in each.texts}) == 6
    with pytest.raises(ValueError, match="1..4, the texts of math, got 5"):
        text_sets(whole, 1, 5, seed=1)


def test_ratios_are_of_the_best_fixed_length_and_of_plain_decoding():
    sets = text_sets(measured(), 2, 2, seed=0)
    rows = gate_rows(sets, {"cheap": CHEAP, "dear": DEAR}, requests=(1, 4))
    assert [(row["table"], row["requests"], row["policy"]) for row in rows] == [
        (table, places, policy) for table in ("cheap", "dear") for places in (1, 4) for policy in POLICIES
    ]
    for row in rows:
        for mean, least, largest in (row["of_fixed"], row["of_any"]):
            assert least <= mean <= largest
        assert row["of_any"][0] <= row["of_fixed"][0]
    # where rows are dear plain decoding is the best choice by far, and a gate comes near it
    dear = [row for row in rows if row["table"] == "dear" and row["requests"] == 4]
    assert all(row["of_fixed"][1] > 1.3 and 0.8 < row["of_any"][0] <= 1 for row in dear)
    # where they are cheap drafting pays
    assert all(row["of_any"][0] == row["of_fixed"][0] for row in rows if row["table"] == "cheap")
    fixed = [throughput(sets[0], CHEAP, 1, FixedLength(length)) for length in LENGTHS]
    assert max(fixed) > throughput(sets[0], CHEAP, 1, None)


def test_the_command_writes_its_rows_and_names_what_is_wrong(tmp_path, capsys):
    record, table, out = tmp_path / "serve.json", tmp_path / "table.json", tmp_path / "out.json"
    record.write_text(json.dumps({"acceptance": measured().as_dict()}))
    save_table(table, CHEAP)
    asked = [str(out), "--record", str(record), "--tables", str(table), "--sets", "1", "--per-domain", "2"]
    assert main(asked) == 0
    found = json.loads(out.read_text())
    assert {row["table"] for row in found["rows"]} == {"table.json"} and found["run"]["settings"]["sets"] == 1
    assert capsys.readouterr().out.count("of_fixed") == len(found["rows"])
    short = save_table(tmp_path / "short.json", CostTable(rows=(1, 4), seconds=(1.0, 2.0)))
    (tmp_path / "other").mkdir()
    other = save_table(tmp_path / "other" / "table.json", DEAR)
    none = [*asked[:-3], "0", "--per-domain", "2"]
    (tmp_path / "empty.json").write_text("{}")
    for wrong, said in (
        ([*asked[:5], str(other), *asked[5:]], "two cost tables are called table.json"),
        ([*asked[:4], str(short), *asked[5:]], "short.json must tell 192 rows from one, and ends at 4"),
        (none, "sets must be at least 1, got 0"),
        ([*asked[:2], str(tmp_path / "empty.json"), *asked[3:]], "no measured acceptance"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(wrong)
        assert stop.value.code == 2
        assert said in capsys.readouterr().err
