"""The cost of an anchor does not grow with the context before it, counted in multiplications."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dspec_lab.bench import chain_rows
from dspec_lab.training.anchors import Anchors
from dspec_lab.training.build import architecture, new_drafter
from dspec_lab.training.chain_losses import ttt_loss
from dspec_lab.training.data import build_sequences
from dspec_lab.training.losses import LossWeights, dspark_loss


def flops(model, length, num_anchors, context):
    """Operations of loss and gradient with `num_anchors` blocks that start after `context` tokens or later."""
    generator = torch.Generator().manual_seed(0)
    positions = context + torch.arange(num_anchors)[None]
    anchors = Anchors(positions_BA=positions, keep_BA=torch.ones_like(positions, dtype=torch.bool))
    inputs = (
        torch.randn(1, length, 96, generator=generator),
        torch.randint(0, 89, (1, length), generator=generator),
        torch.arange(length)[None] > 4,
        torch.randn(1, length, 32, generator=generator),
    )
    model.requires_grad_(True)
    with FlopCounterMode(display=False) as counter:
        dspark_loss(model, *inputs, anchors, LossWeights()).total.backward()
    model.zero_grad()
    return counter.get_total_flops()


@pytest.fixture
def make(tiny_target, tiny_config):
    def build(**changes):
        config = tiny_config("dspark", first_slots=None, **changes)
        return new_drafter(architecture(config, tiny_target, np.arange(89)), tiny_target, np.arange(89), seed=0)

    return build


def per_anchor(model, length, context):
    return (flops(model, length, 12, context) - flops(model, length, 4, context)) / 8


def test_an_anchor_costs_the_same_after_any_context(make):
    model = make(context_window=8)
    short, long = per_anchor(model, 60, 20), per_anchor(model, 240, 200)
    assert short == long > 0


def test_without_a_window_only_attention_to_the_context_grows(make):
    model = make(context_window=None)
    short, long = per_anchor(model, 60, 20), per_anchor(model, 240, 200)
    # scores and weighted sum, forward and twice backward: 2 layers, 4 heads of width 8, 4 slots, 180 more tokens
    assert long - short == 2 * (2 * 3) * 2 * 4 * 8 * 4 * 180


def test_the_context_is_paid_once_a_sequence(make):
    model = make(context_window=8)
    few = flops(model, 240, 4, 200) - flops(model, 60, 4, 20)
    many = flops(model, 240, 12, 200) - flops(model, 60, 12, 20)
    assert few == many > 0


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_later_steps_of_a_chain_cost_nothing_where_no_loss_counts(kind, tiny_target, tiny_config, tiny_responses):
    """Both ways of the benchmark give one loss; leaving rows out saves their share of the steps behind the first."""
    config = tiny_config(kind, first_slots=None)
    model = new_drafter(architecture(config, tiny_target, np.arange(89)), tiny_target, np.arange(89), seed=0)
    model.requires_grad_(True)
    members = list(build_sequences(tiny_responses, max_tokens=64, vocab_size=89).sequences[:3])
    batch, lengths = chain_rows._inputs(model, members)
    # a long prompt: only the last six positions are trained on
    batch[2][:] = torch.arange(batch[1].shape[1]) >= lengths[:, None] - 6
    batch[2][:] &= torch.arange(batch[1].shape[1]) < lengths[:, None]
    losses, counts, grads = [], [], []
    for way in (chain_rows.every_row(), contextlib.nullcontext()):
        with way, FlopCounterMode(display=False) as counter:
            total = ttt_loss(model, *batch, lengths).total
            total.backward()
        losses.append(float(total.detach()))
        counts.append(counter.get_total_flops())
        grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        model.zero_grad()
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, rtol=1e-3, atol=1e-4 * float(grad.abs().max()), msg=name)
    assert counts[1] < 0.75 * counts[0], counts


def test_the_benchmark_of_chain_rows_runs(tiny_target, tiny_config, tiny_responses):
    config = tiny_config("mtp")
    model = new_drafter(architecture(config, tiny_target, np.arange(89)), tiny_target, np.arange(89), seed=0)
    members = list(build_sequences(tiny_responses, max_tokens=64, vocab_size=89).sequences[:2])
    (row,) = chain_rows.bench_chain_rows(model, [members], repeats=1)
    assert row["tokens"] == sum(member.num_tokens for member in members)
    assert row["in_responses"] == sum(member.num_response for member in members)
    assert row["ratio"] == row["every_row"]["median"] / row["chosen_rows"]["median"] > 0
    with pytest.raises(ValueError, match="got 0 and 1"):
        chain_rows.bench_chain_rows(model, [members], repeats=0)
