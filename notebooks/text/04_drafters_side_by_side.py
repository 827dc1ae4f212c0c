# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 04 Drafters side by side
#
# **Question.** Which drafter gains most, and does it earn back what a round costs?
#
# **Claim.** It depends on the texts. A trained drafter that reads the target's hidden states gains on texts like those
# it learned from; where an answer repeats its prompt, copying may gain as much for nothing. Accepted length alone does
# not decide: a drafter is faster than plain decoding only if it gains more tokens in a round than the round costs in
# plain tokens.

# %% tags=["parameters"]
drafter_names: list = ["dspark", "dflash", "eagle3", "mtp", "medusa", "lookahead", "prompt_lookup"]
samples: int = 4  # prompts per domain
max_new_tokens: int = 64
gamma: int = 7  # drafted tokens per round; drafters with a shorter reach draft what they can
repeats: int = 1  # timed runs of everything
temperature: float = 0.0
dtype: str = "auto"  # auto, fp32, bf16 or fp16

# %%
from dataclasses import replace

import torch

from dspec_lab.config import DecodeConfig
from dspec_lab.core.acceptance import acceptance_stats
from dspec_lab.evaluation import drafters, evaluate, paired, prompts, report
from dspec_lab.evaluation.paper import paper_table
from dspec_lab.models import load
from dspec_lab.plots import drafters as figures
from dspec_lab.plots import position, training
from dspec_lab.training import budget
from dspec_lab.verifier.decode import encode_chat, generate
from dspec_lab.widgets.first_run import FirstRunPanel

# %%
run = DecodeConfig(gamma=gamma, max_new_tokens=max_new_tokens, temperature=temperature)
known = [name for name in drafter_names if name not in drafters.TRAINED or name in drafters.available()]
names = drafters.check_names(known)
precision = load.choose_dtype(dtype)
chosen = [
    replace(prompt, benchmark=domain, turns=prompt.turns[:1])
    for domain in ("math", "code", "chat")
    for prompt in prompts.load_prompts(domain, samples)
]
print("no trained weights in data/checkpoints/smollm2 for:", ", ".join(sorted(set(drafter_names) - set(names))) or "none")

# %% [markdown]
# ## The field
#
# | drafter | reads | proposes |
# |---|---|---|
# | `dspark` | three target layers | a block in one pass, then left to right with a small sequential head |
# | `dflash` | three target layers | a block in one pass, each token by itself |
# | `eagle3` | three target layers | token by token, one layer, fed with its own hidden state |
# | `mtp` | last hidden state | token by token, one layer |
# | `medusa` | last hidden state | one head per position, no layer |
# | `lookahead` | nothing | guesses that earlier passes have refined (Jacobi iteration) |
# | `prompt_lookup` | the text | what followed the same words before |

# %%
tokenizer = load.load_tokenizer()
target = load.load_target(dtype=precision.dtype)
made = drafters.build_drafters(names, target)
stages = {name: budget.read_stages(drafters.trained_folder(name)) for name in names if name in drafters.TRAINED}
positions = {name: sum(stage.positions for stage in each) for name, each in stages.items()}
for name, drafter in made.items():
    model = getattr(drafter, "model", None)
    own = sum(p.numel() for key, p in model.named_parameters()) if isinstance(model, torch.nn.Module) else 0
    print(f"{name}: {own / 1e6:.1f} million weights of its own, trained on {positions.get(name, 0) / 1e6:.2f} million positions, "
          f"at most {drafter.max_gamma or 'any number of'} tokens")

# %% [markdown]
# ## The same prompts for all
#
# Plain decoding and the drafters take turns on each prompt, so that a busy moment meets all alike.

# %%
limits = {name: min(gamma, drafter.max_gamma or gamma) for name, drafter in made.items()}
rows = evaluate.evaluate(target, tokenizer, made, chosen, run, repeats=repeats, gammas=limits)
for row in rows:
    print(f"{row.drafter:14} {row.benchmark:5} accepted length {row.accepted_length:.2f}, speed-up {row.speedup:.2f}, "
          f"equal to plain: {report.verdict_text(row.outputs_equal_plain, row.max_flip_gap)}")

# %% [markdown]
# ## How much training each has had
#
# A drafter that was trained longer is no better method. The lines are held-out prompts of the last stage of training, in
# which all had the same answers; compare two drafters above the same number of positions.

# %%
training.budget_course(stages, title="trained drafters in data/checkpoints/smollm2") if stages else None

# %% [markdown]
# ## Accepted length
#
# On the right the paper's numbers for a 4B target. This target has 135 million weights: its own layers leave less to
# guess with, its texts are less predictable, and its drafters saw
# few and narrow data.

# %%
figures.accepted_by_drafter(rows, paper=paper_table("table1"), title=f"T = {temperature:g}, gamma {gamma}")

# %%
pairs = paired.paired_rows(rows)
for pair in pairs:
    print(f"{pair.drafter} - {pair.other} on {pair.prompts_of}: {pair.difference:+.2f} "
          f"[{pair.low:+.2f}, {pair.high:+.2f}], {'settled' if pair.settled else 'not settled'}")

# %% [markdown]
# ## Does it pay?
#
# The cost of a round is draft, verification and the loop's own work, in units of one plain token. Right of the diagonal
# a drafter slows decoding down, however much it gains.

# %%
figures.cost_and_gain(rows, title=f"{precision.name}, {torch.get_num_threads()} threads")

# %% [markdown]
# ## Position by position
#
# A parallel drafter loses acceptance along its block, since no token knows the one before it. The paper's lines are
# those of Qwen3-4B.

# %%
first = [encode_chat(tokenizer, prompt.turns) for prompt in chosen if prompt.benchmark == "math"]
block = {name: made[name] for name in names if name in ("dspark", "dflash", "eagle3")} or made
stats = {
    name: acceptance_stats([r for ids in first for r in generate(target, drafter, ids, run).rounds])
    for name, drafter in block.items()
}
position.acceptance_by_position(stats, paper=paper_table("fig2_conditional_acceptance"), domain="math")

# %% [markdown]
# ## Try it

# %%
examples = {prompt.prompt_id: prompt.turns[0] for prompt in chosen[::samples]}
panel = FirstRunPanel(target, tokenizer, made, examples, gamma=gamma, max_new_tokens=min(max_new_tokens, 32))
panel

# %%
panel.static()

# %% [markdown]
# ## What was claimed

# %%
by_name = {name: [row for row in rows if row.drafter == name] for name in names}
mean = {name: sum(row.num_committed for row in part) / sum(row.rounds for row in part) for name, part in by_name.items()}
print({name: round(value, 2) for name, value in mean.items()})
# the text stays the target's own
allowed = (None, True, "inconclusive") if precision.name == "fp32" else (None, True, "inconclusive", "near_tie")
assert all(row.outputs_equal_plain in allowed for row in rows), [row.outputs_equal_plain for row in rows]
# every trained drafter has some of its guesses accepted
assert all(mean[name] > 1.1 for name in names if name in drafters.TRAINED), mean
# speed-up is what accepted length and round cost make it, apart from the ends of texts
for row in rows:
    cost = (row.draft_ms + row.verify_ms + row.overhead_ms) * row.plain_tokens_per_s / 1e3
    assert abs(row.speedup / (row.accepted_length / cost) - 1) < 0.25, (row.drafter, row.benchmark)
