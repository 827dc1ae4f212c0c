"""Anchors and labels of training blocks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspec_lab.training.anchors import Anchors, anchor_candidates, block_labels, sample_anchors

MASKS = st.lists(st.lists(st.booleans(), min_size=9, max_size=9), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(masks=MASKS, count=st.integers(1, 12), seed=st.integers(0, 99))
def test_sampled_anchors_are_sorted_distinct_candidates_then_fillers(masks, count, seed):
    mask = torch.tensor(masks)
    anchors = sample_anchors(mask, count, torch.Generator().manual_seed(seed))
    candidates = anchor_candidates(mask)
    assert anchors.positions_BA.shape == anchors.keep_BA.shape == (len(masks), count)
    for row, available in enumerate(candidates):
        kept = anchors.positions_BA[row][anchors.keep_BA[row]].tolist()
        assert len(kept) == min(count, int(available.sum()))
        assert kept == sorted(set(kept)) and all(bool(available[at]) for at in kept)
        assert anchors.keep_BA[row].tolist() == sorted(anchors.keep_BA[row].tolist(), reverse=True)
        assert not anchors.positions_BA[row][~anchors.keep_BA[row]].any()


@settings(max_examples=40, deadline=None)
@given(masks=MASKS, count=st.integers(1, 12))
def test_trimmed_anchors_lack_only_fillers(masks, count):
    anchors = sample_anchors(torch.tensor(masks), count, torch.Generator().manual_seed(1))
    trimmed = anchors.trimmed()
    width = trimmed.keep_BA.shape[1]
    assert width == trimmed.positions_BA.shape[1] == max(1, int(anchors.keep_BA.sum(1).max()))
    assert trimmed.keep_BA.sum() == anchors.keep_BA.sum()
    assert torch.equal(trimmed.positions_BA, anchors.positions_BA[:, :width])


def test_anchors_are_drawn_uniformly():
    mask = torch.tensor([[1, 1, 1, 0, 1, 1, 1, 1, 0]])
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(8)
    for _ in range(3000):
        anchors = sample_anchors(mask, 2, generator)
        counts[anchors.positions_BA[0]] += 1
    candidates = anchor_candidates(mask)[0]
    assert candidates.tolist() == [True, True, False, False, True, True, True, False]
    assert not counts[~candidates].any()
    # 6000 draws over 5 places: a standard deviation is about 27
    assert (counts[candidates] - 1200).abs().max() < 140


def test_no_candidate_gives_fillers_only():
    anchors = sample_anchors(torch.tensor([[1, 0, 1, 0, 1]]), 3)
    assert not anchors.keep_BA.any()
    with pytest.raises(ValueError, match="num_anchors must be at least 1, got 0"):
        sample_anchors(torch.ones(1, 5, dtype=torch.bool), 0)


def test_labels_follow_the_anchor_and_stop_at_the_first_unsupervised_slot():
    ids = torch.tensor([[10, 11, 12, 13, 14, 15]])
    mask = torch.tensor([[0, 1, 1, 0, 1, 1]])
    labels = block_labels(ids, mask, Anchors(torch.tensor([[1, 4, 0]]), torch.tensor([[True, True, False]])), 3)
    assert labels.label_ids_BAG.tolist() == [[[12, 13, 14], [15, 15, 15], [10, 10, 10]]]
    assert labels.previous_ids_BAG[0, :2].tolist() == [[11, 12, 13], [14, 15, 15]]
    # the slot behind the gap is not supervised although its own label is trainable
    assert labels.supervised_BAG.tolist() == [[[True, False, False], [True, False, False], [False] * 3]]
    assert labels.teacher_index_BAG[0, :2].tolist() == [[1, 2, 3], [4, 4, 4]]
