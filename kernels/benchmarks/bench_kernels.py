"""Time every kernel against torch eager, torch.compile and this GPU's own copy bandwidth; write one record.

    python kernels/benchmarks/bench_kernels.py

does all in under 8 minutes and writes data/profiles/kernels_<gpu>.json. An op whose result differs from its torch twin
is reported and not timed, and the script then exits with 1. Without a GPU it says so and exits with 2. Times are
medians over repeated launches between CUDA events, with the L2 cache overwritten before each. `moved_bytes` counts what
the algorithm must read and write; `share_of_copy` is that over the time, as a share of the bandwidth that a large
device-to-device copy reached in the same run (bytes read plus bytes written).
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from dspec_lab.bench.record import run_record
from dspec_lab.core.files import write_json
from dspec_lab.kernels import dispatch
from dspec_lab.kernels.markers import tree_markers
from dspec_lab.kernels.ragged_attention import attention_plan

PROFILES = Path(__file__).resolve().parents[2] / "data" / "profiles"


@dataclass(frozen=True, slots=True)
class Case:
    """One op at one shape: what to run, what to compare it with, and a check that raises when it is wrong."""

    op: str
    shape: dict[str, int | str]
    moved_bytes: int
    kernel: Callable[[], object]
    check: Callable[[], None]
    baselines: dict[str, Callable[[], object]] = field(default_factory=dict)
    compiled: Callable[[], object] | None = None  # what torch.compile gets; None where it makes no sense


def _rand(device: str, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device).to(dtype)


def _uniform(device: str, *shape: int, seed: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.rand(shape, generator=generator, device=device, dtype=torch.float64)


def _draw(law_BV: Tensor, u_B: Tensor) -> Tensor:
    cdf_BV = law_BV.double().cumsum(-1)
    return torch.searchsorted(cdf_BV, (u_B * cdf_BV[:, -1]).unsqueeze(1), right=True).squeeze(1)


def _require(ok: bool, wrong: str) -> None:
    # not `assert`: the gate must hold under python -O too
    if not ok:
        raise AssertionError(wrong)


def _check_draw(law_BV: Tensor, u_B: Tensor, ids_B: Tensor) -> None:
    # fp32 sums in another order may move a border of the CDF by this much; no more
    slack = 1e-5
    cdf_BV = law_BV.double().cumsum(-1)
    cdf_BV = cdf_BV / cdf_BV[:, -1:]
    high_B = cdf_BV.gather(1, ids_B.unsqueeze(1)).squeeze(1)
    low_B = high_B - law_BV.double().gather(1, ids_B.unsqueeze(1)).squeeze(1) / law_BV.double().sum(-1)
    _require(bool(((u_B >= low_B - slack) & (u_B <= high_B + slack)).all()), "a drawn token lies off its uniform")


def _eager_accept(target_BJV, draft_BGV, ids_BG, accept_u_BG, replacement_u_B, bonus_u_B):
    """Whole-batch torch with the same contract as the kernel: every row is checked."""
    good_B = ((target_BJV.sum(-1) - 1).abs() < 0.02).all(-1) & ((draft_BGV.sum(-1) - 1).abs() < 0.02).all(-1)
    index_BG1 = ids_BG.unsqueeze(-1)
    p_BG = target_BJV[:, :-1].gather(-1, index_BG1).squeeze(-1)
    q_BG = draft_BGV.gather(-1, index_BG1).squeeze(-1)
    kept_B = (accept_u_BG < (p_BG / q_BG.clamp_min(1e-8)).clamp_max(1)).long().cumprod(-1).sum(-1)
    G = ids_BG.shape[1]
    rejected_B = kept_B < G
    b_B = torch.arange(len(kept_B), device=kept_B.device)
    p_BV, q_BV = target_BJV[b_B, kept_B], draft_BGV[b_B, kept_B.clamp_max(G - 1)]
    left_BV = torch.where(rejected_B.unsqueeze(1), (p_BV - q_BV).clamp_min(0), p_BV)
    law_BV = torch.where(left_BV.sum(-1, keepdim=True) > 1e-8, left_BV, p_BV)
    drawn_B = _draw(law_BV, torch.where(rejected_B, replacement_u_B, bonus_u_B))
    return torch.where(good_B, kept_B, 0), torch.where(good_B, drawn_B, -1), law_BV


def accept_case(device: str, B: int, G: int, V: int, dtype: torch.dtype, logits: bool) -> Case:
    target = _rand(device, B, G + 1, V, seed=1) * 3
    draft = target[:, :-1] + 0.7 * _rand(device, B, G, V, seed=2)
    target, draft = ((x if logits else torch.softmax(x, -1)).to(dtype) for x in (target, draft))
    to_law = (lambda x: torch.softmax(x.float(), -1)) if logits else (lambda x: x.float())
    ids = _draw(to_law(draft).flatten(0, 1), _uniform(device, B * G, seed=3)).reshape(B, G)
    noise = (_uniform(device, B, G, seed=4), _uniform(device, B, seed=5), _uniform(device, B, seed=6))
    lens = torch.full((B,), G, device=device)
    heat = torch.ones(B, device=device) if logits else None
    inputs = (target, draft, ids, lens, *noise)

    def eager():
        return _eager_accept(to_law(target), to_law(draft), ids, *noise)

    def kernel():
        return dispatch.accept_residual(*inputs, temperature_B=heat, impl="triton", check=False)

    def check() -> None:
        got, expected = kernel(), eager()
        _require(bool(got.fault_B.eq(0).all()), "a sound request was called faulty")
        _require(torch.equal(got.num_accepted_B, expected[0]), "another number of drafts was accepted")
        rejected_B = got.num_accepted_B < G
        _check_draw(expected[2], torch.where(rejected_B, noise[1], noise[2]), got.next_ids_B)

    rows = 2 * G + 1 + (2 if logits else 0)  # logits: one pair of rows is read twice
    shape = {"B": B, "G": G, "V": V, "dtype": str(dtype).removeprefix("torch.")}
    name = "accept_residual_logits" if logits else "accept_residual"
    return Case(name, shape, B * rows * V * target.element_size(), kernel, check, {"eager": eager}, eager)


def markov_case(device: str, B: int, V: int, R: int, dtype: torch.dtype) -> Case:
    base, previous = _rand(device, B, V, dtype=dtype, seed=1), torch.arange(B, device=device) % V
    w1, w2 = (_rand(device, V, R, seed=s).mul(R**-0.5).to(dtype) for s in (2, 3))
    heat, uniform = torch.full((B,), 0.9, device=device), _uniform(device, B, seed=4)

    def eager():
        logits_BV = base.float() + (w1[previous] @ w2.T).float()
        return _draw(torch.softmax(logits_BV / heat.unsqueeze(1), -1), uniform), logits_BV

    def kernel():
        return dispatch.markov_step(base, previous, w1, w2, heat, uniform, impl="triton", check=False)

    def check() -> None:
        got = kernel()
        logits_BV = base.float() + w1[previous].float() @ w2.float().T
        torch.testing.assert_close(got.draft_logits_BV, logits_BV, rtol=0, atol=2e-3)
        _check_draw(torch.softmax(got.draft_logits_BV / 0.9, -1), uniform, got.token_ids_B)

    moved = V * R * w2.element_size() + B * V * (base.element_size() + 4)
    shape = {"B": B, "V": V, "R": R, "dtype": str(dtype).removeprefix("torch.")}
    return Case("markov_step", shape, moved, kernel, check, {"eager": eager}, eager)


def attention_case(device: str, B: int, drafts: int, context: int, H: int, K: int, E: int, dtype: torch.dtype) -> Case:
    trees = [[(draft - 1) // 2 for draft in range(1, drafts + 1)] for _ in range(B)]
    contexts = [context - 17 * (b % 4) for b in range(B)]
    J, span = drafts + 1, context + drafts + 1
    slots = torch.arange(B) * span
    plan = attention_plan(tree_markers(trees, contexts)[0], slots, pool_slots=B * span, device=device)
    query = _rand(device, B * J, H, E, dtype=dtype, seed=1)
    keys, values = (_rand(device, B * span, K, E, dtype=dtype, seed=s) for s in (2, 3))
    # the padded form that torch's fused attention wants, built outside the timing
    mask_BJS = torch.zeros(B, J, span, dtype=torch.bool, device=device)
    from dspec_lab.kernels.markers import visible

    for b in range(B):
        end = contexts[b] + J
        mask_BJS[b, :, :end] = visible(plan.marker_NP[b * J : (b + 1) * J], end)
    padded = [x.view(B, span, K, E).transpose(1, 2) for x in (keys, values)]
    padded_query = query.view(B, J, H, E).transpose(1, 2)

    def sdpa():
        return torch.nn.functional.scaled_dot_product_attention(
            padded_query, *padded, attn_mask=mask_BJS.unsqueeze(1), scale=E**-0.5, enable_gqa=True
        )

    def eager():
        grouped = padded_query.float().unflatten(1, (K, H // K)).flatten(2, 3) * E**-0.5
        scores = (grouped @ padded[0].float().transpose(-1, -2)).unflatten(2, (H // K, J))
        weights = torch.softmax(scores.masked_fill(~mask_BJS[:, None, None], float("-inf")), -1).flatten(2, 3)
        return (weights @ padded[1].float()).unflatten(2, (H // K, J)).flatten(1, 2)

    def kernel():
        return dispatch.ragged_attention(query, keys, values, plan, scale=E**-0.5, impl="triton")

    def check() -> None:
        expected = dispatch.ragged_attention(query, keys, values, plan, scale=E**-0.5, impl="torch")
        # weights are rounded to tf32 before the second product on 16-bit inputs; the output to its own dtype
        torch.testing.assert_close(kernel(), expected, rtol=2e-2, atol=2e-2 if dtype != torch.float32 else 1e-4)

    moved = 2 * sum(length + J for length in contexts) * K * E * keys.element_size()
    moved += 2 * B * J * H * E * query.element_size()
    shape = {"B": B, "drafts": drafts, "context": context, "H": H, "K": K, "E": E}
    shape["dtype"] = str(dtype).removeprefix("torch.")
    return Case("ragged_attention", shape, moved, kernel, check, {"sdpa_same_mask": sdpa, "eager": eager}, eager)


def compact_case(device: str, B: int, L: int, K: int, E: int, context: int, dtype: torch.dtype) -> Case:
    J, kept = 32, [0, 2, 5, 11, 23]
    span = context + J
    keys, values = (_rand(device, L, B * span, K, E, dtype=dtype, seed=s) for s in (1, 2))
    first = torch.arange(B, device=device) * span + context
    kept_BJ = torch.tensor(kept, device=device).expand(B, -1).contiguous()
    count = torch.full((B,), len(kept), device=device)
    source = (first.unsqueeze(1) + kept_BJ[:, 1:]).flatten()
    target = (first.unsqueeze(1) + torch.arange(1, len(kept), device=device)).flatten()

    def kernel() -> None:
        dispatch.compact_kv(keys, values, first, kept_BJ, count, impl="triton", check=False)

    def eager() -> None:
        keys[:, target] = keys[:, source]
        values[:, target] = values[:, source]

    def check() -> None:
        before = keys.clone(), values.clone()
        kernel()
        for now, then in zip((keys, values), before, strict=True):
            then[:, target] = then[:, source]
            _require(torch.equal(now, then), "a row moved wrongly")

    moved = 4 * B * (len(kept) - 1) * L * K * E * keys.element_size()
    shape = {"B": B, "L": L, "K": K, "E": E, "kept": len(kept), "dtype": str(dtype).removeprefix("torch.")}
    return Case("compact_kv", shape, moved, kernel, check, {"eager": eager}, eager)


def admission_case(device: str, B: int, G: int, budget: int) -> Case:
    survival = _uniform(device, B, G, seed=1).float().mul(0.4).add(0.6).cumprod(-1)
    lens = torch.full((B,), G, device=device)

    def eager():
        chosen = survival.flatten().sort(descending=True, stable=True).indices[:budget]
        return torch.zeros(B, dtype=torch.int64, device=device).index_add_(0, chosen // G, torch.ones_like(chosen))

    def kernel():
        return dispatch.admit_top_k(survival, lens, budget, impl="triton", check=False)

    def check() -> None:
        _require(torch.equal(kernel(), dispatch.admit_top_k(survival, lens, budget, impl="torch")), "another admission")

    shape = {"B": B, "G": G, "budget": budget, "dtype": "float32"}
    return Case("admit_top_k", shape, B * (G * 4 + 8), kernel, check, {"eager": eager}, eager)


def tv_case(device: str, N: int, V: int, dtype: torch.dtype) -> Case:
    target = (3 * _rand(device, N, V, seed=1)).to(dtype)
    draft = (target.float() + _rand(device, N, V, seed=2)).to(dtype).requires_grad_()

    def run(impl: str):
        draft.grad = None
        loss_N = dispatch.tv_loss(draft, target, impl=impl, check=False)
        loss_N.sum().backward()
        return loss_N.detach(), draft.grad

    def plain():
        draft.grad = None
        q_NV, p_NV = torch.softmax(draft.float(), -1), torch.softmax(target.float(), -1)
        (0.5 * (q_NV - p_NV).abs().sum()).backward()
        return draft.grad

    def check() -> None:
        (loss, grad), (twin_loss, twin_grad) = run("triton"), run("torch")
        torch.testing.assert_close(loss, twin_loss, rtol=0, atol=1e-5)
        torch.testing.assert_close(grad, twin_grad, rtol=2e-2, atol=1e-6)

    # forward: both rows twice (the normalisers come first); backward: both rows once and the gradient
    moved = N * V * 7 * draft.element_size()
    shape = {"N": N, "V": V, "dtype": str(dtype).removeprefix("torch.")}
    return Case("tv_loss_forward_backward", shape, moved, lambda: run("triton"), check, {"eager": plain}, plain)


def cases(device: str, small: bool = False) -> Iterator[Case]:
    """All cases, one at a time so that their inputs are freed; `small` ones are for a try in the interpreter."""
    half = torch.float32 if small else torch.bfloat16
    if small:
        yield accept_case(device, 2, 2, 700, torch.float32, logits=False)
        yield accept_case(device, 2, 2, 700, half, logits=True)
        yield markov_case(device, 2, 300, 16, half)
        yield attention_case(device, 2, 3, 80, 2, 1, 16, half)
        yield compact_case(device, 2, 1, 1, 8, 5, half)
        yield admission_case(device, 4, 3, 5)
        yield tv_case(device, 2, 700, half)
        return
    yield accept_case(device, 32, 7, 151936, torch.float32, logits=False)
    yield accept_case(device, 16, 7, 262144, torch.float32, logits=False)
    yield accept_case(device, 32, 7, 151936, half, logits=True)
    for batch in (1, 16, 64):
        yield markov_case(device, batch, 151936, 256, half)
    yield attention_case(device, 16, 7, 4096, 32, 8, 128, half)
    yield attention_case(device, 16, 31, 4096, 32, 8, 128, half)
    yield attention_case(device, 32, 7, 2048, 9, 3, 64, half)
    yield compact_case(device, 32, 36, 8, 128, 256, half)
    yield admission_case(device, 256, 7, 600)
    yield tv_case(device, 512, 151936, half)
    yield tv_case(device, 256, 262144, half)


def seconds(call: Callable[[], object], scratch: Tensor, budget_s: float = 0.5) -> dict[str, float]:
    """Median, 20th and 80th percentile of the device time of `call`, the cache overwritten before each launch."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    times, end_at = [], time.monotonic() + budget_s
    while len(times) < 20 or (time.monotonic() < end_at and len(times) < 200):
        scratch.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    cuts = statistics.quantiles(times, n=10)
    return {"median_s": statistics.median(times), "p20_s": cuts[1], "p80_s": cuts[7], "repeats": len(times)}


