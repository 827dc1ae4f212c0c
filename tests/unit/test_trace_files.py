"""Trace files: written whole and readable by all, read back as they were, without a word on the terminal."""

from __future__ import annotations

import pytest

from dspec_lab.config import DecodeConfig
from dspec_lab.verifier.decode import generate
from dspec_lab.verifier.tiny import NEURAL_DRAFTERS, tiny_decoder
from dspec_lab.verifier.trace import read_trace, trace_rows, write_trace


def rows(seed: int):
    target = tiny_decoder(5)
    drafter = NEURAL_DRAFTERS["dspark"](target)
    config = DecodeConfig(gamma=3, max_new_tokens=12, temperature=1.0, ignore_eos=True, seed=seed)
    run = generate(target, drafter, (0, 1), config, trace=True)
    return trace_rows(run, request_id="r", prompt_id="p", domain="math", drafter="dspark", temperature=1.0)


def test_a_trace_comes_back_and_no_bar_is_drawn(tmp_path, capfd):
    written = rows(3)
    path = write_trace(tmp_path / "t.parquet", written)
    back = read_trace(path)
    seen = capfd.readouterr()
    assert seen.out == seen.err == ""
    assert path.stat().st_mode & 0o777 == 0o644 and list(tmp_path.iterdir()) == [path]
    assert back["draft_ids"][:] == [list(row["draft_ids"]) for row in written]
    assert back["num_accepted"][:] == [row["num_accepted"] for row in written]


def test_what_is_no_trace_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="none.parquet"):
        read_trace(tmp_path / "none.parquet")
    with pytest.raises(ValueError, match="no rounds"):
        write_trace(tmp_path / "t.parquet", [])
    broken = [{**rows(4)[0], "extra": 1}]
    with pytest.raises(ValueError, match="extra"):
        write_trace(tmp_path / "t.parquet", broken)
    assert list(tmp_path.iterdir()) == []
