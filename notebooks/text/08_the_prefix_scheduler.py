# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 08 The prefix scheduler
#
# **Question.** How many drafted tokens should a batch verify, and what may that decision look at?
#
# **Claim.** Admitting drafts by falling survival, as long as tokens per second rise, is cheap, reacts to load, and is
# exact if it stops at the first drop. A search that looks behind the drop earns more and writes another law. With
# the size of the batch taken from two rounds ago, the whole curve may be searched and the law is exact again.

# %% tags=["parameters"]
requests: int = 6  # in the batch that is looked at step by step
gamma: int = 5  # drafted tokens per request
confidence: float = 0.75  # mean conditional chance of a draft
seed: int = 0  # of the drawn chances
timing_repeats: int = 40  # decisions timed for 1024 requests

# %%
import numpy as np

from dspec_lab.bench.scheduling import bench_decisions
from dspec_lab.plots import scheduling
from dspec_lab.scheduler import admission, bellman, counterexample, gating, policies
from dspec_lab.scheduler.batch import audit_policies
from dspec_lab.scheduler.cost_table import CostTable, DraftCost
from dspec_lab.verifier import exact_audit
from dspec_lab.widgets.scheduler_panel import SchedulerPanel, shapes

# %%
if requests < 2 or gamma < 2:
    raise ValueError(f"two requests and two drafts at least, got {requests} and {gamma}")
if not 0 < confidence < 1 or timing_repeats < 3:
    raise ValueError(f"confidence lies between 0 and 1 and repeats are 3 or more, got {confidence}, {timing_repeats}")
rng = np.random.default_rng(seed)

# %% [markdown]
# ## What a round costs
#
# The target's pass over $B$ rows takes nearly the same time for few rows, and more for many. Where the bend lies, and
# whether the curve has stairs, is a property of machine and model; `dspec profile` measures it. The three shapes here
# are made up, to tell one effect from another. $\mathrm{SPS}(B)$ is steps per second.

# %%
tables = shapes()
scheduling.cost_figure(tables, title="three made-up shapes")

# %% [markdown]
# ## One decision, step by step
#
# Each of $R$ requests has $\gamma$ drafts with survival $a_{r,1} \ge a_{r,2} \ge \ldots$ All requests together verify
# $B = R + n$ rows and expect $\tau = R + \sum a$ tokens. Because survival falls along a request, the $n$ largest
# chances of all always form prefixes: sorting them is all there is to do.

# %%
table = CostTable(rows=(1, 4 * requests + 40), seconds=(0.010, 0.040))
now_BG, past_BG = rng.beta(3 * confidence, 3 * (1 - confidence), (2, requests, gamma)).cumprod(axis=-1)
view = policies.RoundView(survival_BG=now_BG, lens_B=np.full(requests, gamma), past_BG=past_BG)
falling_N = admission.falling(admission.present(now_BG, view.lens_B))
rates_N = admission.rates(falling_N, requests, table.round_s_N(requests, len(falling_N)))
early = policies.EarlyStop(table).lengths(view)
for n, rate in enumerate(rates_N[: int(early.sum()) + 3]):
    note = "no draft" if n == 0 else f"the next chance is {falling_N[n - 1]:.3f}"
    print(f"{n:3} admitted: {rate:7.2f} tokens/s   {note}")

# %%
delayed = policies.Delayed(table).lengths(view)
budgets = {"early-stop": int(early.sum()), "delayed": int(delayed.sum()), "full block": requests * gamma}
chosen = {"early-stop": early.tolist(), "delayed": delayed.tolist()}
scheduling.search_figure(rates_N, chosen, budgets, title="the same chances, a straight cost")

# %% [markdown]
# The delayed policy takes only the *number* of drafts from old chances (two rounds ago) and fills it by today's
# order. So it can miss the top by a little, and needs nothing of the current round before it can plan the pass.
#
# ## What the decision may look at
#
# The chance $c_{k+1}$ is computed with the token $x_k$ in hand. If it decides whether $x_k$ itself is verified,
# tokens with bright prospects are verified and the others are drawn anew from the target: a bias. The paper's
# counterexample has $p_t = (0.7, 0.3)$ and a block of two. We run the real loop along every path of its draws.

