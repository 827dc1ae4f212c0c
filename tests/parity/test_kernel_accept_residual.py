"""Accept-prefix and residual draw: the kernels against the torch twin, and the twin against laws worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dspec_lab.core.sampling import NonFiniteLogitsError
from dspec_lab.core.streams import inverse_cdf
from dspec_lab.kernels import dispatch
from dspec_lab.kernels.faults import Fault, decode, encode

VERIFICATION = Path(__file__).parents[3] / "shared" / "reference" / "verification"


def ragged_batch(seed: int, lens: list[int], vocab: int, dtype: torch.dtype, logits: bool) -> dict:
    """Rows of a batch in scattered places, NaN in between; ids drawn from q; request 1 has a one-hot q."""
    generator = torch.Generator().manual_seed(seed)
    B, G, rows = len(lens), max(lens), sum(lens) + 2 * len(lens)
    target = torch.full((rows, vocab), float("nan"), dtype=dtype)
    draft = torch.full((rows, vocab), float("nan"), dtype=dtype)
    ids = torch.full((B, G), -1)
    starts = torch.zeros(B, dtype=torch.int64)
    temperature = torch.tensor([(1.0, 0.7, 1.6, 0.0)[b % 4] for b in range(B)])
    at = 1
    for b in torch.randperm(B, generator=generator).tolist():
        starts[b] = at
        z_p = 2 * torch.randn(lens[b] + 1, vocab, generator=generator)
        z_q = z_p[:-1] + 0.6 * torch.randn(lens[b], vocab, generator=generator)
        if logits:
            z_p[:, vocab // 3] = z_q[:, vocab // 2] = float("-inf")
        else:
            z_p, z_q = torch.softmax(z_p, -1), torch.softmax(z_q, -1)
        target[at : at + lens[b] + 1], draft[at : at + lens[b]] = z_p.to(dtype), z_q.to(dtype)
        law = torch.softmax(z_q / max(float(temperature[b]), 1e-3), -1) if logits else z_q
        if lens[b]:
            ids[b, : lens[b]] = torch.multinomial(law, 1, generator=generator)[:, 0]
        at += lens[b] + 2
    uniform = {"dtype": torch.float64, "generator": generator}
    batch = dict(target_NV=target, draft_NV=draft, draft_ids_BG=ids, draft_lens_B=torch.tensor(lens))
    batch |= dict(accept_u_BG=torch.rand(B, G, **uniform), replacement_u_B=torch.rand(B, **uniform))
    batch |= dict(bonus_u_B=torch.rand(B, **uniform), target_starts_B=starts, draft_starts_B=starts.clone())
    batch["one_hot_B"] = torch.arange(B) == 1
    if logits:
        batch["temperature_B"] = temperature
    return batch


def on(batch: dict, device: str) -> dict:
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def call_kernel(batch: dict, block_v: int) -> tuple[list[int], list[int], list[int]]:
    """The kernel itself, with chunks small enough that rows have several of them."""
    from dspec_kernels.accept_residual import accept_residual
    from dspec_kernels.accept_residual_logits import accept_residual_logits

    op = accept_residual_logits if "temperature_B" in batch else accept_residual
    return tuple(column.tolist() for column in op(**batch, block_v=block_v))


def call_torch(batch: dict) -> tuple[list[int], list[int], list[int]]:
    return tuple(x.tolist() for x in dispatch.accept_residual_rows(**batch, impl="torch", check=False))


# 16-bit rows widen without loss, so even there both sides see the same numbers; 300 is off the chunk of 128
@pytest.mark.parametrize("logits", [False, True], ids=["probs", "logits"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_kernel_equals_torch_on_16_bit_rows(kernel_device, dtype, logits):
    batch = ragged_batch(0, [2, 1, 0], 300, dtype, logits)
    got = call_kernel(on(batch, kernel_device), 128)
    assert got == call_torch(batch) and got[2] == [0] * 3


@pytest.mark.parametrize("logits", [False, True], ids=["probs", "logits"])
def test_kernel_equals_torch(kernel_device, logits):
    lens, outcomes = [3, 2, 0, 2], set()
    for seed in (0, 1):
        batch = ragged_batch(seed, lens, 300, torch.float32, logits)
        got = call_kernel(on(batch, kernel_device), 128)
        assert got == call_torch(batch) and got[2] == [0] * 4
        outcomes |= set(zip(got[0], lens, strict=True))
    assert any(kept < length for kept, length in outcomes) and any(0 < kept == length for kept, length in outcomes)


@pytest.mark.parametrize("logits", [False, True], ids=["probs", "logits"])
def test_largest_vocabulary(kernel_device, logits):
    batch = ragged_batch(3, [1, 1], 262144 - 3, torch.float32, logits)
    got = call_kernel(on(batch, kernel_device), 65536)
    assert got == call_torch(batch) and got[2] == [0, 0]


def test_rows_beyond_two_to_the_31_elements_use_64_bit_offsets(kernel_device, tmp_path):
    """Rows 2 and 3 of a matrix whose rows lie 2^30 elements apart, in a sparse file that takes no room."""
    if kernel_device == "cuda":
        pytest.skip("the sparse file lies in host memory")
    vocab, stride = 40, (1 << 30) + 64
    with (tmp_path / "rows").open("wb") as file:
        file.truncate(2 * (3 * stride + vocab))
    flat = torch.from_file(str(tmp_path / "rows"), shared=True, size=3 * stride + vocab, dtype=torch.float16)
    wide = flat.as_strided((4, vocab), (stride, 1))
    batch = ragged_batch(5, [1], vocab, torch.float16, False)
    wide[2:] = batch["target_NV"][1:3]
    batch["target_NV"], batch["target_starts_B"] = wide, torch.tensor([2])
    assert call_kernel(batch, 64) == call_torch(batch)
    assert call_torch(batch)[2] == [0]


# inf - inf inside the interpreter
@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("logits", [False, True], ids=["probs", "logits"])
def test_faulty_requests_commit_nothing_and_leave_their_neighbours_alone(kernel_device, logits):
    clean = ragged_batch(7, [2] * 9, 70, torch.float32, logits)
    expected = call_torch(clean)
    batch = {name: value.clone() for name, value in clean.items()}
    batch["one_hot_B"][1] = clean["one_hot_B"][1] = False
    starts, want = batch["target_starts_B"], [0] * 9
    batch["target_NV"][starts[0] + 1, 69] = float("nan")
    want[0] = encode(1, Fault.TARGET_ROW)
    batch["draft_NV"][starts[1], 0] = float("inf")
    want[1] = encode(0, Fault.DRAFT_ROW)
    batch["target_NV"][starts[2] + 2] = float("-inf") if logits else 0.0
    want[2] = encode(2, Fault.TARGET_ROW)
    batch["draft_ids_BG"][3, 1] = -1
    want[3] = encode(1, Fault.TOKEN_ID)
    batch["draft_ids_BG"][4, 0] = 70
    want[4] = encode(0, Fault.TOKEN_ID)
    batch["draft_lens_B"][5] = 3
    want[5] = encode(0, Fault.LENGTH)
    batch["accept_u_BG"][6, 1] = 1.0
    want[6] = encode(1, Fault.UNIFORM)
    if logits:
        batch["temperature_B"][7] = -0.5
        want[7] = encode(0, Fault.TEMPERATURE)
    else:
        # logits handed over as probabilities
        batch["target_NV"][starts[7]] = torch.linspace(-3, 4, 70)
        want[7] = encode(0, Fault.TARGET_ROW)
    for got in (call_torch(batch), call_kernel(on(batch, kernel_device), 128 if logits else 64)):
        assert got[2] == want
        assert got[0][:8] == [0] * 8 and got[1][:8] == [-1] * 8
        assert (got[0][8], got[1][8]) == (expected[0][8], expected[1][8])


def test_dispatch_raises_and_names_the_position():
    batch = ragged_batch(7, [2, 2], 30, torch.float32, True)
    batch["target_NV"][batch["target_starts_B"][1] + 2, 4] = float("nan")
    with pytest.raises(NonFiniteLogitsError, match="request 1, position 2: the target's row"):
        dispatch.accept_residual_rows(**batch)
    batch = ragged_batch(7, [2, 2], 30, torch.float32, False)
    batch["draft_ids_BG"][0, 1] = 31
    with pytest.raises(ValueError, match="request 0, position 1: a token id lies outside the vocabulary, got 31"):
        dispatch.accept_residual_rows(**batch)
    assert decode(encode(5, Fault.UNIFORM)) == (5, Fault.UNIFORM)


@pytest.mark.parametrize("one_hot", [False, True], ids=["dense", "one_hot"])
def test_emitted_law_is_the_target_exactly(kernel_device, one_hot):
    """Sum over every drafted token and over uniforms on a grid that hits each chance exactly."""
    # every accept chance is a multiple of 1/4 and every residual one of 1/3 or 1/2, so midpoints count them exactly
    p = torch.tensor([2, 1, 1] if one_hot else [0.5, 1.5, 2], dtype=torch.float64) / 4
    q = torch.tensor([2, 1, 1], dtype=torch.float64) / 4
    accept_cells, draw_cells = 4, 6 if one_hot else 3
    middle = (torch.arange(accept_cells) + 0.5) / accept_cells
    draws = (torch.arange(draw_cells) + 0.5) / draw_cells
    cases = torch.cartesian_prod(torch.arange(3).double(), middle.double(), draws.double())
    B = len(cases)
    batch = dict(
        target_probs_BJV=p.expand(B, 2, 3).clone(),
        draft_probs_BGV=None if one_hot else q.expand(B, 1, 3).clone(),
        draft_ids_BG=cases[:, :1].long(),
        draft_lens_B=torch.ones(B, dtype=torch.int64),
        accept_u_BG=cases[:, 1:2].clone(),
        replacement_u_B=cases[:, 2].clone(),
        bonus_u_B=cases[:, 2].clone(),
    )
    result = dispatch.accept_residual(**batch, impl="torch")
    first = torch.where(result.num_accepted_B == 1, cases[:, 0].long(), result.next_ids_B)
    weight = q[cases[:, 0].long()] / (accept_cells * draw_cells)
    emitted = torch.zeros(3, dtype=torch.float64).scatter_add_(0, first, weight)
    torch.testing.assert_close(emitted, p, rtol=0, atol=1e-12)
    if not one_hot:
        batch["target_probs_BJV"], batch["draft_probs_BGV"] = p.float().expand(B, 2, 3), q.float().expand(B, 1, 3)
        from_kernel = dispatch.accept_residual(**on(batch, kernel_device), impl="triton")
        assert from_kernel.num_accepted_B.tolist() == result.num_accepted_B.tolist()
        assert from_kernel.next_ids_B.tolist() == result.next_ids_B.tolist()


def reference_batch(records: list[int]) -> tuple[dict, dict]:
    from safetensors.torch import load_file

    if not VERIFICATION.is_dir():
        pytest.skip("the verification vectors are not at ../shared/reference beside the repository")
    case = load_file(VERIFICATION / "verification.safetensors")
    case = {name: value for name, value in case.items() if not name.startswith(("in.residual", "out.residual"))}
    case = {name: value[records] for name, value in case.items()}
    B = len(records)
    draws = (torch.arange(B, dtype=torch.float64) * 0.61803398875 + 0.113) % 1
    batch = dict(
        target_probs_BJV=case["in.target_logits"],
        draft_probs_BGV=case["in.draft_logits"],
        draft_ids_BG=case["in.tokens"][:, 1:].contiguous(),
        draft_lens_B=case["in.k"],
        accept_u_BG=case["in.uniforms"],
        replacement_u_B=draws,
        bonus_u_B=(draws + 0.5) % 1,
        temperature_B=case["in.temperature"],
    )
    return batch, case


def check_reference(result, case: dict, batch: dict) -> None:
    prefix = case["out.accept_prefix_mask"].clamp_min(0).sum(-1)
    assert result.num_accepted_B.tolist() == prefix.tolist()
    draws = torch.where(prefix < case["in.k"], batch["replacement_u_B"], batch["bonus_u_B"])
    for i, next_law in enumerate(case["out.next_distribution"]):
        if not case["out.stopped_inside_draft"][i]:
            assert int(result.next_ids_B[i]) == inverse_cdf(next_law, float(draws[i])), i


def test_verification_vectors():
    manifest = VERIFICATION / "manifest.json"
    count = json.loads(manifest.read_text())["records"] if manifest.is_file() else 0
    batch, case = reference_batch(list(range(count)))
    check_reference(dispatch.accept_residual(**batch, impl="torch"), case, batch)


def test_verification_vectors_in_the_kernel(kernel_device):
    batch, case = reference_batch(list(range(3, 222, 36)))
    result = dispatch.accept_residual(**on(batch, kernel_device), impl="triton")
    check_reference(result, case, batch)


def test_the_lowest_temperature_is_allowed_though_fp32_holds_a_little_less():
    assert float(torch.tensor(1e-5)) < 1e-5
    target = torch.tensor([[[0.0, 3.0, 1.0]]])
    uniform = torch.tensor([0.5], dtype=torch.float64)
    inputs = (target, None, torch.zeros(1, 0, dtype=torch.long), torch.tensor([0]), torch.zeros(1, 0), uniform, uniform)
    for impl in ("torch", "triton"):
        for lowest in (torch.tensor([1e-5]), torch.tensor([1e-5], dtype=torch.float64)):
            got = dispatch.accept_residual(*inputs, temperature_B=lowest, impl=impl)
            assert got.next_ids_B.tolist() == [1] and got.fault_B.tolist() == [0]
        with pytest.raises(ValueError, match="the temperature is neither 0 nor in"):
            dispatch.accept_residual(*inputs, temperature_B=torch.tensor([0.9e-5]), impl=impl)
