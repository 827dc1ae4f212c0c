"""The panels of notebooks 02, 03 and 07: what they compute, redraw and refuse; and the figures behind them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dspec_lab.calibration.calibration import fit_calibration
from dspec_lab.calibration.held_out import domain_scores
from dspec_lab.calibration.signals import signal_areas
from dspec_lab.calibration.split import split_by_prompt
from dspec_lab.calibration.synthetic import synthetic_rounds
from dspec_lab.evaluation.decay import autocorrelation, decay_rows
from dspec_lab.evaluation.paper import paper_table
from dspec_lab.evaluation.thresholds import RoundCost, threshold_sweep
from dspec_lab.plots.calibration import errors_figure, reliability_figure
from dspec_lab.plots.decay import autocorrelation_figure, decay_figure
from dspec_lab.plots.held_out import held_out_figure
from dspec_lab.plots.style import png_bytes
from dspec_lab.plots.thresholds import threshold_figure
from dspec_lab.widgets.acceptance_panels import DecayPanel, EntropyPanel
from dspec_lab.widgets.confidence_panels import ReliabilityPanel, ThresholdPanel

TEMPERATURES = (2.0, 2.0, 2.0)


@pytest.fixture(scope="module")
def rounds():
    made = synthetic_rounds(1500, TEMPERATURES, prompts=24, seed=0)
    bits = 6 * (1 - made.accept_prob_IG)
    return replace(made, target_entropy_IG=bits, draft_entropy_IG=bits / 2)


@pytest.fixture(scope="module")
def calibration(rounds):
    return fit_calibration(rounds, resamples=100)


def test_the_entropy_panel(rounds):
    panel = EntropyPanel({"T = 1": rounds}, bins=4)
    seen = [(panel.numbers.value, panel.picture.value)]
    for control, value in ((panel.domain, "math"), (panel.whose, "draft"), (panel.bins, 7)):
        control.value = value
        seen.append((panel.numbers.value, panel.picture.value))
        assert panel.error.value == "" and "Up to date" in panel.status.value
    assert len({picture for _, picture in seen}) == 4 and "rank correlation" in seen[0][0]
    result = panel.result(panel.state())
    assert len(result) == 7 and sum(r.cases for r in result) == int(rounds.of_domain("math").reached_IG.sum())
    assert "drafter's" not in panel.static().alt and "draft's entropy" in panel.static().alt
    with pytest.raises(ValueError, match="at least one trace"):
        EntropyPanel({})


def test_a_choice_that_a_trace_lacks_is_told(rounds):
    other = replace(rounds, domain_I=np.full(len(rounds), "law"))
    panel = EntropyPanel({"a": rounds, "b": other})
    with pytest.raises(ValueError, match="no round of the domain 'law'"):
        panel.domain.value = "law"
    assert 'role="alert"' in panel.error.value
    panel.trace.value = "b"
    assert panel.error.value == ""


def test_the_decay_panel(rounds):
    panel = DecayPanel({"T = 1": rounds}, paper=paper_table("fig2_conditional_acceptance"))
    before = panel.picture.value
    panel.gamma.value = 2
    result = panel.result(panel.state())
    assert [r.position for r in result] == [1, 2] and panel.picture.value != before
    assert f"accepted length {1 + sum(r.survival for r in result):.2f}" in panel.numbers.value
    panel.domain.value = "chat"
    assert "paper" in panel.static().alt


def test_the_reliability_panel_judges_on_held_out_rounds_only(rounds, calibration):
    _, judge = split_by_prompt(rounds)
    panel = ReliabilityPanel(judge, {"temperature": calibration}, paper=paper_table("fig6_reliability"))
    result = panel.result(panel.state())
    assert result.ece_after < result.ece_before and f"{100 * result.ece_before:.1f} % before" in panel.numbers.value
    before = panel.picture.value
    for control, value in ((panel.position, 3), (panel.bins, 10), (panel.binning, "mass"), (panel.domain, "code")):
        control.value = value
        assert panel.picture.value != before and panel.error.value == ""
        before = panel.picture.value
    with pytest.raises(ValueError, match="used to fit and would be judged on"):
        ReliabilityPanel(rounds, {"temperature": calibration})


def test_the_threshold_panel(rounds, calibration):
    _, judge = split_by_prompt(rounds)
    cost = RoundCost(draft_s=0.01, overhead_s=0.0, verify_s_J=np.array([0.03, 0.04, 0.05, 0.06]))
    panel = ThresholdPanel(
        {"calibrated": calibration.apply(judge), "raw": judge}, cost=cost, paper=paper_table("fig5_threshold_sweep")
    )
    assert "threshold 0.30" in panel.numbers.value and "tokens/s" in panel.numbers.value
    panel.threshold.value = 0.6
    (row,) = threshold_sweep(calibration.apply(judge), (0.6,), cost=cost)
    assert f"{row.verified:.2f} drafts sent a round" in panel.numbers.value
    before = panel.numbers.value
    panel.confidences.value = "raw"
    assert panel.numbers.value != before
    panel.domain.value = "math"
    assert "math" in panel.static().axes[0].figure._suptitle.get_text()


# figures


def test_figures_draw_what_they_are_given(rounds, calibration):
    _, judge = split_by_prompt(rounds)
    figure = errors_figure(calibration.before, calibration.after, paper=paper_table("fig6_summary"))
    assert f"{100 * calibration.before[0].ece:.1f} to {100 * calibration.after[0].ece:.1f} % at 1" in figure.alt
    figure = reliability_figure(judge, calibration.apply(judge), [1, 3])
    assert len(figure.axes) == 4 and png_bytes(figure).startswith(b"\x89PNG")
    rows = decay_rows(rounds)
    line = decay_figure({"x": rows}).axes[0].get_lines()
    assert any(list(curve.get_ydata()) == [row.geometric for row in rows] for curve in line)
    lags = {lag: autocorrelation(rounds, lag) for lag in (1, 2)}
    assert f"{lags[1].estimate:.2f} at lag 1" in autocorrelation_figure({"x": lags}).alt
    sweep = threshold_sweep(judge)
    assert len(threshold_figure(sweep).axes) == 2  # no cost, no speed


def test_the_held_out_figure_has_a_point_for_each_domain_method_and_signal(rounds):
    scores = [s for method in ("platt", "temperature") for s in domain_scores(rounds, method, resamples=100)]
    areas = signal_areas(rounds, resamples=100)
    figure = held_out_figure(scores, areas)
    left, right = figure.axes
    assert [len(axes.containers) for axes in (left, right)] == [3, 4]  # before and two methods; four signals
    drawn, after = left.containers[1].lines[0].get_ydata(), [s.mean_after for s in scores if s.method == "platt"]
    np.testing.assert_allclose(drawn.astype(float), [100 * mean.estimate for mean in after])
    assert [text.get_text() for text in left.get_xticklabels()] == ["all", *rounds.domains]
    with pytest.raises(ValueError, match="got 8 and 0"):
        held_out_figure(scores, areas, position=9)
    with pytest.raises(ValueError, match="9 scores for 4 domains and 2 methods"):
        held_out_figure([*scores, scores[0]], areas)


def test_figures_refuse_what_they_cannot_draw(rounds, calibration):
    for call, message in (
        (lambda: decay_figure({}), "without positions"),
        (lambda: decay_figure({"x": decay_rows(rounds)}, paper=paper_table("fig2_conditional_acceptance"),
                              domain="law"), "no domain 'law'"),
        (lambda: reliability_figure(rounds, rounds, [9]), r"positions must lie in 1..3, got \[9\]"),
        (lambda: errors_figure([], []), "no score of a position"),
        (lambda: threshold_figure([]), "no row"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call()
