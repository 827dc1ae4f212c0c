# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 01 Why it is lossless, and how it breaks
#
# **Question.** Why is the output still the target's, whatever the drafter says?
#
# **Claim.** A draft $x$ is kept with chance $\min(1, p_t(x) / p_d(x))$; a rejected one is replaced by a draw from the
# residual, $\max(p_t - p_d, 0)$ normalised. What comes out has exactly the law $p_t$: not nearly, exactly. We show it
# without sampling, by walking through every outcome of every draw that the real decoding loop makes. Small
# mistakes, all met in practice, give a wrong law although the text still reads well: each of them is planted here in
# the same loop, and each is found.

# %% tags=["parameters"]
gamma: int = 2  # drafted tokens per round, in the enumeration
length: int = 4  # tokens of a whole text, in the enumeration
seed: int = 3  # of the two random tables
mutant_names: list = []  # planted faults to walk through; all if empty
draft_lengths: list = [1, 2, 3, 4, 5, 6]  # for the gain of block verification
draws: int = 3000  # first tokens drawn with the real model's laws
max_new_tokens: int = 32  # of the greedy texts of the real model
dtype: str = "auto"  # auto, fp32, bf16 or fp16

# %%
from collections import Counter

import torch

from dspec_lab.config import DecodeConfig
from dspec_lab.core import acceptance, rejection, sampling, streams
from dspec_lab.core.types import Proposal
from dspec_lab.drafters.autoregressive import AutoregressiveDrafter
from dspec_lab.evaluation import drafters, equality, prompts
from dspec_lab.models import load
from dspec_lab.models.toy import TableTarget
from dspec_lab.plots import laws
from dspec_lab.verifier import cases, decode, exact_audit, faults, goodness, mutants
from dspec_lab.verifier.enumerate import max_deviation, total_variation
from dspec_lab.verifier.rule_gain import rule_gain

# %%
greedy = DecodeConfig(gamma=5, max_new_tokens=max_new_tokens, temperature=0.0)
sampled = DecodeConfig(gamma=gamma, max_new_tokens=length, temperature=1.0, seed=seed)
precision = load.choose_dtype(dtype)
planted = [mutant for mutant in mutants.MUTANTS if mutant.name in mutant_names or not mutant_names]
if mutant_names and len(planted) != len(mutant_names):
    raise ValueError(f"mutants are {[mutant.name for mutant in mutants.MUTANTS]}, got {mutant_names}")
if draws < 100 or not draft_lengths:
    raise ValueError(f"need at least 100 draws and one draft length, got {draws} and {draft_lengths}")

# %% [markdown]
# ## One token
#
# Take a target and a drafter over four tokens. A token is drawn from $p_d$ and kept with chance
# $\min(1, p_t / p_d)$, so it comes out by this way with mass $p_d \min(1, p_t / p_d) = \min(p_t, p_d)$. These masses
# add up to the accept rate, $1 - \mathrm{TV}(p_d, p_t)$. The rest of the time the replacement fills up precisely what
# is missing: $(1 - \text{rate}) \cdot \text{residual} = \max(p_t - p_d, 0)$.

# %%
p_V = torch.tensor([0.50, 0.30, 0.15, 0.05], dtype=torch.float64)
q_V = torch.tensor([0.25, 0.25, 0.30, 0.20], dtype=torch.float64)
laws.residual_picture(p_V, q_V, ["A", "B", "C", "D"])

# %%
index_1V = torch.arange(4)[None]
keep_V = rejection.accept_probs(p_V.expand(1, 4, 4), q_V.expand(1, 4, 4), index_1V)[0]
kept_V = q_V * keep_V
rate = float(kept_V.sum())
emitted_V = kept_V + (1 - rate) * rejection.residual_probs(p_V[None], q_V[None])[0]
tv = float((p_V - q_V).abs().sum() / 2)
print("p_t    ", p_V.tolist())
print("emitted", [round(value, 15) for value in emitted_V.tolist()])
print(f"accept rate {rate:.3f}, 1 - TV {1 - tv:.3f}")

# %% [markdown]
# ## A whole text, exactly
#
# One token is not the whole story: blocks, rollback and the bonus token must be right too. So we run the real loop
# on a target whose law is a table. Its random choices go through one object, and here that object tries every outcome
# in turn. Each path has a known chance; the chances of all paths that end in the same text add up to the law of the
# output, in float64. The wanted law is worked out apart, from the table alone.

# %%
target_table = TableTarget.random(3, order=2, seed=seed)
draft_table = TableTarget.random(3, seed=seed + 1)
scenario = cases.Scenario(name="here", target=target_table, draft=draft_table, gamma=gamma, length=length)
case = scenario.case(AutoregressiveDrafter(draft_table), sampled.sampling)
found, seen = exact_audit.exact_law(case)
wanted = scenario.law(sampled.sampling)
gap, worst = max_deviation(found, wanted)
print(f"{seen.runs} paths, {len(found)} texts; {seen.accepted} drafts accepted, {seen.rejected} rounds with a rejection")
print(f"largest difference of a text's chance: {gap:.1e}, at {worst}")

