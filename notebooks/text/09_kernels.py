# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 09 Kernels
#
# **Question.** What is there to fuse in a round of speculative decoding, and what does it save?
#
# **Claim.** Between the big matrix products a round moves rows as wide as the vocabulary: laws, residuals, running sums.
# None of that computes much, so bytes are what it costs. One kernel reads each row once and writes a token; separate
# torch operations move two to six times as much. Fused or not, the numbers must be the same: each kernel has a torch
# twin, and on a machine without a GPU Triton's interpreter runs the very kernel on CPU tensors.

# %% tags=["parameters"]
vocab: int = 151936  # of Qwen3
batch: int = 32  # requests in a round
gamma: int = 7  # drafted tokens of each
rank: int = 256  # of the Markov head
context: int = 4096  # cached tokens of each request
card_name: str = "h100"  # h100, h200 or a6000: data sheet numbers for the roofline
small_vocab: int = 300  # for the kernels in the interpreter
seed: int = 0

# %%
import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton: kernels then run on CPU tensors

import torch

from dspec_lab.bench import kernel_traffic, profiles
from dspec_lab.kernels import dispatch, markers
from dspec_lab.kernels.ragged_attention import attention_plan
from dspec_lab.plots import kernels as plots
from dspec_lab.serving.roofline import GPUS

# %%
for name, value in {"vocab": vocab, "batch": batch, "gamma": gamma, "rank": rank, "context": context}.items():
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
if card_name not in GPUS:
    raise ValueError(f"card_name must be one of {', '.join(GPUS)}, got {card_name!r}")
if not 8 <= small_vocab <= 5000:
    raise ValueError(f"small_vocab must lie in 8..5000 (the interpreter is slow), got {small_vocab}")
card = GPUS[card_name]

# %% [markdown]
# ## What a round moves
#
# Take accepting a draft. By the formula, the target's and the drafter's rows are checked, the two rows at the first
# rejection are taken, subtracted, clipped, summed, and a running sum in fp64 finds the token. Written as torch
# operations, each of these reads and writes whole rows. The kernel reads each row once.

# %%
accept = kernel_traffic.accept_residual_traffic(batch, gamma, vocab)
for one in accept.passes:
    print(f"{one.what:32} reads {one.read_bytes / 1e6:7.1f} MB, writes {one.written_bytes / 1e6:7.1f} MB")
print(f"{'torch operations together':32} {accept.torch_bytes / 1e6:.1f} MB")
print(f"{'one kernel':32} {accept.fused_bytes / 1e6:.1f} MB")

# %% [markdown]
# ## The same for every kernel
#
# Counted from shapes: heads and layers are those of Qwen3-4B. The numbers at the bars say how many times the kernel's
# bytes the torch operations move.

# %%
traffic = [
    accept,
    kernel_traffic.markov_step_traffic(batch, vocab, rank),
    kernel_traffic.ragged_attention_traffic(batch, gamma + 1, context, 32, 8, 128),
    kernel_traffic.tv_loss_traffic(batch * (gamma + 1), vocab),
    kernel_traffic.compact_kv_traffic(batch, 5, 36, 8, 128),
]
plots.traffic_bars(traffic, title=f"{batch} requests, {gamma} drafts, vocabulary {vocab}")

# %% [markdown]
# ## The roofline
#
# A kernel can be no faster than memory delivers its bytes, nor than the card multiplies. Only two of the ops multiply
# matrices at all, and even these stand far left of the bend: bytes decide. So the target for all of them is a share of
# the card's copy bandwidth, not of its arithmetic.

# %%
for one in traffic:
    print(f"{one.op:18} at least {1e6 * one.least_s(card.bytes_per_s, card.flops_per_s):8.1f} us on a {card.name}")
plots.roofline(traffic, bytes_per_s=card.bytes_per_s, flops_per_s=card.flops_per_s, name=card.name)

# %% [markdown]
# ## Who sees whom: the marker tensor
#
# Requests and trees are flattened into one row of tokens. Five numbers a token say whose it is, where its key lies and
# which places it sees: a prefix, and single drafts by a bit mask. No padding takes part, and no mask tensor of
# [rows, places] is ever written. Below: a chain of two drafts after five cached tokens, and a tree of four after
# three; its drafts 1 and 2 are rivals, and neither sees the other.

# %%
contexts = [5, 3]
marker_NP, positions_N = markers.tree_markers([[0, 1], [0, 0, 1, 2]], contexts)
visible_NS = markers.visible(marker_NP, 8)
names = ["chain: anchor", "draft 1", "draft 2", "tree: anchor", "draft 1", "draft 2", "draft 3, of 1", "draft 4, of 2"]
print(marker_NP)
plots.visible_picture(visible_NS, names, title="a row of two requests")

# %% [markdown]
# ## The kernels themselves, on this machine
#
# Triton's interpreter carries out the kernel's own code, block by block, on CPU tensors. It is slow, so shapes are
# small, but they lie off the block sizes on purpose: what a wrong mask lets through shows. Each result is compared
# with the torch twin's.

