"""Figures of notebooks 04 and 06 draw the numbers they are given."""

from __future__ import annotations

import pytest

from dspec_lab.evaluation.evaluate import EvalRow
from dspec_lab.evaluation.paper import paper_table
from dspec_lab.plots.drafters import accepted_by_drafter, cost_and_gain
from dspec_lab.plots.training import budget_course, training_course
from dspec_lab.training.budget import Stage
from dspec_lab.training.fit import StepReport


def row(drafter: str, domain: str, tau: float | None, **changes: object) -> EvalRow:
    values = dict(
        drafter=drafter, benchmark=domain, domain=domain, temperature=0.0, gamma=7, samples=2, rounds=10,
        num_committed=20, accepted_length=tau, accepted_length_low=None if tau is None else tau - 0.2,
        accepted_length_high=None if tau is None else tau + 0.3, accept_rate=0.5, verify_rate=0.5, tokens_per_s=40.0,
        plain_tokens_per_s=25.0, speedup=1.6, speedup_min=1.5, speedup_max=1.7, draft_ms=10.0, verify_ms=38.0,
        overhead_ms=2.0, dtype="fp32", outputs_equal_plain=True, max_flip_gap=None,
    )  # fmt: skip
    return EvalRow(**(values | changes))


ROWS = [row("dspark", "math", 2.5), row("mtp", "math", 1.5), row("dspark", "chat", 1.7), row("mtp", "chat", None)]


def test_bars_have_the_rows_heights_and_the_papers_means():
    table = paper_table("table1")
    figure = accepted_by_drafter(ROWS, paper=table)
    ours, paper = figure.axes
    assert sorted(bar.get_height() for bar in ours.patches) == [1.5, 1.7, 2.5]
    mine = table[(table["target"] == "Qwen3-4B") & (table["drafter"] == "DSpark")]
    means = mine.groupby("domain")["accepted_length"].mean()
    # only drafters that both have
    assert [bar.get_height() for bar in paper.patches] == pytest.approx([means["math"], means["chat"]])
    with pytest.raises(ValueError, match="'GPT'"):
        accepted_by_drafter(ROWS, paper=table, target="GPT")
    with pytest.raises(ValueError, match="no row"):
        accepted_by_drafter([row("mtp", "chat", None)])


def test_a_rounds_cost_is_in_plain_tokens():
    axes = cost_and_gain(ROWS).axes[0]
    # 50 ms a round at 25 plain tokens a second: 1.25 tokens
    points = {
        (float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in axes.lines if len(line.get_xdata()) == 1
    }
    assert points == {(1.25, 2.5), (1.25, 1.5), (1.25, 1.7)}


def test_the_course_has_a_line_per_position_and_held_out_markers():
    def report(step: int, *rates: float) -> StepReport:
        return StepReport(step, step / 2, 1.0, 1.0, 3.0 - step, 1.2, rates, 1e-3, 1.0, 1.0, 1.0)

    validations = {0: {"all": {"accept_rate": [0.1, None]}}, 2: {"all": {"accept_rate": [0.4, 0.3]}}, 3: {}}
    loss, rates = training_course([report(1, 0.2), report(2, 0.5, 0.3)], validations).axes
    assert loss.lines[0].get_ydata().tolist() == [2.0, 1.0]
    markers = [line for line in rates.lines if line.get_linestyle() == "None"]
    assert [tuple(line.get_ydata()) for line in markers] == [(0.1, 0.4), (0.3,)]
    with pytest.raises(ValueError, match="no step"):
        training_course([], {})


def test_the_budget_is_drawn_over_all_positions_and_on_the_same_held_out_prompts():
    def stage(first: int, data: str, *points: tuple[int, float | None]) -> Stage:
        history = [{"anchors": at, "measures": {"all": {}, "math": {"tau_greedy": tau}}} for at, tau in points]
        return Stage(first, history, {data: {"math": 3}})

    early = stage(0, "old", (0, 1.1), (500_000, 1.5))
    stages = {
        "dspark": [early, stage(500_000, "new", (0, 1.6), (250_000, 2.5))],
        "mtp": [early, stage(500_000, "new", (0, 1.4), (100_000, None), (500_000, 1.9))],
    }
    figure = budget_course(stages)
    (math,) = figure.axes
    drawn = {line.get_label(): [tuple(point) for point in line.get_xydata()] for line in math.lines}
    assert drawn == {"dspark": [(0.5, 1.6), (0.75, 2.5)], "mtp": [(0.5, 1.4), (1.0, 1.9)]}
    assert "mtp on math 1.90 after 1.00 million" in figure.alt
    left_out = budget_course({**stages, "mtp": [early]})
    assert [line.get_label() for line in left_out.axes[0].lines] == ["dspark"]
    assert "not drawn: mtp" in left_out._supxlabel.get_text()
    with pytest.raises(ValueError, match="needs a stage"):
        budget_course({"mtp": []})
