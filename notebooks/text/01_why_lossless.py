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
# mistakes in the rule, all met in practice, give a wrong law although the text still reads well.

# %% tags=["parameters"]
gamma: int = 2  # drafted tokens per round, in the enumeration
length: int = 4  # tokens of a whole text, in the enumeration
seed: int = 3  # of the two random tables
mutant_names: list = ["residual without q", "bonus from q", "greedy match", "KV off by one"]
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
from dspec_lab.verifier import cases, decode, exact_audit, goodness, mutants
from dspec_lab.verifier.enumerate import max_deviation, total_variation

# %%
greedy = DecodeConfig(gamma=5, max_new_tokens=max_new_tokens, temperature=0.0)
sampled = DecodeConfig(gamma=gamma, max_new_tokens=length, temperature=1.0, seed=seed)
precision = load.choose_dtype(dtype)
planted = [mutant for mutant in mutants.MUTANTS if mutant.name in mutant_names]
if len(planted) != len(mutant_names):
    raise ValueError(f"mutants are {[mutant.name for mutant in mutants.MUTANTS]}, got {mutant_names}")
if draws < 100:
    raise ValueError(f"draws must be at least 100, got {draws}")

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
# Greedy decoding is the same rule with $p_t$ one-hot, and *block verification* is another rule with the same law that
# keeps at least as many drafts. Both pass the same walk.

# %%
honest = {"token-wise": total_variation(found, wanted)}
block_case = scenario.case(AutoregressiveDrafter(draft_table), sampled.sampling, "block")
block_found, block_seen = exact_audit.exact_law(block_case)
honest["block verification"] = total_variation(block_found, wanted)
honest

# %% [markdown]
# ## How it breaks
#
# Each of these faults is planted in the same loop and walked through in the same way. None of them crashes, and
# each still writes plausible text.

# %%
gaps = dict(honest)
for mutant in planted:
    settings = cases.SAMPLERS[mutant.sampler]
    faulty = mutant.plant(scenario.case(AutoregressiveDrafter(draft_table), settings))
    law_of_fault, _ = exact_audit.exact_law(faulty, follow_shared=True)
    gaps[mutant.name] = total_variation(law_of_fault, scenario.law(settings))
    print(f"{mutant.name}: {mutant.fault}")

# %%
laws.law_gaps(gaps, tolerance=1e-12, title=f"texts of {length} tokens, gamma {gamma}, temperature 1")

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
# whole texts: exact for both rules, in runs that did accept and reject; every planted fault is far off
assert gap < 1e-12 and all(value < 1e-12 for value in honest.values())
assert seen.missing is None and block_seen.missing is None
assert all(gaps[name] > 1e-3 for name in mutant_names), gaps
# the real model: greedy texts equal; first tokens follow p_t, and the test sees the wrong rule
allowed = (True, "inconclusive") if precision.name == "fp32" else (True, "inconclusive", "near_tie")
assert all(value in allowed for value in verdicts.values()), verdicts
assert test_right.p_value > 1e-3 and test_wrong.p_value < 1e-6
assert abs(num_accepted / draws - real_rate) < 4 * (real_rate * (1 - real_rate) / draws) ** 0.5 + 1e-9