# %%
print(f"{'text':{3 * length + 2}} wanted        found")
for text in sorted(wanted, key=wanted.get, reverse=True)[:8]:
    print(f"{text!s:{3 * length + 2}} {wanted[text]:.10f}  {found[text]:.10f}")
print(f"{'all':{3 * length + 2}} {sum(wanted.values()):.10f}  {sum(found.values()):.10f}")

# %% [markdown]
# ## Other rules with the same law
#
# Greedy decoding is the same rule with $p_t$ one-hot. *Block verification* is another rule: it looks at the draft as a
# whole and lets a token that is likelier under the target than under the drafter make up for one that is less likely.
# A *tree* tries several candidates for a position, each against what the ones before it left over. Their output has
# the same law; the same walk says so.

# %%
honest = {"token-wise": total_variation(found, wanted)}
block_case = scenario.case(AutoregressiveDrafter(draft_table), sampled.sampling, "block")
block_found, block_seen = exact_audit.exact_law(block_case)
honest["block verification"] = total_variation(block_found, wanted)
tree = exact_audit.tree_row("truncated")
honest["tree of width 2 (fp32 model)"] = tree.value
print(honest)
print(f"tree: {tree.evidence}")

# %% [markdown]
# ## What block verification gains
#
# Here that is a sum, not an experiment. With $r_i = p_t(x_i) / p_d(x_i)$, drafts $1 \ldots k$ all survive with chance
# $\prod_i \min(1, r_i)$ token-wise, and with $w_k = \min(1, w_{k-1} r_k)$ by blocks. No lossless rule keeps them more
# often than $\min(1, \prod_i r_i)$: the target would otherwise write that text too often. With one draft all three
# are the same. What the two tables give is an example: how much there is to gain depends on the laws.

# %%
gains = {k: rule_gain(target_table, draft_table, [0], k, sampled.sampling) for k in draft_lengths}
for k, gain in gains.items():
    print(f"{k} drafts: token-wise {gain.token:.4f}, by blocks {gain.block:.4f} ({gain.share:+.2%}), "
          f"at most {gain.bound:.4f} tokens a round")
laws.gain_curves(gains, title="two random tables, temperature 1")

# %% [markdown]
# ## How it breaks: a length that looks at the token
#
# The drafter says A or B with chance 1/2 each, the target wants A in 70 %. Suppose that a draft is sent to the target
# only if it is A ("the drafter looks sure"), and that the target draws the token itself if it was B. A is kept
# always ($0.7 / 0.5 > 1$), and after a B that was thrown away the target still says A in 70 %: A comes out with
# $0.5 + 0.5 \cdot 0.7 = 0.85$. Whether a token is verified must not depend on that token.

# %%
coin = cases.Scenario(
    name="coin", target=cases.table([[7, 3]] * 2), draft=cases.table([[5, 5]] * 2), gamma=1, length=3
)
coin_case = coin.case(AutoregressiveDrafter(coin.draft), sampled.sampling)
leaking = {"honest": coin_case, "look-ahead": faults.with_drafter(faults.look_ahead)(coin_case)}
leak = {}
for name, one in leaking.items():
    coin_law, _ = exact_audit.exact_law(one)
    leak[name] = sum(chance for text, chance in coin_law.items() if text[1] == 0)
leak

# %% [markdown]
# ## How it breaks: every planted fault
#
# Each of these is planted in the real loop and walked through in the same way, under the sampler and on the tables
# where it shows. None of them crashes, and each still writes plausible text. The number is the total variation
# distance between the law of whole texts and the law they should have: 0 is right, 1 has nothing in common with it.

# %%
shown = [exact_audit.mutant_row(mutant, mutant.rules[0]) for mutant in planted]
gaps = honest | {row.subject: row.details["total_variation"] for row in shown}
for row in shown:
    print(f"{row.subject} ({row.settings}): {row.details['fault']}. Distance {row.details['total_variation']:.2g}, "
          f"{row.verdict}")

# %%
laws.law_gaps(gaps, tolerance=1e-6, title="whole texts: honest rules, then each fault")

# %% [markdown]
# Some faults move the law by less than a percent. No reader would notice, and sampling needs many texts to: that is
# why the audit (`dspec audit`) enumerates wherever it can. Others are caught before any law is compared: they use one
# random number for two decisions, and each number has an address.

# %%
drawn_twice = {row.subject: row.details["drawn_twice"] for row in shown if row.details["drawn_twice"]}
drawn_twice or "none of the faults chosen draws a number twice"

# %% [markdown]
# ## The real model, greedy
#
# 135 million parameters cannot be enumerated. At temperature 0 there is one right text, plain decoding's own, and the
# drafter here is often wrong, which is what puts the rule to the test.