def time_case(case: Case, scratch: Tensor, copy_bytes_per_s: float, compile_it: bool) -> dict[str, object]:
    """The record of one case whose check has passed."""
    row: dict[str, object] = {"kernel": seconds(case.kernel, scratch)}
    row |= {name: seconds(call, scratch) for name, call in case.baselines.items()}
    row["compiled"] = None
    if case.compiled is not None and compile_it:
        torch._dynamo.reset()
        row["compiled"] = seconds(torch.compile(case.compiled), scratch)
    median = row["kernel"]["median_s"]
    row["moved_bytes"] = case.moved_bytes
    row["bytes_per_s"] = case.moved_bytes / median
    row["share_of_copy"] = row["bytes_per_s"] / copy_bytes_per_s
    others = [name for name in (*case.baselines, "compiled") if row[name]]
    row["speedup"] = {name: row[name]["median_s"] / median for name in others}
    return row


def copy_bandwidth(scratch: Tensor) -> dict[str, float]:
    """Time of copying 1 GiB on the device, and its bandwidth: bytes read plus bytes written, per second."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    sink = torch.empty_like(source)
    times = seconds(lambda: sink.copy_(source), scratch)
    return times | {"bytes_per_s": 2 * source.numel() / times["median_s"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PROFILES, help="folder of the record")
    parser.add_argument("--compile-until-s", type=float, default=330, help="no torch.compile after this many seconds")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_kernels: no GPU here, so there is nothing to time", file=sys.stderr)
        return 2
    begin = time.monotonic()
    scratch = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    copy = copy_bandwidth(scratch)
    copy_bytes_per_s = copy["bytes_per_s"]
    print(f"copy {copy_bytes_per_s / 1e9:.0f} GB/s on {torch.cuda.get_device_name()}", flush=True)
    rows, wrong = [], 0
    for case in cases("cuda"):
        row: dict[str, object] = {"op": case.op, "shape": case.shape}
        try:
            case.check()
            row["parity"] = "pass"
            row |= time_case(case, scratch, copy_bytes_per_s, time.monotonic() - begin < options.compile_until_s)
            note = f"{row['kernel']['median_s'] * 1e6:9.1f} us  {row['share_of_copy']:.2f} of copy  "
            note += "  ".join(f"{name} x{gain:.2f}" for name, gain in row["speedup"].items())
        except AssertionError as error:
            wrong += 1
            row["parity"], note = "FAIL", f"not timed: {str(error).splitlines()[0]}"
            row["difference"] = str(error)
        except torch.OutOfMemoryError:
            row["parity"], note = "not run", "not run: it does not fit this GPU's memory"
        print(f"{case.op:26s} {case.shape}  {note}", flush=True)
        rows.append(row)
    record = run_record(vars(options) | {"out": str(options.out)}, seed=None)
    record |= {"copy": copy, "cases": rows, "total_s": time.monotonic() - begin}
    record["capability"] = list(torch.cuda.get_device_capability())
    slug = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    print(write_json(options.out / f"kernels_{slug}.json", record))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
