# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 06 Train a drafter
#
# **Question.** What does it take to teach a small model to guess what the target will say?
#
# **Claim.** The target's own answers, its hidden states over them, and a loss that measures what the verifier will do:
# $1 - \mathrm{TV}$ is the chance of acceptance, so total variation is trained directly. A minute or two on two cores
# takes a drafter from nothing to first guesses that are accepted now and then; the rest is data and time.

# %% tags=["parameters"]
num_sequences: int = 48  # answers of the target to learn from
max_tokens: int = 192  # longer ones are cut
steps: int = 120  # optimiser steps
num_layers: int = 1
block_size: int = 4  # tokens proposed in a round
first_share: float = 0.5  # share of the run that trains two positions only
max_new_tokens: int = 48  # of the texts decoded at the end
seed: int = 0

# %%
import tempfile
from pathlib import Path

import torch

from dspec_lab.checkpoints.drafters import as_drafter, open_drafter
from dspec_lab.config import DecodeConfig
from dspec_lab.core.acceptance import acceptance_stats
from dspec_lab.core.files import data_dir, read_json
from dspec_lab.evaluation.equality import find_flip, verdict
from dspec_lab.evaluation.prompts import load_prompts
from dspec_lab.models import fetch, load
from dspec_lab.plots import position, training
from dspec_lab.training import anchors, build, corpus, data, fit, progress, responses, train_config
from dspec_lab.verifier.decode import encode_chat, generate

# %%
config = train_config.default_config(
    "dspark", num_layers=num_layers, block_size=block_size, target_layer_ids=(14, 27), markov_rank=32,
    draft_vocab_size=8192, vocab_certain=1024, vocab_drawn=512, steps=steps, first_slots=2, first_share=first_share,
    first_anchors=32, anchors_per_sequence=16, max_tokens=max_tokens, learning_rate=1e-3, features="cache",
    validation_share=0.2, validation_sequences=6, validate_every=40, on_policy_prompts=0, seed=seed, mask_token_id=16,
)
greedy = DecodeConfig(gamma=block_size, max_new_tokens=max_new_tokens)
if num_sequences < 16:
    raise ValueError(f"num_sequences must be at least 16, got {num_sequences}")

# %% [markdown]
# ## Data: what the target says
#
# A drafter has to guess this target, not good English, so it learns from the target's own answers, greedy and sampled.
# Those here come from the project's own prompt generators; `dspec train responses` makes more of them.

# %%
tokenizer = load.load_tokenizer()
target = load.load_target(dtype=torch.float32)
answers = responses.read_responses(data_dir() / "responses" / "own_small.parquet")
chosen = answers[:: max(len(answers) // num_sequences, 1)][:num_sequences]
print(f"{len(chosen)} answers, response tokens by domain: {responses.count_tokens(chosen)}")
print(tokenizer.decode(chosen[0].prompt_ids.tolist()[-24:]), tokenizer.decode(chosen[0].response_ids.tolist()[:40]))

# %% [markdown]
# ## Features and anchors
#
# The target reads each answer once. Two of its layers and its last hidden state are kept; the laws $p_t$ are computed
# from the latter where they are needed. In every step some positions are drawn as *anchors*. A block starts at each:
# it sees the context before its anchor and itself, nothing else, so many blocks are trained in one pass.

# %%
ending = data.generation_prompt(tokenizer)
part = data.build_sequences(chosen, max_tokens=max_tokens, vocab_size=target.vocab_size, ends_prompt=ending)
reader = corpus.feature_reader(config, target, build.tapped_layers(config, target))
folder = Path(tempfile.mkdtemp())
texts = corpus.Corpus([part], reader, config, cache=folder / "features")
draw = torch.Generator().manual_seed(seed)
drawn = anchors.sample_anchors(texts.loss_mask(texts.training[:1]), 6, draw)
print(f"{len(texts.training)} training and {len(texts.validation)} held-out answers")
print(f"anchors of one step in one answer: {drawn.positions_BA[0].tolist()}")

# %% [markdown]
# ## Training
#
# The draft layer starts as a copy of the target's last one. The first part of the run trains two positions only: most of the gain lies there, and short blocks are cheap.

# %%
log = progress.StepLog()
target_config = read_json(fetch.ensure_smollm2() / "config.json")
trained = fit.fit(config, target, target_config, texts, folder, display=log)
state = trained.state
print(f"{state.step} steps, {state.anchors} blocks, {state.seconds:.0f} s, {torch.get_num_threads()} threads")

# %%
training.training_course(log.steps, log.validations, title=f"DSpark, {num_layers} layer, block {block_size}")

# %% [markdown]
# ## What the verifier makes of it
#
# Acceptance on given texts is one thing; the drafter's use is what it does in decoding. The prompts are others than
# those of the training. Beside it the same drafter before the first step.

# %%
ids = [encode_chat(tokenizer, prompt.turns[:1]) for prompt in load_prompts("chat", 2) + load_prompts("code", 1)]
fresh = fit.Run(config, target, target_config, texts, folder / "new", None, None).model
before = as_drafter(fresh, name="untrained")
made = {"untrained": before, "trained": open_drafter(trained.checkpoint, target, name="trained")}
plain = [generate(target, None, prompt, greedy) for prompt in ids]
runs = {name: [generate(target, drafter, prompt, greedy) for prompt in ids] for name, drafter in made.items()}
stats = {name: acceptance_stats([r for run in done for r in run.rounds]) for name, done in runs.items()}
for name, row in stats.items():
    print(f"{name}: accepted length {row.accepted_length:.2f} over {row.rounds} rounds")

# %%
position.acceptance_by_position(stats, title="greedy decoding of prompts not trained on")

# %% [markdown]
# A drafter of a minute is no drafter to use. The full recipe is `data/recipes/smollm2_dspark.yaml`; its result lies in
# `data/checkpoints/smollm2/dspark` with a card that says what it took. To train it again:
# `dspec train dspark --responses FILE... --config data/recipes/smollm2_dspark.yaml --out runs/dspark`.

# %% [markdown]
# ## What was claimed

# %%
first, last = log.validations[0]["all"], log.validations[state.step]["all"]
flips = [
    [find_flip(target, p, a.token_ids, b.token_ids) for p, a, b in zip(ids, plain, runs[name])] for name in made
]
# acceptance on held-out prompts rises, at the first position most
assert last["accept_rate"][0] > first["accept_rate"][0] + 0.05, (first, last)
assert last["tau"] > first["tau"] + 0.05
# so does what the verifier accepts, and the text stays the target's own
assert stats["trained"].accepted_length > stats["untrained"].accepted_length
assert verdict(runs["trained"], flips[1]) is True
assert all(verdict(runs[name], flip) in (True, "inconclusive") for name, flip in zip(made, flips))