# %%
laws = {
    "target": {"A": 0.7, "B": 0.3},
    "early-stop": counterexample.first_token_law(policies.EarlyStop(counterexample.TABLE)),
    "delayed": counterexample.first_token_law(policies.Delayed(counterexample.TABLE)),
    "look behind the drop": counterexample.first_token_law(policies.Retrospective(counterexample.TABLE)),
}
for name, law in laws.items():
    print(f"{name:22} A {law['A']:.6f}  B {law['B']:.6f}")

# %% [markdown]
# ## Every policy, exactly
#
# The same walk for whole texts, on a target whose law is known, for each policy that the engine offers.

# %%
rows = [exact_audit.policy_row(name, policy, "T=1", "token") for name, policy in audit_policies().items()]
for row in rows:
    print(f"{row.subject:28} {row.verdict}  {row.evidence}")

# %% [markdown]
# ## Stairs and cliffs
#
# Real cost curves jump. Behind a jump the next rows are free, but early stopping never gets there; the delayed search
# does. For one request there is a best rule altogether: it knows the law of later confidences, not the tokens
# (Bellman). Its chances here come from a chain with a good and a bad state.

# %%
chain_values, chain_start = np.array([0.35, 0.95]), np.array([0.3, 0.7])
chain = bellman.ConfidenceChain(chain_values, chain_start, np.tile([[0.8, 0.2], [0.1, 0.9]], (gamma - 1, 1, 1)))
jump = CostTable(rows=(1, 2, gamma + 1), seconds=(0.010, 0.0197, 0.0205))
best_rule = bellman.solve(chain, jump.round_s_N(1, gamma))
good = policies.RoundView(survival_BG=np.full((1, gamma), 0.95).cumprod(1), lens_B=np.array([gamma]),
                          past_BG=np.full((1, gamma), 0.95).cumprod(1))
at_jump = {p.name: int(p.lengths(good)[0]) for p in (policies.EarlyStop(jump), policies.Delayed(jump), best_rule)}
print(at_jump, f"best possible {best_rule.rate_tok_per_s:.1f} tokens/s, plain {1 / 0.010:.1f}")

# %% [markdown]
# ## Whether to draft at all
#
# A policy decides when the drafts have been paid for. Before that, from earlier rounds only, *gating* decides who
# drafts: requests whose drafts are not expected to earn their cost skip it. Here the cost of drafting a block grows.

# %%
hopes_BG = np.linspace(0.9, 0.2, requests)[:, None] ** np.arange(1, gamma + 1)
drafting = {}
for cost_ms in (0, 1, 2, 4, 8, 16):
    priced = table.with_draft(DraftCost(per_request_s=cost_ms / 1e3))
    drafting[cost_ms] = int((gating.draft_lengths(hopes_BG, priced) > 0).sum())
    print(f"{cost_ms:3} ms a block: {drafting[cost_ms]} of {requests} requests draft")

# %% [markdown]
# ## Try it
#
# `look-ahead` is the search that leaks. Compare `early-stop` and `delayed` on the cliff with few and with many
# requests.

# %%
panel = SchedulerPanel(requests=8)
panel

# %%
panel.static()

# %% [markdown]
# ## What a decision costs

# %%
timing = bench_decisions(1024, 7, repeats=timing_repeats)
for name, us in timing["us"].items():
    print(f"{name:14} {us['median']:6.0f} us (least {us['min']:.0f}) for 1024 requests, 7 drafts each")

# %% [markdown]
# ## What was claimed

# %%
# early stopping stands on the first top of the rate, and no policy verifies what was not drafted
top = int(early.sum())
assert all(rates_N[n + 1] > rates_N[n] for n in range(top))
assert top == len(rates_N) - 1 or rates_N[top + 1] <= rates_N[top]
assert early.max() <= gamma and delayed.max() <= gamma
# the leak is the paper's, and the legal policies are exact
assert abs(laws["look behind the drop"]["A"] - 0.85) < 1e-12
assert all(abs(laws[name]["A"] - 0.7) < 1e-12 for name in ("early-stop", "delayed"))
assert all(row.value < 1e-12 for row in rows)

# %%
# over the cliff: the delayed search and the best rule go on where early stopping halts
assert at_jump["early-stop"] < at_jump["delayed"] == gamma and at_jump["bellman"] == gamma
assert best_rule.rate_tok_per_s > 1 / 0.010
# dearer drafts, fewer requests that draft; a decision takes far less than a round
counts = list(drafting.values())
assert all(a >= b for a, b in zip(counts, counts[1:])) and counts[0] > counts[-1] == 0
assert all(us["min"] < 1000 for us in timing["us"].values())
