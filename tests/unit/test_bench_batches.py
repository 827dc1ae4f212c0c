"""The benchmarks of batches and trees: what they measure is what they say, on a decoder of a few tokens."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dspec_lab.bench import drafting as drafting_module
from dspec_lab.bench import ragged as ragged_module
from dspec_lab.bench.drafting import bench_drafting
from dspec_lab.bench.ragged import bench_ragged
from dspec_lab.bench.timing import spread
from dspec_lab.bench.trees import _pays, bench_trees
from dspec_lab.cli.main import main
from dspec_lab.drafters import together
from dspec_lab.drafters.prompt_lookup import PromptLookupDrafter
from dspec_lab.verifier import request as request_module
from dspec_lab.verifier.tiny import NEURAL_DRAFTERS, tiny_decoder

PROMPTS = [(0, 1), (1, 2, 1)]


def test_ragged_rounds_beside_single_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    # by this clock every pass takes 1 ms, and a ragged one 50 ms more
    now = [0.0]
    calls: list[int] = []
    real = ragged_module.extend_ragged

    def slow(sessions, feeds):  # type: ignore[no-untyped-def]
        calls.append(sum(map(len, feeds)))
        now[0] += 0.05
        return real(sessions, feeds)

    def tick() -> float:
        now[0] += 0.001
        return now[0]

    monkeypatch.setattr(ragged_module, "extend_ragged", slow)
    monkeypatch.setattr(ragged_module, "time", SimpleNamespace(perf_counter=tick))
    found = bench_ragged(tiny_decoder(), PROMPTS, requests=(1, 3), drafts=(2, 1), repeats=2)
    three = found["by_requests"]["3"]
    assert three["rows"] == [3, 2, 3] and three["context_tokens"] == [2, 3, 2]
    assert set(three["cost_ms_by_rows"]) == {"2", "3", "8"}
    assert calls == [3, 3, 3, 8, 8, 8]  # a warm-up and two repeats, all rows in one pass
    assert three["ragged_ms"]["min"] > 50
    for row in found["by_requests"].values():
        assert row["round"]["outputs_equal"]
        assert row["share_of_bound"] == pytest.approx(row["ratio"]["median"] / row["bound"]["median"])
        # the planted wait is a loss against the bound, and shows as one
        assert row["share_of_bound"] < 0.6


def test_drafting_in_one_pass_beside_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # by this clock a look takes 1 ms and a pass of the draft layers 10 ms, whatever its size
    now = [0.0]

    def tick() -> float:
        now[0] += 0.001
        return now[0]

    def timed(run):  # type: ignore[no-untyped-def]
        def passed(*given):  # type: ignore[no-untyped-def]
            now[0] += 0.01
            return run(*given)

        return passed

    target = tiny_decoder(5)
    drafter = NEURAL_DRAFTERS["dspark"](target)
    monkeypatch.setattr(together, "hidden_blocks", timed(together.hidden_blocks))
    monkeypatch.setattr(drafter.model, "block_hidden", timed(drafter.model.block_hidden))
    for module in (drafting_module, together, request_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=tick))
    found = bench_drafting(target, drafter, PROMPTS, requests=(1, 4), repeats=2)
    assert (found["drafter"], found["gamma"]) == ("dspark", 3)
    one, four = found["by_requests"]["1"], found["by_requests"]["4"]
    assert one["drafts_equal"] and four["drafts_equal"]
    assert 40 < four["single_ms"]["min"] < 60 and 10 < four["joint_ms"]["max"] < 20
    assert four["ratio"]["median"] > 2.5 > 1.3 > one["ratio"]["median"] > 0.8
    with pytest.raises(ValueError, match="mtp drafts for one request at a time"):
        bench_drafting(target, NEURAL_DRAFTERS["mtp"](target), PROMPTS, requests=(1,))


def test_trees_by_width(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_decoder()
    drafters = {"truncated": NEURAL_DRAFTERS["truncated"](target), "copy": PromptLookupDrafter()}
    rows = bench_trees(target, drafters, PROMPTS, widths=(1, 2), gamma=2, new_tokens=12, repeats=2)
    found = {(row["drafter"], row["temperature"], row["width"]): row for row in rows}
    assert len(found) == len(rows) == 8
    chain, wide = found["truncated", 0.0, 1], found["truncated", 0.0, 2]
    assert 1 <= chain["accepted_length"] <= wide["accepted_length"] <= 3
    assert chain["rows_per_round"] < wide["rows_per_round"] <= 5
    assert chain["gain"]["median"] == 1 and chain["pays"] is None
    assert wide["pays"] in ("yes", "no", "unclear")
    assert {chain["outputs_equal_plain"], wide["outputs_equal_plain"]} <= {True, "inconclusive"}
    assert found["truncated", 1.0, 2]["outputs_equal_plain"] is None
    assert "no logits" in found["copy", 0.0, 2]["refused"]
    assert _pays([1.1, 1.01]) == "yes" and _pays([0.9, 0.99]) == "no" and _pays([0.9, 1.1]) == "unclear"


def test_bad_settings_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    target = tiny_decoder()
    with pytest.raises(ValueError, match="repeats >= 2, got 1"):
        bench_ragged(target, PROMPTS, repeats=1)
    with pytest.raises(ValueError, match=r"drafts .* got \[0\]"):
        bench_ragged(target, PROMPTS, drafts=(0,))
    with pytest.raises(ValueError, match=r"got \[2\] x 4"):
        bench_trees(target, {}, PROMPTS, widths=(2,))
    assert main(["bench", "nonsense"]) == 2
    assert "'nonsense'" in capsys.readouterr().err
    assert main(["bench", "ragged", "--gamma", "3"]) == 2
    assert "--gamma" in capsys.readouterr().err
    assert main(["bench", "ragged", "--drafters", "dspark,dflash"]) == 2
    assert "one drafter, got dspark, dflash" in capsys.readouterr().err


def test_spread() -> None:
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0}
