"""Total variation loss: kernel against torch twin, values and gradients, and the twin against sums written out."""

from __future__ import annotations

import math

import pytest
import torch

from dspec_lab.core.sampling import NonFiniteLogitsError
from dspec_lab.kernels import dispatch
from dspec_lab.kernels.faults import Fault, encode


def logit_pair(seed: int, rows: int, vocab: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    target = 3 * torch.randn(rows, vocab, generator=generator)
    draft = target + torch.randn(rows, vocab, generator=generator)
    target[:, :3] = draft[:, 2:4] = float("-inf")  # masked in one, in both, in the other
    target[0, -1], draft[0, -2] = 10.0, 11.0  # the maxima come in the last block
    target[-1] = draft[-1]
    return draft.to(dtype), target.to(dtype)


def loss_and_grad(draft, target, weight, impl: str, block_v: int | None = None):
    draft = draft.clone().requires_grad_()
    target = target.clone().requires_grad_()
    if block_v:
        from dspec_kernels.tv_loss import tv_loss

        loss, fault = tv_loss(draft, target, block_v)
        assert fault.tolist() == [0] * len(fault)
    else:
        loss = dispatch.tv_loss(draft, target, impl=impl)
    (loss * weight).sum().backward()
    assert target.grad is None
    assert draft.grad.dtype == draft.dtype and loss.dtype == torch.float32
    return loss.detach().cpu(), draft.grad.cpu()


# fp32 sums over the vocabulary in another order; a 16-bit gradient is rounded once, by 2^-8 or 2^-11 of its size
@pytest.mark.parametrize(("dtype", "relative"), [(torch.float32, 1e-4), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)])
def test_kernel_equals_torch(kernel_device, dtype, relative):
    draft, target = logit_pair(0, 3, 300, dtype)
    weight = torch.tensor([0.3, 1.0, 2.0])
    on_device = [x.to(kernel_device) for x in (draft, target, weight)]
    got_loss, got_grad = loss_and_grad(*on_device, impl="triton", block_v=128)
    loss, grad = loss_and_grad(draft, target, weight, impl="torch")
    torch.testing.assert_close(got_loss, loss, rtol=0, atol=2e-6)
    torch.testing.assert_close(got_grad, grad, rtol=relative, atol=1e-7)
    assert loss[-1] == 0 and bool((grad[-1] == 0).all()) and float(loss[0]) > 0.1
    assert float(grad[0].abs().max()) > 1e-3


def test_largest_vocabulary(kernel_device):
    draft, target = logit_pair(1, 2, 262144 - 7, torch.float16)
    weight = torch.ones(2)
    on_device = [x.to(kernel_device) for x in (draft, target, weight)]
    got_loss, got_grad = loss_and_grad(*on_device, impl="triton", block_v=65536)
    loss, grad = loss_and_grad(draft, target, weight, impl="torch")
    torch.testing.assert_close(got_loss, loss, rtol=0, atol=1e-5)
    torch.testing.assert_close(got_grad, grad, rtol=1e-2, atol=1e-7)


# inf - inf inside the interpreter
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_faulty_rows_are_flagged_and_others_kept(kernel_device):
    draft, target = logit_pair(2, 5, 40, torch.float32)
    draft[0, 9], draft[1], target[2, 39], target[3] = float("nan"), float("-inf"), float("inf"), float("-inf")
    want = [encode(0, kind) for kind in (Fault.DRAFT_ROW, Fault.DRAFT_ROW, Fault.TARGET_ROW, Fault.TARGET_ROW)]
    from dspec_kernels.tv_loss import tv_loss as kernel

    from dspec_lab.kernels.tv_loss import tv_loss as twin

    for loss, fault in (twin(draft, target), kernel(draft.to(kernel_device), target.to(kernel_device))):
        assert fault.tolist() == [*want, 0]
        assert loss.isnan().tolist() == [True] * 4 + [False] and float(loss[4]) == 0
    with pytest.raises(NonFiniteLogitsError, match="row 0"):
        dispatch.tv_loss(draft, target)


def test_twin_follows_the_formula_and_its_gradient_the_slope():
    draft, target = (x.double() for x in logit_pair(3, 2, 12, torch.float32))
    loss, grad = dispatch.tv_loss(draft.requires_grad_(), target), None
    loss[0].backward()
    grad = draft.grad[0]
    q, p = ([math.exp(z) for z in row[0].tolist()] for row in (draft.detach(), target))
    value = 0.5 * sum(abs(a / sum(q) - b / sum(p)) for a, b in zip(q, p, strict=True))
    assert abs(float(loss[0].detach()) - value) < 1e-12
    for v in (0, 5, 11):
        step = torch.zeros_like(draft)
        step[0, v] = 1e-6
        up, down = (dispatch.tv_loss((draft + sign * step).detach(), target)[0] for sign in (1, -1))
        assert abs(float(up - down) / 2e-6 - float(grad[v])) < 1e-6
