"""States that a caller can bring about are told with their values, not by an assertion."""

from __future__ import annotations

import pytest
import torch

from dspec_lab.drafters.chain_model import ChainDraftModel
from dspec_lab.models.protocol import Features, TargetRows
from dspec_lab.training.teacher import Teacher


def test_rows_without_the_taps_that_are_asked_for():
    for features in (None, Features()):
        rows = TargetRows(torch.zeros(1, 4), features)
        with pytest.raises(ValueError, match=r"no tapped layers: open the session with Taps\(layers="):
            rows.tapped_NF()
        with pytest.raises(ValueError, match=r"no last hidden states: .* Taps\(last_hidden=True\)"):
            rows.last_ND()
    tapped_NF, last_ND = torch.ones(2, 3), torch.ones(2, 5)
    rows = TargetRows(torch.zeros(1, 4), Features(tapped_NF, last_ND))
    assert rows.tapped_NF() is tapped_NF and rows.last_ND() is last_ND


def test_a_chain_drafter_without_its_own_part_cannot_be_made():
    class HalfDone(ChainDraftModel):
        def leave(self, x):
            return x

    with pytest.raises(TypeError, match="before_head"):
        HalfDone(None, own_embedding=True, own_head=True)


def test_a_position_that_was_not_prepared_is_named():
    # the lookup alone, without a model
    teacher = object.__new__(Teacher)
    teacher._table = (torch.tensor([0, 1, -1, -1]), None)
    with pytest.raises(ValueError, match="position 3 is not among those that were prepared"):
        teacher.law(torch.tensor([1, 3]))
