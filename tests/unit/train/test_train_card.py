"""The card beside trained weights."""

from __future__ import annotations

import json

import pytest

from dspec_lab.core.files import data_dir
from dspec_lab.training.budget import positions_trained, read_stages, stages_of
from dspec_lab.training.card import write_card
from dspec_lab.training.state import RunState
from dspec_lab.training.train_config import default_config

RECORD = {"cpu": "some CPU", "gpu": None, "threads": 2, "settings": {}}


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
    assert "With its own earlier stages that one had passed 40 positions." in text
    assert json.loads((second / "training.json").read_text())["before"]["history"][0]["step"] == 7
    assert positions_trained(first) == 40 and positions_trained(second) == 80
    assert [stage.first_position for stage in read_stages(second)] == [0, 40]
    assert [list(stage.data) for stage in read_stages(second)] == [["a.parquet"], ["b.parquet"]]


def test_stages_of_the_confidence_head_alone_train_no_drafts():
    def stage(positions, part, before=None):
        record = {"history": [{"anchors": positions}], "data": {}, "run": {"settings": {"trained_part": part}}}
        return record if before is None else {**record, "before": before}

    stages = stages_of(stage(5, "all", stage(7, "confidence", stage(11, None))))
    assert [(each.first_position, each.positions) for each in stages] == [(0, 11), (11, 5)]
    with pytest.raises(ValueError, match="no history"):
        stages_of({"history": [], "run": {"settings": {}}})


def test_the_records_of_the_weights_in_the_tree_say_how_much_each_was_trained():
    """DSpark's three stages (`data/checkpoints/smollm2/dspark/README.md`), the confidence stage between not counted."""
    folder = data_dir() / "checkpoints" / "smollm2"
    assert positions_trained(folder / "dspark") == 557611 + 760424 + 579488
    with pytest.raises(ValueError, match="has no training.json"):
        read_stages(folder)


def test_a_start_without_a_record_is_said(tmp_path):
    config = default_config("dspark", start_from=str(tmp_path / "bare"))
    write_card(tmp_path / "out", config, state(3), {"a": {"math": 1}}, "tiny", RECORD)
    assert "no record of its training" in (tmp_path / "out" / "README.md").read_text()
