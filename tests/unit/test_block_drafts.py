"""Block drafts along a text are those that decoding would make; agreement and repeats on hand-made blocks."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from dspec_lab.config import DecodeConfig
from dspec_lab.evaluation.block_drafts import block_drafts, conditional_agreement, repeats
from dspec_lab.plots import heads
from dspec_lab.verifier.decode import generate
from dspec_lab.verifier.tiny import NEURAL_DRAFTERS, tiny_decoder


def test_blocks_are_the_drafters_own_proposals():
    target = tiny_decoder(7)
    drafter = NEURAL_DRAFTERS["dspark"](target)
    run = generate(target, drafter, (0, 1), DecodeConfig(gamma=3, max_new_tokens=40, ignore_eos=True), trace=True)
    text = [0, 1, *run.token_ids]
    found = block_drafts(drafter.model, target, text, 2)
    at = {int(anchor): row for anchor, row in zip(found.anchors_A, found.sequential_AG, strict=True)}
    # each round drafts behind the newest token
    anchor, compared = 2, 0
    for record in run.rounds:
        if anchor in at and record.gamma == 3:
            assert tuple(at[anchor]) == record.draft_ids
            compared += 1
        anchor += record.num_committed
    assert compared > 5
    assert [text[a + 1 : a + 4] for a in found.anchors_A] == found.truth_AG.tolist()
    # the head matters here, and without it nothing else changes
    assert (found.parallel_AG != found.sequential_AG).any()
    drafter.model.markov_head, drafter.model.confidence_head = None, None
    headless = block_drafts(drafter.model, target, text, 2)
    assert (headless.sequential_AG == found.parallel_AG).all()


def test_a_text_without_a_whole_block_is_refused():
    target = tiny_decoder(7)
    drafter = NEURAL_DRAFTERS["dspark"](target)
    drafter.start(target, capacity=8)
    with pytest.raises(ValueError, match="5 tokens has no whole block of 3 behind anchor 2"):
        block_drafts(drafter.model, target, [0, 1, 2, 3, 4], 2)


def test_agreement_counts_only_blocks_that_agree_so_far():
    truth = np.array([[1, 2, 3], [1, 2, 3], [1, 2, 3], [4, 5, 6]])
    drafts = np.array([[1, 2, 9], [1, 0, 3], [1, 2, 3], [0, 5, 6]])
    shares, counts = conditional_agreement(drafts, truth)
    assert counts.tolist() == [4, 3, 2] and shares.tolist() == pytest.approx([3 / 4, 2 / 3, 1 / 2])
    shares, counts = conditional_agreement(truth + 1, truth)
    assert counts.tolist() == [4, 0, 0] and shares[0] == 0 and np.isnan(shares[1:]).all()


def test_repeats():
    assert repeats(np.array([[1, 1, 2], [3, 4, 4]])) == 0.5
    assert repeats(np.array([[1, 2, 1]])) == 0.0


def test_figures_of_heads():
    law = np.eye(2) / 2
    assert "0.5" in heads.pair_laws({"a": law, "b": law.T}, ["x", "y"]).alt
    with pytest.raises(ValueError, match="square"):
        heads.pair_laws({"a": law}, ["x", "y", "z"])
    curve = (np.array([0.5, np.nan]), np.array([4, 0]))
    paper = pd.DataFrame(
        {"domain": ["math"] * 2, "drafter": ["DSpark"] * 2, "position": [1, 2], "conditional_acceptance": [0.9, 0.8]}
    )
    figure = heads.agreement_by_position({"DSpark": curve}, paper=paper)
    assert len(figure.axes) == 2 and figure.axes[1].lines[0].get_ydata().tolist() == [0.9, 0.8]
    with pytest.raises(ValueError, match="'poems'"):
        heads.agreement_by_position({"DSpark": curve}, paper=paper, domain="poems")
