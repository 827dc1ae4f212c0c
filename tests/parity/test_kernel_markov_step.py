"""The sequential-head step: the kernel against the torch twin, and the twin against float64 sums written out."""

from __future__ import annotations

import math

import pytest
import torch

from dspec_lab.core.sampling import NonFiniteLogitsError
from dspec_lab.kernels import dispatch
from dspec_lab.kernels.faults import Fault, encode
from dspec_lab.kernels.markov_step import low_rank_step, markov_step


def step_inputs(seed: int, batch: int, vocab: int, rank: int, dtype: torch.dtype, device: str = "cpu") -> list:
    generator = torch.Generator().manual_seed(seed)
    base = 2 * torch.randn(batch, vocab, generator=generator)
    base[:, vocab // 3] = float("-inf")  # a token the sampler has filtered out
    w1, w2 = (torch.randn(vocab, rank, generator=generator) / math.sqrt(rank) for _ in range(2))
    previous = torch.randint(vocab, (batch,), generator=generator)
    previous[-1] = vocab - 1
    temperature = torch.tensor([(1.0, 0.0, 0.6, 1.7)[b % 4] for b in range(batch)])
    uniform = torch.rand(batch, dtype=torch.float64, generator=generator)
    inputs = [base.to(dtype), previous, w1.to(dtype), w2.to(dtype), temperature, uniform]
    return [value.to(device) for value in inputs]


def assert_same(got, expected) -> None:
    assert got.token_ids_B.tolist() == expected.token_ids_B.tolist()
    assert got.fault_B.tolist() == expected.fault_B.tolist()
    # fp32 sums over the rank (at most 200 terms of size 1) in another order
    close = dict(rtol=0, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(got.draft_logits_BV.cpu(), expected.draft_logits_BV, **close)
    torch.testing.assert_close(got.logsumexp_B.cpu(), expected.logsumexp_B, **close)


# 5 rows, 300 tokens and rank 70 are off every block (16, 128, 64)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_kernel_equals_torch(kernel_device, dtype):
    inputs = step_inputs(0, 5, 300, 70, dtype)
    got = dispatch.markov_step(*(x.to(kernel_device) for x in inputs), impl="triton")
    expected = markov_step(*inputs)
    assert_same(got, expected)
    assert expected.draft_logits_BV.dtype == torch.float32
    assert not torch.allclose(expected.draft_logits_BV, inputs[0].float(), atol=0.1)


def test_kernel_equals_torch_from_a_latent_vector(kernel_device):
    base, _, _, w2, temperature, uniform = step_inputs(1, 2, 200, 24, torch.float32)
    latent = torch.tanh(torch.randn(2, 24, generator=torch.Generator().manual_seed(2)))
    inputs = (base, latent, w2, temperature, uniform)
    got = dispatch.low_rank_step(*(x.to(kernel_device) for x in inputs), impl="triton")
    assert_same(got, low_rank_step(*inputs))


def test_more_rows_than_one_tile(kernel_device):
    inputs = step_inputs(3, 18, 40, 16, torch.float32)
    assert_same(dispatch.markov_step(*(x.to(kernel_device) for x in inputs), impl="triton"), markov_step(*inputs))


def test_largest_vocabulary(kernel_device):
    from dspec_kernels.markov_step import markov_step as kernel

    inputs = step_inputs(4, 2, 262144 - 5, 16, torch.float16)
    token_ids, logits, lse, fault = kernel(*(x.to(kernel_device) for x in inputs), block_v=32768)
    expected = markov_step(*inputs)
    assert token_ids.tolist() == expected.token_ids_B.tolist() and fault.tolist() == [0, 0]
    torch.testing.assert_close(logits.cpu(), expected.draft_logits_BV, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.cpu(), expected.logsumexp_B, rtol=0, atol=1e-5)


# inf - inf inside the interpreter
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_faulty_rows_give_no_token(kernel_device):
    inputs = step_inputs(5, 8, 50, 16, torch.float32)
    base, previous, _, _, temperature, uniform = inputs
    base[0, 7] = float("nan")
    base[1, 49] = float("inf")
    base[2] = float("-inf")
    previous[3], previous[4] = -1, 50
    temperature[5] = 1e-7
    uniform[6] = 1.0
    want = [Fault.DRAFT_ROW] * 3 + [Fault.TOKEN_ID] * 2 + [Fault.TEMPERATURE, Fault.UNIFORM]
    want = [encode(0, kind) for kind in want] + [0]
    for result in (
        dispatch.markov_step(*inputs, impl="torch", check=False),
        dispatch.markov_step(*(x.to(kernel_device) for x in inputs), impl="triton", check=False),
    ):
        assert result.fault_B.tolist() == want
        assert result.token_ids_B.tolist()[:7] == [-1] * 7 and result.token_ids_B[7] >= 0
        assert result.logsumexp_B.isnan().tolist() == [True] * 7 + [False]
    with pytest.raises(NonFiniteLogitsError, match="request 0"):
        dispatch.markov_step(*inputs)


def test_twin_follows_the_formula_in_float64():
    base, previous, w1, w2, temperature, uniform = step_inputs(6, 4, 30, 5, torch.float32)
    result = markov_step(base, previous, w1, w2, temperature, uniform)
    for b in range(4):
        logits = [
            float(base[b, v]) + sum(float(w1[previous[b], r]) * float(w2[v, r]) for r in range(5)) for v in range(30)
        ]
        torch.testing.assert_close(result.draft_logits_BV[b].double(), torch.tensor(logits).double(), rtol=0, atol=1e-5)
        heat = float(temperature[b]) or 1.0
        weights = [math.exp(z / heat) for z in logits]
        assert abs(float(result.logsumexp_B[b]) - math.log(sum(weights))) < 1e-5
        if temperature[b] == 0:
            assert int(result.token_ids_B[b]) == logits.index(max(logits))
            continue
        running, token = 0.0, -1
        for v, weight in enumerate(weights):
            running += weight
            if running > float(uniform[b]) * sum(weights):
                token = v
                break
        assert int(result.token_ids_B[b]) == token


def test_the_q_that_is_sampled_is_the_q_that_is_returned(kernel_device):
    """Counted on a grid of uniforms, the drawn tokens have the law of the returned logits; ties go to the first id."""
    cells = 24
    base, _, w1, w2, _, _ = step_inputs(7, 1, 6, 16, torch.float32)
    uniform = (torch.arange(cells, dtype=torch.float64) + 0.5) / cells
    base = 0.3 * base  # flat enough that several tokens are drawn
    inputs = (base.expand(cells, 6).contiguous(), torch.full((cells,), 3), w1, w2, torch.full((cells,), 0.8), uniform)
    result = dispatch.markov_step(*(x.to(kernel_device) for x in inputs), impl="triton")
    q = torch.exp(result.draft_logits_BV[0].cpu().double() / 0.8 - float(result.logsumexp_B[0]))
    assert abs(float(q.sum()) - 1) < 1e-5
    drawn = torch.bincount(result.token_ids_B.cpu(), minlength=6)
    assert bool(((drawn - cells * q).abs() < 1).all())
    assert len(drawn.nonzero()) >= 3 and drawn[2] == 0  # token 2 is masked
    tied = torch.zeros(1, 6)
    first = dispatch.low_rank_step(tied, torch.zeros(1, 4), torch.ones(6, 4), torch.zeros(1), torch.full((1,), 0.9))
    assert first.token_ids_B.tolist() == [0]


def test_the_lowest_temperature_is_allowed_though_fp32_holds_a_little_less(kernel_device):
    base, previous, w1, w2, _, uniform = step_inputs(5, 2, 40, 8, torch.float32)
    inputs = [base, previous, w1, w2, torch.full((2,), 1e-5), uniform]
    expected = markov_step(*inputs)
    assert expected.fault_B.tolist() == [0, 0]
    assert expected.token_ids_B.tolist() == expected.draft_logits_BV.argmax(-1).tolist()
    got = dispatch.markov_step(*(x.to(kernel_device) for x in inputs), impl="triton")
    assert got.token_ids_B.tolist() == expected.token_ids_B.tolist()