# %%
missing = dispatch.triton_missing()
generator = torch.Generator().manual_seed(seed)
numbers = torch.rand(4, 3, generator=generator, dtype=torch.float64)
target_BJV = torch.softmax(2 * torch.randn(3, 3, small_vocab, generator=generator), -1)
draft_BGV = torch.softmax(target_BJV[:, :2].log() + 0.3 * torch.randn(3, 2, small_vocab, generator=generator), -1)
ids_BG = torch.multinomial(draft_BGV.flatten(0, 1), 1, generator=generator).view(3, 2)
inputs = (target_BJV, draft_BGV, ids_BG, torch.tensor([2, 2, 1]), numbers[:2].T.contiguous(), numbers[2], numbers[3])
which = ["torch"] if missing else ["torch", "triton"]
verdicts = {impl: dispatch.accept_residual(*inputs, impl=impl) for impl in which}
for impl, got in verdicts.items():
    print(f"{impl:6} accepted {got.num_accepted_B.tolist()}, next tokens {got.next_ids_B.tolist()}")
print(missing or "the kernel ran in the interpreter")

# %%
base_BV = torch.randn(3, small_vocab, generator=generator)
w1_VR, w2_VR = (torch.randn(small_vocab, 16, generator=generator) / 4 for _ in range(2))
step = (base_BV, torch.tensor([1, 5, 7]), w1_VR, w2_VR, torch.ones(3), numbers[0])
steps = {impl: dispatch.markov_step(*step, impl=impl) for impl in which}
plan = attention_plan(marker_NP, torch.tensor([0, 8]), pool_slots=16, device="cpu")
query_NHE = torch.randn(len(names), 4, 16, generator=generator)
keys_SKE, values_SKE = (torch.randn(16, 2, 16, generator=generator) for _ in range(2))
mixed = {impl: dispatch.ragged_attention(query_NHE, keys_SKE, values_SKE, plan, scale=0.25, impl=impl) for impl in which}
logits_gap = (steps[which[-1]].draft_logits_BV - steps["torch"].draft_logits_BV).abs().max()
mixed_gap = (mixed[which[-1]] - mixed["torch"]).abs().max()
print(f"Markov step: tokens {[one.token_ids_B.tolist() for one in steps.values()]}, logits differ by {logits_gap:.1e}")
print(f"attention: outputs differ by {mixed_gap:.1e}")

# %% [markdown]
# ## What a place that must not be seen does to the result
#
# We change the keys and values that the markers hide. The output of a right kernel stays the same, bit for bit; with
# one bit too many in one marker, a rival draft is seen, and it moves.

# %%
hidden = 8 + contexts[1] + 2  # the tree's draft 2, which its rival's line must not see
changed_SKE = values_SKE.clone()
changed_SKE[hidden] += 100.0
again = dispatch.ragged_attention(query_NHE, keys_SKE, changed_SKE, plan, scale=0.25, impl=which[-1])
wrong_NP = marker_NP.clone()
wrong_NP[6, markers.ANCESTORS] |= 1 << 1  # draft 3 now sees draft 2
wrong_plan = attention_plan(wrong_NP, torch.tensor([0, 8]), pool_slots=16, device="cpu")
leak = dispatch.ragged_attention(query_NHE, keys_SKE, changed_SKE, wrong_plan, scale=0.25, impl=which[-1])
honest_move = float((again[6] - mixed[which[-1]][6]).abs().max())
leak_move = float((leak[6] - mixed[which[-1]][6]).abs().max())
print(f"draft 3 moves by {honest_move} with the right marker, by {leak_move:.1f} with one bit too many")

# %% [markdown]
# ## Measured on a GPU
#
# `python kernels/benchmarks/bench_kernels.py` times every kernel on a GPU and leaves a record in `data/profiles`. What
# is there is shown; times are never guessed.

# %%
records = profiles.kernel_records()
for file, record in records.items():
    print(file, record["gpu"], f"copy {record['copy']['bytes_per_s'] / 1e9:.0f} GB/s")
    for case in record["cases"]:
        print("  ", case["op"], case["shape"], case["parity"], case.get("share_of_copy"))
if not records:
    print("No GPU record exists yet: the kernels have run in the interpreter only, and no GPU time is known.")

# %% [markdown]
# ## What was claimed

# %%
# fusing saves bytes in every op, and bytes are the limit of every op on this card
assert all(one.fused_bytes < one.torch_bytes for one in traffic)
assert all(one.intensity < card.flops_per_s / card.bytes_per_s for one in traffic)
assert all(one.saved > 1.5 for one in traffic)
# the kernel and its torch twin agree (where Triton is installed)
for got in verdicts.values():
    assert torch.equal(got.num_accepted_B, verdicts["torch"].num_accepted_B)
    assert torch.equal(got.next_ids_B, verdicts["torch"].next_ids_B)
assert all(torch.equal(one.token_ids_B, steps["torch"].token_ids_B) for one in steps.values())
assert logits_gap < 1e-4 and mixed_gap < 1e-4
# what a marker hides has no influence, and one wrong bit shows
assert honest_move == 0 and leak_move > 1
