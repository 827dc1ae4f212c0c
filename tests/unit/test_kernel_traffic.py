"""Bytes of the kernels: those that the benchmark divides by time, and those that torch operations really move."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dspec_lab.bench import kernel_traffic as kt
from dspec_lab.plots import kernels as plots
from dspec_lab.plots.style import png_bytes

ALL = [
    kt.accept_residual_traffic(2, 3, 1000),
    kt.markov_step_traffic(4, 1000, 16),
    kt.ragged_attention_traffic(2, 4, 100, 4, 2, 16),
    kt.tv_loss_traffic(8, 1000),
    kt.compact_kv_traffic(2, 5, 3, 2, 16),
]


class Counter(TorchDispatchMode):
    """Adds up the bytes that operations read and write; views move nothing."""

    moved = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = [x for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
        made = [x for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]
        held = {x.untyped_storage().data_ptr() for x in given}
        if func._schema.is_mutable or any(x.untyped_storage().data_ptr() not in held for x in made):
            # a gather reads what it gives, not all it could
            read = made if "index" in func.name() or "gather" in func.name() else given
            self.moved += sum(x.nbytes for x in read) + sum(x.nbytes for x in made)
        return out


def counted(call) -> int:
    with Counter() as counter:
        call()
    return counter.moved


def test_torch_moves_what_the_count_says_for_accept_and_residual() -> None:
    batch, gamma, vocab = 3, 4, 5000
    p_BJV = torch.softmax(torch.randn(batch, gamma + 1, vocab), -1)
    q_BGV = torch.softmax(torch.randn(batch, gamma, vocab), -1)
    at, rows = torch.arange(batch), torch.tensor([0, 2, 3])

    def run() -> None:
        p_BJV.sum(-1), q_BGV.sum(-1)
        p_BV, q_BV = p_BJV[at, rows], q_BGV[at, rows]
        left_BV = (p_BV - q_BV).clamp_min(0)
        mass_B1 = left_BV.sum(-1, keepdim=True)
        torch.where(mass_B1 > 0, left_BV, p_BV).double().cumsum(-1)

    assert counted(run) == pytest.approx(kt.accept_residual_traffic(batch, gamma, vocab).torch_bytes, rel=0.01)


def test_torch_moves_what_the_count_says_for_the_markov_step() -> None:
    batch, vocab, rank = 4, 3000, 16
    base_BV, w2_RV = torch.randn(batch, vocab).bfloat16(), torch.randn(rank, vocab).bfloat16()
    latent_BR, heat_B1 = torch.randn(batch, rank).bfloat16(), torch.ones(batch, 1)

    def run() -> None:
        logits_BV = (latent_BR @ w2_RV).float() + base_BV.float()
        torch.softmax(logits_BV / heat_B1, -1).double().cumsum(-1)

    assert counted(run) == pytest.approx(kt.markov_step_traffic(batch, vocab, rank).torch_bytes, rel=0.01)


def test_numbers_worked_by_hand() -> None:
    accept = kt.accept_residual_traffic(1, 2, 10)
    assert accept.fused_bytes == 5 * 10 * 4
    assert accept.torch_bytes == 4 * 10 * (3 + 2 + 4 + 3 + 2 + 1 + 3 + 1) + 10 * 8 * 3
    attention = kt.ragged_attention_traffic(1, 2, 6, 4, 2, 8)
    assert attention.fused_bytes == 2 * 8 * 2 * 8 * 2 + 2 * 2 * 4 * 8 * 2
    assert attention.flops == 4 * 2 * 8 * 4 * 8
    assert attention.least_s(1.0, 1e18) == attention.fused_bytes
    assert attention.least_s(1e18, 2.0) == attention.flops / 2
    # the factor is read again for the 17th request
    one, two = kt.markov_step_traffic(16, 100, 8), kt.markov_step_traffic(17, 100, 8)
    assert two.fused_bytes - one.fused_bytes == 100 * 8 * 2 + 100 * (2 + 4)


def test_figures_say_what_they_show() -> None:
    bars = plots.traffic_bars(ALL)
    assert all(one.op in bars.alt for one in ALL)
    widths = sorted(patch.get_width() for patch in bars.axes[0].patches)
    assert widths == pytest.approx(sorted(b / 1e6 for one in ALL for b in (one.fused_bytes, one.torch_bytes)))
    roof = plots.roofline(ALL, bytes_per_s=1e12, flops_per_s=1e14, name="card")
    assert "bend at 100" in roof.alt and "tv_loss" not in roof.alt
    seen = plots.visible_picture(torch.tensor([[True, False], [True, True]]), ["a", "b"])
    assert "a 1, b 2" in seen.alt
    for figure in (bars, roof, seen):
        assert png_bytes(figure).startswith(b"\x89PNG")
    for call in (lambda: plots.traffic_bars([]), lambda: plots.visible_picture(torch.ones(2, 2).bool(), ["a"])):
        with pytest.raises(ValueError, match="no op|1 names for 2 rows"):
            call()