# %%
tokenizer = load.load_tokenizer()
target = load.load_target(dtype=precision.dtype)
made = drafters.build_drafters(["prompt_lookup", "autoregressive"], target)
prompt = prompts.load_prompts("gsm8k_style", limit=1)[0]
ids = decode.encode_chat(tokenizer, prompt.turns)
plain = decode.generate(target, None, ids, greedy, tokenizer=tokenizer)
texts = {name: decode.generate(target, drafter, ids, greedy) for name, drafter in made.items()}
print(plain.text)

# %%
verdicts = {}
for name, text in texts.items():
    flip = equality.find_flip(target, ids, plain.token_ids, text.token_ids)
    verdicts[name] = equality.verdict([text], [flip])
    print(f"{name}: {text.num_accepted} of {text.num_proposed} drafts accepted, equal to plain: {verdicts[name]}")

# %% [markdown]
# ## The real model at temperature 1
#
# Here we can only sample, so we test one token, many times: the first token of a round, with the real laws of target
# and draft model, drafted and verified by the code that decoding uses. A chi-square test compares the counts with
# $p_t$; a p-value near 0 means another law. The same draws with the replacement taken from $p_t$ itself (a fault of
# above) show that the test can fail; of all places in the text above we take the one where that fault does most harm.

# %%
context = [*ids, *plain.token_ids[:-1]]
places = len(plain.token_ids)
draft_model = made["autoregressive"].model
both = [model.session(capacity=len(context)).extend(context, logit_rows=places) for model in (target, draft_model)]
p_NV, q_NV = [sampling.law(rows.logits_JV, sampled.sampling) for rows in both]
rate_N = acceptance.accept_rate(p_NV, q_NV)
faulty_NV = torch.minimum(p_NV, q_NV) + (1 - rate_N)[:, None] * p_NV
harm_N = (faulty_NV - p_NV).abs().sum(-1) / 2
at = int(harm_N.argmax())
p_1V, q_1V, real_rate = p_NV[at : at + 1], q_NV[at : at + 1], float(rate_N[at])
print(f"token {at + 1}: 1 - TV = {real_rate:.3f}; the fault moves {float(harm_N[at]):.3f} of the law")

# %%
right, wrong, num_accepted = Counter(), Counter(), 0
rows_JV = p_1V.expand(2, -1)  # row 1 is for the bonus token, which is not looked at
for index in range(draws):
    stream = streams.RandomStreams(seed, str(index))
    token = stream.categorical("draft", 0, 0, q_1V[0])
    result = rejection.verify(rows_JV, Proposal((token,), draft_probs_GV=q_1V), stream, 0)
    num_accepted += result.num_accepted
    right[token if result.num_accepted else result.next_token] += 1
    wrong[token if result.num_accepted else stream.categorical("replacement", 0, 0, p_1V[0])] += 1

# %%
law_of_p = {token: chance for token, chance in enumerate(p_1V[0].double().tolist()) if chance > 0}
test_right, test_wrong = goodness.chi_square([(right, law_of_p)]), goodness.chi_square([(wrong, law_of_p)])
print(f"accepted {num_accepted / draws:.3f} of {draws} drafts, 1 - TV is {real_rate:.3f}")
print(f"right rule: p = {test_right.p_value:.3g}; replacement from p_t: p = {test_wrong.p_value:.3g}")
print(f"chance to notice a law that is off by w = 0.2: {test_right.power(0.2, 1e-3):.3f}")

# %% [markdown]
# ## What was claimed

# %%
# one token: the parts add up, and the accept rate is 1 - TV
torch.testing.assert_close(emitted_V, p_V, rtol=0, atol=1e-15)
assert abs(rate - (1 - tv)) < 1e-15
# whole texts: exact for all rules, in runs that did accept and reject; blocks keep at least as much
assert gap < 1e-12 and honest["token-wise"] < 1e-12 and honest["block verification"] < 1e-12
assert tree.verdict == "pass" and seen.missing is None and block_seen.missing is None
assert all(gain.token <= gain.block + 1e-12 <= gain.bound + 2e-12 for gain in gains.values())
# every planted fault is found, and each does change the law
assert all(row.verdict == "FAIL" and gaps[row.subject] > 1e-5 for row in shown), gaps
assert abs(leak["honest"] - 0.7) < 1e-12 and abs(leak["look-ahead"] - 0.85) < 1e-12
# the real model: greedy texts equal; first tokens follow p_t, and the test sees the wrong rule
allowed = (True, "inconclusive") if precision.name == "fp32" else (True, "inconclusive", "near_tie")
assert all(value in allowed for value in verdicts.values()), verdicts
assert test_right.p_value > 1e-3 and test_wrong.p_value < 1e-6
assert abs(num_accepted / draws - real_rate) < 4 * (real_rate * (1 - real_rate) / draws) ** 0.5 + 1e-9
