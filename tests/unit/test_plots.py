"""The figures draw the numbers they are given, say what they show, and leave no trace in matplotlib's global state."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb, to_rgba
from matplotlib.patches import Rectangle

from dspec_lab.core.acceptance import acceptance_stats
from dspec_lab.core.types import RoundRecord
from dspec_lab.evaluation.paper import paper_table
from dspec_lab.plots import accepted_length, laws, outcomes, position, speed, style
from dspec_lab.verifier.rule_gain import RuleGain


def record(gamma: int, num_accepted: int, index: int = 0) -> RoundRecord:
    return RoundRecord(
        round=index, context_tokens=9, gamma=gamma, draft_ids=tuple(range(gamma)), num_accepted=num_accepted,
        num_committed=num_accepted + 1, next_token=3, draft_s=0.01, verify_s=0.03, overhead_s=0.001,
    )  # fmt: skip


ROUNDS = [record(3, 2), record(3, 0), record(3, 3), record(0, 0), record(2, 1)]
P_V = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
Q_V = torch.tensor([0.25, 0.25, 0.3, 0.2], dtype=torch.float64)
PIECES, SOURCES = ["Hi", " <b>", "\n", "$x$", " \U0001f600"], ["prefill", "draft", "replacement", "draft", "bonus"]


def every_figure() -> list[style.LabFigure]:
    stats = {"ours": acceptance_stats(ROUNDS)}
    return [
        outcomes.outcomes_figure(PIECES, SOURCES),
        accepted_length.accepted_per_round(ROUNDS),
        accepted_length.accepted_histogram({"a": ROUNDS, "b": ROUNDS[:2]}),
        position.acceptance_by_position(stats, paper=paper_table("fig2_conditional_acceptance")),
        laws.residual_picture(P_V, Q_V, list("ABCD")),
        laws.law_gaps({"right": 0.0, "wrong": 0.1}, tolerance=1e-12),
        laws.gain_curves({1: RuleGain(token=1.6, block=1.6, bound=1.6), 3: RuleGain(token=2.0, block=2.2, bound=2.4)}),
        speed.speed_bars({"plain": [10.0, 12.0], "x": [20.0, 30.0]}, threads=2, verdicts={"x": "equal"}),
    ]


# the look


def test_each_figure_is_labelled_has_a_text_alternative_and_draws_the_same_twice():
    for first, second in zip(every_figure(), every_figure(), strict=True):
        assert first.alt.strip()
        png = style.png_bytes(first)
        assert png.startswith(b"\x89PNG") and png == style.png_bytes(second)
        assert first._repr_png_() == (png, {"alt": first.alt})
        for axes in first.axes:
            assert axes.get_xlabel() or not axes.axison
    with pytest.raises(ValueError, match="text alternative"):
        style.new_figure(alt=" ")


def test_pyplot_stays_out_and_global_settings_stay_as_they_were():
    before = dict(matplotlib.rcParams)
    every_figure()
    assert dict(matplotlib.rcParams) == before
    code = (
        "import sys, torch\n"
        "from dspec_lab.plots import accepted_length, laws, outcomes, position, speed, style\n"
        "style.png_bytes(laws.law_gaps({'a': 0.5}, tolerance=1e-12))\n"
        "print('matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "False", done.stdout + done.stderr


def luminance(colour: str) -> float:
    channels = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return float(np.dot([0.2126, 0.7152, 0.0722], channels))


def test_ink_on_every_source_colour_can_be_read():
    for label, fill, _edge in style.SOURCES.values():
        contrast = (luminance(fill) + 0.05) / (luminance(style.INK) + 0.05)
        assert contrast >= 7, f"{label}: contrast {contrast:.1f}"


# token sources


class ByteTokenizer:
    """A token is a byte."""

    def decode(self, token_ids, **options):
        return bytes(token_ids).decode("utf-8", errors="replace")


def test_pieces_add_up_to_the_text_also_where_a_character_is_several_tokens():
    text = "ab \u00e9\U0001f600\n"
    pieces = outcomes.token_pieces(ByteTokenizer(), list(text.encode()))
    assert "".join(pieces) == text and len(pieces) == len(text.encode())
    assert pieces[3:5] == ["", "\u00e9"] and pieces[5:9] == ["", "", "", "\U0001f600"]
    # bytes that never become a character stay visible
    assert "".join(outcomes.token_pieces(ByteTokenizer(), [0x61, 0xF0, 0x9F])).startswith("a\ufffd")


def test_html_escapes_the_model_and_shows_blanks():
    fragment = outcomes.tokens_html(["<script>", " a\n", '"&'], ["draft", "replacement", "bonus"])
    assert "<script>" not in fragment and "&lt;script&gt;" in fragment
    assert f"{outcomes.SPACE}a{outcomes.NEWLINE}</span><br>" in fragment and "&quot;&amp;" in fragment
    assert 'title="token 2: replacement (first rejection)"' in fragment
    assert fragment.count("title=") == 3
    # the legend counts each source that occurs, and names no other
    assert "draft, accepted: 1" in fragment and "first token" not in fragment
    looks = set(re.findall(r'<span style="([^"]*)" title', fragment))
    assert len(looks) == 3


@pytest.mark.parametrize(
    ("pieces", "sources", "message"),
    [(["a"], [], "1 pieces of text but 0 sources"), (["a"], ["guess"], "no token source is called 'guess'")],
)
def test_outcomes_refuse_what_does_not_fit(pieces, sources, message):
    for draw in map(inspect.unwrap, (outcomes.tokens_html, outcomes.outcomes_figure)):
        with pytest.raises(ValueError, match=message):
            draw(pieces, sources)


def test_static_outcomes_have_a_box_per_piece_and_every_letter():
    figure = outcomes.outcomes_figure(PIECES, SOURCES, title="t")
    axes = figure.axes[0]
    boxes = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    assert [box.get_facecolor() for box in boxes] == [to_rgba(style.SOURCES[s][1]) for s in SOURCES]
    assert [int(box.get_width()) for box in boxes] == [len(piece) for piece in PIECES]
    letters = "".join(text.get_text() for text in axes.texts)
    assert letters == f"Hi{outcomes.SPACE}<b>{outcomes.NEWLINE}$x${outcomes.SPACE}{outcomes.MISSING}"
    # the newline ends its line
    assert boxes[3].get_y() > boxes[2].get_y() and boxes[3].get_x() == 0


def test_long_text_wraps_inside_the_figure():
    lines = outcomes.outcome_lines(["word "] * 100 + ["x" * 250], wrap=96)
    assert all(0 <= column and column + len(text) <= 96 for line in lines for column, text, _ in line)
    assert sum(len(text) for line in lines for _, text, _ in line) == 750
    # words are not cut, what is longer than a line is
    assert [text for line in lines for _, text, index in line if index < 100] == ["word·"] * 100


# accepted length


def test_bars_are_the_rounds():
    axes = accepted_length.accepted_per_round(ROUNDS).axes[0]
    kept, extra = axes.containers[0], axes.containers[1]
    assert [bar.get_height() for bar in kept] == [2, 0, 3, 0, 1]
    assert [bar.get_height() for bar in extra] == [1] * 5
    assert [bar.get_y() for bar in extra] == [2, 0, 3, 0, 1]
    drafted, mean = axes.lines
    assert list(drafted.get_ydata()) == [3, 3, 3, 0, 2]
    assert mean.get_ydata()[0] == pytest.approx(11 / 5)


def test_an_accepted_end_token_is_no_extra_token():
    ended = record(3, 2)
    ended.num_committed = 2
    axes = accepted_length.accepted_per_round([ended]).axes[0]
    assert [container[0].get_height() for container in axes.containers[:2]] == [2, 0]


def test_histogram_shares_add_up_to_one():
    axes = accepted_length.accepted_histogram({"a": ROUNDS, "b": ROUNDS[:2]}).axes[0]
    first, second = ([bar.get_height() for bar in container] for container in axes.containers)
    assert first == pytest.approx([0.4, 0.2, 0.2, 0.2]) and second == pytest.approx([0.5, 0, 0.5, 0])
    assert "a: mean 2.20, 5 rounds" in [text.get_text() for text in axes.get_legend().get_texts()]
    for empty in ({}, {"a": []}):
        with pytest.raises(ValueError, match="no drafter|no rounds"):
            accepted_length.accepted_histogram(empty)


# position


def test_position_curves_are_the_counts_and_the_papers_rows():
    stats = acceptance_stats(ROUNDS * 5)
    table = paper_table("fig2_conditional_acceptance")
    left, right = position.acceptance_by_position({"ours": stats}, paper=table, domain="code").axes
    assert list(left.lines[0].get_ydata()) == pytest.approx(stats.survival_by_position)
    assert list(right.lines[0].get_ydata()) == pytest.approx(stats.accept_by_position)
    by_paper = {line.get_label(): list(line.get_ydata()) for line in right.lines if "paper" in str(line.get_label())}
    rows = table[(table["domain"] == "code") & (table["drafter"] == "DSpark")]
    assert by_paper["paper, Qwen3-4B,\ncode: DSpark"] == list(rows["conditional_acceptance"])
    assert len(by_paper) == 3 and not any("paper" in str(line.get_label()) for line in left.lines)
    with pytest.raises(ValueError, match="no domain 'poems'"):
        position.acceptance_by_position({"ours": stats}, paper=table, domain="poems")
    with pytest.raises(ValueError, match="no drafted position"):
        position.acceptance_by_position({"ours": acceptance_stats([record(0, 0)])})


def test_shares_of_few_rounds_are_hollow():
    few, many = acceptance_stats(ROUNDS), acceptance_stats(ROUNDS * 20)
    fills = [
        [point.get_fillstyle() for point in position.acceptance_by_position({"x": s}).axes[0].lines[1:]]
        for s in (few, many)
    ]
    assert fills == [["none"] * 3, ["full"] * 3]


# laws


def test_residual_picture_rebuilds_the_target_law():
    panels = laws.residual_picture(P_V, Q_V, list("ABCD")).axes
    heights = [[bar.get_height() for bar in container] for axes in panels for container in axes.containers]
    p, q, kept, residual, kept_again, refilled = heights
    assert p == pytest.approx(P_V.tolist()) and q == pytest.approx(Q_V.tolist())
    assert kept == kept_again == pytest.approx([0.25, 0.25, 0.15, 0.05])
    assert sum(residual) == pytest.approx(1) and residual[2:] == [0, 0]
    assert [a + b for a, b in zip(kept, refilled, strict=True)] == pytest.approx(p, abs=1e-15)
    with pytest.raises(ValueError, match="3 tokens for laws of 4"):
        laws.residual_picture(P_V, Q_V, list("ABC"))


def test_law_gaps_tell_exact_from_wrong():
    axes = laws.law_gaps({"right": 3e-17, "wrong": 0.02}, tolerance=1e-12).axes[0]
    assert [bar.get_facecolor() for bar in axes.patches] == [to_rgba(style.GREEN), to_rgba(style.VERMILION)]
    assert [text.get_text() for text in axes.texts] == ["3.0e-17  exact", "2.0e-02  wrong law"]
    for bad in ({}, {"x": 1.5}, {"x": -0.1}, {"x": float("nan")}):
        with pytest.raises(ValueError, match="total variation"):
            laws.law_gaps(bad, tolerance=1e-12)


# speed


def test_speed_is_a_median_beside_a_verdict():
    rates = {"plain": [10.0, 12.0, 11.0], "x": [22.0, 40.0, 20.0]}
    axes = speed.speed_bars(rates, threads=1, verdicts={"x": "equal"}).axes[0]
    assert [container[0].get_width() for container in axes.containers] == [11, 22]
    assert [text.get_text() for text in axes.texts] == ["11.0  (baseline)", "22.0  (2.00x; equal)"]
    assert list(axes.lines[1].get_xdata()) == rates["x"]
    for change, verdicts, message in (
        ({}, {}, "no verdict on the output of x"),
        ({"x": []}, {"x": "equal"}, "positive numbers"),
        ({"x": [0.0]}, {"x": "equal"}, "positive numbers"),
        ({"x": [float("nan")]}, {"x": "equal"}, "positive numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            speed.speed_bars(rates | change, threads=1, verdicts=verdicts)
    with pytest.raises(ValueError, match="'plain' are missing"):
        speed.speed_bars({"x": [1.0]}, threads=1, verdicts={"x": "equal"})


def test_gain_curves_draw_the_three_rules():
    gains = {2: RuleGain(token=1.5, block=1.75, bound=2.0), 1: RuleGain(token=1.25, block=1.25, bound=1.25)}
    (axes,) = laws.gain_curves(gains).axes
    drawn = {line.get_label(): line.get_ydata().tolist() for line in axes.lines}
    wanted = {"token-wise": [1.25, 1.5], "block verification": [1.25, 1.75], "no rule keeps more": [1.25, 2.0]}
    assert drawn == {name: pytest.approx(values) for name, values in wanted.items()}
    with pytest.raises(ValueError, match="no draft length"):
        laws.gain_curves({})
