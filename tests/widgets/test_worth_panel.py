"""The panel of notebook 10, and the figures behind it."""

from __future__ import annotations

import numpy as np
import pytest

from dspec_lab.evaluation.worth import Worth
from dspec_lab.plots.style import png_bytes
from dspec_lab.plots.worth import break_even_figure, worth_figure
from dspec_lab.scheduler.break_even import break_even_map
from dspec_lab.scheduler.cost_table import CostTable
from dspec_lab.widgets.worth_panel import WorthPanel, WorthState

TABLE = CostTable(rows=(1, 2, 5, 80), seconds=(0.010, 0.011, 0.014, 0.164))


def test_the_panel_redraws_for_every_control_and_tells_when_not_to_speculate():
    panel = WorthPanel(TABLE, loads=(1, 4, 16), points={"dspark": (0.5, 0.004, "yes")})
    seen = [(panel.numbers.value, panel.picture.value)]
    for control, value in (
        (panel.accept, 0.8), (panel.most_drafts, 2), (panel.draft_ms, 9.0), (panel.requests, 16),
    ):  # fmt: skip
        control.value = value
        seen.append((panel.numbers.value, panel.picture.value))
        assert panel.error.value == "" and "Up to date" in panel.status.value
    assert len({picture for _, picture in seen}) == len(seen)
    assert ": draft 4," in seen[1][0] and ": draft 2," in seen[2][0]
    assert "do not speculate" in seen[-1][0]
    assert panel.static().alt.startswith("Speed-up by acceptance and cost of drafting at 16 requests")


def test_the_advice_is_the_best_block_of_the_table():
    panel = WorthPanel(TABLE, loads=(1,))
    result = panel.compute(WorthState(requests=1, accept=0.7, draft_ms=2.0, most_drafts=4))
    speeds = [0.010 * sum(0.7**k for k in range(n + 1)) / (TABLE.verify_s_N[1 + n] + 0.002) for n in (1, 2, 3, 4)]
    assert result.drafts == int(np.argmax(speeds)) + 1 and result.speedup == pytest.approx(max(speeds))
    with pytest.raises(ValueError, match="no draft fits 100 requests"):
        WorthPanel(TABLE, loads=(100,))


def test_the_figures_tell_verdicts_apart_and_say_them_in_words():
    common = dict(
        drafter="dspark", temperature=0.0, prompts=4, domain="math", accepted_length=2.0, break_even_length=2.0
    )  # fmt: skip
    found = [
        Worth(prompts_of="gsm8k", speedup=1.4, low=1.2, high=1.6, answer="yes", **common),
        Worth(prompts_of="chat", speedup=0.7, low=None, high=None, answer="unsettled", **common),
    ]
    figure = worth_figure(found)
    assert "dspark on gsm8k: 1.40, yes" in figure.alt and png_bytes(figure) != png_bytes(worth_figure(found[:1]))
    maps = [break_even_map(TABLE, requests=n) for n in (1, 4)]
    plain, marked = break_even_figure(maps), break_even_figure(maps, points={"mine": (0.5, 0.004, "no")})
    assert png_bytes(plain) != png_bytes(marked) and "break-even at 0." in plain.alt
    for empty in (break_even_figure, worth_figure):
        with pytest.raises(ValueError, match="to draw"):
            empty([])
