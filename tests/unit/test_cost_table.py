"""The cost table: kept as measured, checked aloud, and exchanged with SGLang."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from dspec_lab.scheduler.cost_table import CostSample, CostTable, DraftCost, load_table, save_table, table_from_samples
from dspec_lab.scheduler.sglang_table import parse_sglang, sglang_values, without_request_terms, write_sglang


def stairs(**options) -> CostTable:
    return CostTable(rows=(1, 8, 9, 16), seconds=(0.010, 0.011, 0.020, 0.021), **options)


def test_steps_and_cliffs_are_kept_between_probes():
    linear, floor = stairs(), stairs(lookup="floor")
    assert linear.verify_s_N[8] == 0.011 and linear.verify_s_N[9] == 0.020
    assert linear.verify_s_N[4] == pytest.approx(0.010 + 3 / 7 * 0.001)
    np.testing.assert_array_equal(floor.verify_s_N[1:], [0.010] * 7 + [0.011] + [0.020] * 7 + [0.021])
    assert np.isinf(linear.verify_s_N[0]) and len(linear.verify_s_N) == 17


def test_a_round_adds_every_term_once():
    draft = DraftCost(fixed_s=0.001, per_request_s=0.002, per_token_s=0.003)
    table = stairs(fixed_s=0.1, settle_per_request_s=0.01, context_tokens=10, context_s=1e-4, draft=draft)
    assert draft.seconds(2, 6) == pytest.approx(0.001 + 0.004 + 0.018) and draft.seconds(0, 0) == 0
    found = table.round_s_N(2, 8, draft_s=0.5, context_tokens=30.0)
    wanted = [table.verify_s_N[2 + n] + 0.1 + 0.02 + 0.5 + 1e-4 * 20 * (2 + n) for n in range(9)]
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
    assert table.steps_per_s(9) == pytest.approx(1 / (0.020 + 0.1 + 0.01))


def test_a_joint_drafting_pass_is_priced_by_what_was_measured():
    draft = DraftCost(
        drafter="dspark", joint=True, request_probes=(1, 4, 16), request_s=(0.006, 0.009, 0.027), per_token_s=1e-4
    )
    np.testing.assert_allclose(draft.by_requests_N(4), [0, 0.006, 0.007, 0.008, 0.009])
    assert draft.seconds(4, 28) == pytest.approx(0.009 + 0.0028) and draft.seconds(0, 0) == 0
    # beyond the last probe by the mean slope, 1.4 ms a request
    assert draft.seconds(26, 0) == pytest.approx(0.027 + 10 * 0.0014)
    assert draft.growth(4, 7) == pytest.approx((0.009 + 0.0028) / (0.006 + 0.0007)) and draft.growth(1, 7) == 1
    for joint in (None, False):
        assert replace(draft, joint=joint).growth(4, 7) == 4
    assert DraftCost(joint=True).growth(3, 7) == 3
    for options, words in (
        (dict(request_probes=(1, 2), request_s=(0.1,)), "2 request counts but 1 times"),
        (dict(request_probes=(2, 2), request_s=(0.1, 0.1)), r"rise from 1, got \[2, 2\]"),
        (dict(request_probes=(1,), request_s=(-0.1,)), "0 or more and finite, got -0.1"),
        (dict(request_probes=(1,), request_s=(0.1,), per_request_s=0.1), "must be 0 then"),
    ):
        with pytest.raises(ValueError, match=words):
            DraftCost(**options)


def test_tables_from_before_joint_drafting_are_read_and_told(tmp_path):
    draft = DraftCost(drafter="dspark", joint=True, request_probes=(1, 4), request_s=(0.006, 0.009), per_token_s=1e-4)
    path = save_table(tmp_path / "t.json", stairs(draft=draft))
    assert load_table(path).draft == draft and not any(text.startswith("old") for text in load_table(path).findings())
    values = json.loads(path.read_text())
    values["draft"] = {"drafter": "dspark", "fixed_s": 0.001, "per_request_s": 0.006, "per_token_s": 1e-4}
    path.write_text(json.dumps(values))
    old = load_table(path)
    assert old.draft.joint is None and old.draft.seconds(4, 0) == pytest.approx(0.025) and old.draft.growth(4, 7) == 4
    assert any(text.startswith("old: drafting with dspark") for text in old.findings())
    path.write_text(json.dumps({**values, "draft": {"joint": "yes"}}))
    with pytest.raises(ValueError, match="yes"):
        load_table(path)
    values["draft"]["request_s"] = 0.1
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match="draft request_s must be a list, got 0.1"):
        load_table(path)


def test_nothing_beyond_the_last_probe_is_ever_worth_it():
    table = stairs()
    assert np.isinf(table.round_s_N(4, 20)[13:]).all() and np.isfinite(table.round_s_N(4, 20)[:13]).all()
    with pytest.raises(ValueError, match="covers 1 to 16 rows, 17 requests"):
        table.round_s_N(17, 1)


@pytest.mark.parametrize(
    ("rows", "seconds", "words"),
    [
        ((), (), "empty"),
        ((1, 2), (0.1,), "2 row counts but 1 times"),
        ((1, 1), (0.1, 0.1), "rise strictly"),
        ((0, 1), (0.1, 0.1), "at least 1"),
        ((1, 2), (0.1, 0.0), "above 0"),
        ((1, 2), (0.1, float("nan")), "above 0 and finite, got nan"),
    ],
)
def test_impossible_tables_are_refused(rows, seconds, words):
    with pytest.raises(ValueError, match=words):
        CostTable(rows=rows, seconds=seconds)


def test_findings_say_what_is_wrong_with_a_table():
    flat = CostTable(rows=(1, 8, 64), seconds=(0.010, 0.0101, 0.0102))
    assert flat.flat and "flat" in flat.findings()[0]
    fell = CostTable(rows=(1, 8, 9), seconds=(0.01, 0.03, 0.02))
    assert any("falls: 9 rows take 0.02 s" in text for text in fell.findings())
    assert fell.verify_s_N[9] == 0.02, "kept as measured"
    assert any(text.startswith("short: ends at 16 rows") for text in stairs().findings(need_rows=17))
    assert stairs().findings(need_rows=16) == []
    assert any("no raw samples" in text for text in stairs(source="measured").findings())
    samples = [CostSample(rows=r, context_tokens=4, requests=1, seconds=s) for r in (1, 2, 4) for s in (1.0, 1.1, 2.0)]
    assert sum("noisy" in text for text in table_from_samples(samples).findings()) == 3


def test_samples_are_kept_and_give_medians_and_the_context_slope(tmp_path):
    samples = [
        CostSample(rows=rows, context_tokens=context, requests=1, seconds=0.01 * rows + 1e-5 * rows * context + noise)
        for rows in (1, 2, 4)
        for context in (100, 300)
        for noise in (0.0, 1e-6, 5e-6)
    ]
    table = table_from_samples(samples, name="toy")
    assert table.rows == (1, 2, 4) and table.context_tokens == 100
    assert table.seconds[1] == pytest.approx(0.02 + 2e-3 + 1e-6)
    assert table.context_s == pytest.approx(1e-5, rel=1e-2)
    assert load_table(save_table(tmp_path / "t.json", table)) == table
    assert len(load_table(tmp_path / "t.json").samples) == 18


def test_files_that_are_no_tables_are_refused_by_name(tmp_path):
    path = tmp_path / "x.json"
    for text, words in (
        ("[]", "not a cost table"),
        ("{}", "format must be"),
        ('{"format": "dspec cost table 1", "rows": [1], "seconds": [1.0], "speed": 3}', "no setting 'speed'"),
        ('{"format": "dspec cost table 1", "rows": 3, "seconds": [1.0]}', "rows must be a list"),
        ('{"sample_batch_tokens": [1, 2]}', "lacks sample_steps_per_sec, max_batch_tokens"),
        ('{"sample_batch_tokens": [1], "bias_seconds": 1}', "mixed"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=words) as caught:
            load_table(path)
        assert str(path) in str(caught.value)
    with pytest.raises(FileNotFoundError, match="dspec profile"):
        load_table(tmp_path / "none.json")


def test_sglang_by_rows_reads_as_a_floor_and_comes_back_the_same(tmp_path):
    values = {"sample_batch_tokens": [1, 8, 16], "sample_steps_per_sec": [100.0, 90.0, 50.0], "max_batch_tokens": 32}
    table = parse_sglang(values)
    assert table.lookup == "floor" and table.last_row == 32
    assert table.verify_s_N[15] == pytest.approx(1 / 90) and table.verify_s_N[32] == pytest.approx(1 / 50)
    path = write_sglang(tmp_path / "sps.json", table)
    back = json.loads(path.read_text())
    assert back["sample_batch_tokens"] == [1, 8, 16] and back["max_batch_tokens"] == 32
    np.testing.assert_allclose(back["sample_steps_per_sec"], values["sample_steps_per_sec"], rtol=1e-12)
    assert load_table(path).rows == table.rows


def test_sglang_additive_form_adds_bias_requests_and_rows():
    values = {
        "bias_seconds": 0.01, "bs_probes": [1, 5], "alpha_seconds": [0.0, 0.004],
        "m_probes": [1, 11], "theta_seconds": [0.0, 0.010],
    }  # fmt: skip
    table = parse_sglang(values)
    # 3 requests and 3 drafts: theta(6) = 0.005, alpha(3) = 0.002
    assert table.round_s_N(3, 3)[3] == pytest.approx(0.01 + 0.005 + 0.002)
    with pytest.raises(ValueError, match="by requests"):
        sglang_values(table)
    frozen = sglang_values(without_request_terms(table, 5))
    assert 1 / frozen["sample_steps_per_sec"][-1] == pytest.approx(0.01 + 0.010 + 0.004)


def test_an_interpolated_table_is_written_with_probes_close_enough_for_a_floor():
    values = sglang_values(CostTable(rows=(1, 101), seconds=(0.01, 0.02)))
    back = parse_sglang(values)
    line = np.interp(np.arange(1, 102), (1, 101), (0.01, 0.02))
    assert np.abs(back.verify_s_N[1:] / line - 1).max() < 0.021
    assert values["sample_batch_tokens"][0] == 1 and values["sample_batch_tokens"][-1] == 101


def test_requests_of_one_row_each_give_the_term_by_requests():
    """A pass takes 5 ms, 0.5 ms a row and 0.25 ms a request: both terms are found again, and passes of any shape."""

    def truth_s(rows: int, requests: int) -> float:
        return 0.005 + 0.0005 * rows + 0.00025 * (requests - 1)

    shared = [(n, -(-n // 8)) for n in (1, 4, 8, 16, 32, 64)]
    alone = [(n, n) for n in (4, 8, 16, 32)]
    samples = [
        CostSample(rows=n, context_tokens=64, requests=r, seconds=truth_s(n, r))
        for n, r in shared + alone
        for _ in range(2)
    ]
    table = table_from_samples(samples)
    assert table.request_probes == (1, 4, 8, 16, 32)
    for requests, drafts in ((1, 0), (4, 0), (8, 8), (16, 16), (16, 48), (32, 32)):
        found_s = float(table.round_s_N(requests, drafts)[-1])
        assert found_s == pytest.approx(truth_s(requests + drafts, requests), rel=1e-9), (requests, drafts)
    # without them nothing is known of requests
    assert table_from_samples(samples[: 2 * len(shared)]).request_probes == ()
