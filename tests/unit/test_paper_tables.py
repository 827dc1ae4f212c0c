"""The paper's tables load whole, and the numbers that the paper states twice agree with each other."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from dspec_lab.core.files import data_dir
from dspec_lab.evaluation.paper import ESTIMATES, paper_table, paper_table_names

GIVEN_TABLES = Path(__file__).resolve().parents[2].parent / "shared" / "paper"

ROWS = {
    "algorithm_facts": 131,
    "fig2_conditional_acceptance": 63,
    "fig3_depth": 36,
    "fig4_block_size": 36,
    "fig4_latency": 12,
    "fig5_threshold_sweep": 30,
    "fig6_histogram": 80,
    "fig6_reliability": 159,
    "fig6_summary": 4,
    "fig7_anchors": 4,
    "fig7_frontier": 242,
    "fig8_batch_plateaus": 14,
    "fig8_budget": 202,
    "fig8_implied_sps": 126,
    "fig8_implied_tau": 38,
    "fig8_load": 309,
    "fig8_sps_params": 8,
    "table1": 108,
}


def test_every_table_loads_with_all_its_rows() -> None:
    assert {name: len(paper_table(name)) for name in paper_table_names()} == ROWS


def test_readme_describes_every_table_and_marks_the_estimates() -> None:
    readme = (data_dir() / "paper" / "README.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*)$", readme, re.MULTILINE))
    assert set(rows) == set(paper_table_names())
    assert {name for name, text in rows.items() if text.startswith("ESTIMATE")} == ESTIMATES


@pytest.mark.skipif(not GIVEN_TABLES.is_dir(), reason="the tables as first read are not beside the tree")
def test_bundled_tables_are_the_tables_as_first_read() -> None:
    given = {path.stem: path.read_bytes() for path in GIVEN_TABLES.glob("*.csv")}
    assert {path.stem: path.read_bytes() for path in (data_dir() / "paper").glob("*.csv")} == given


def test_cells_keep_their_type() -> None:
    facts = paper_table("algorithm_facts").set_index("key")
    assert facts.loc["block_size_offline", "value"] == "7"
    assert facts.loc["rnn_update", "unit"] == ""
    frontier = paper_table("fig7_frontier")
    fits = frontier["kind"] == "fit"
    assert frontier.loc[fits, "ink_pixels"].isna().all() and not frontier.loc[~fits, "ink_pixels"].isna().any()
    assert frontier["throughput_per_gpu"].dtype == np.float64


@pytest.mark.parametrize("target", ["Qwen3-4B", "Qwen3-8B", "Qwen3-14B"])
def test_stated_gains_follow_from_table_1(target: str) -> None:
    table = paper_table("table1")
    means = table[table["target"] == target].groupby("drafter")["accepted_length"].mean()
    facts = paper_table("algorithm_facts").set_index("key")["value"]
    for key, drafter in (("eagle3", "Eagle3"), ("dflash", "DFlash")):
        stated_pct = float(facts[f"macro_gain_vs_{key}_{target}"])
        assert 100 * (means["DSpark"] / means[drafter] - 1) == pytest.approx(stated_pct, abs=0.06)


def test_figure_5_rates_follow_from_its_bars() -> None:
    sweep = paper_table("fig5_threshold_sweep")
    verified = sweep["accepted_tokens_per_step"] + sweep["rejected_tokens_per_step"]
    np.testing.assert_allclose(sweep["accepted_tokens_per_step"] / verified, sweep["acceptance_rate"], atol=3e-4)


def test_figure_6_histogram_is_a_distribution() -> None:
    sums = paper_table("fig6_histogram").groupby("position")["fraction"].sum()
    np.testing.assert_allclose(sums, 1.0, atol=2e-4)


def test_an_unknown_table_lists_the_known() -> None:
    with pytest.raises(ValueError, match="no paper table is called 'table2'; .*fig2_conditional_acceptance.*table1"):
        paper_table("table2")
