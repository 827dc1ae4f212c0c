"""The card beside trained weights."""

from __future__ import annotations

import json

from dspec_lab.training.card import write_card
from dspec_lab.training.state import RunState
from dspec_lab.training.train_config import default_config

RECORD = {"cpu": "some CPU", "gpu": None, "threads": 2}


def state(steps: int) -> RunState:
    measures = {"all": {"tau": 1.5, "tau_greedy": 1.75}}
    entry = {"step": steps, "minutes": 3.0, "tokens": 50, "anchors": 40, "measures": measures}
    return RunState(steps, 180.0, 50, 40, [entry])


def test_the_card_of_a_run_that_went_on_tells_what_was_before(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    write_card(first, default_config("dspark", steps=7), state(7), {"a.parquet": {"math": 11}}, "tiny", RECORD)
    assert "went on" not in (first / "README.md").read_text()
    config = default_config("dspark", steps=9, start_from=str(first))
    write_card(second, config, state(9), {"b.parquet": {"code": 12}}, "tiny", RECORD)
    text = (second / "README.md").read_text()
    assert "9 steps of 4 sequences, 40 blocks" in text and "code 12" in text
    assert (
        "went on from a checkpoint of 7 steps (40 blocks or positions, 3 min; response tokens a.parquet: math 11)"
        in text
    )
    assert json.loads((second / "training.json").read_text())["before"]["history"][0]["step"] == 7


def test_a_start_without_a_record_is_said(tmp_path):
    config = default_config("dspark", start_from=str(tmp_path / "bare"))
    write_card(tmp_path / "out", config, state(3), {"a": {"math": 1}}, "tiny", RECORD)
    assert "no record of its training" in (tmp_path / "out" / "README.md").read_text()
