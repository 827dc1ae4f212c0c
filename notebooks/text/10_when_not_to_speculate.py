# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 10 When not to speculate
#
# **Question.** Is speculation worth it here: on this machine, for these texts, at this load?
#
# **Claim.** A round pays if it gains more tokens than it costs in plain tokens. Machine, load and drafter set what it
# costs, the texts what it gains. So no drafter is worth the same everywhere, the answer has to be measured, and an
# honest answer has an interval and may be no.

# %% tags=["parameters"]
drafter_names: list = ["dspark", "prompt_lookup"]  # measured now
samples: int = 6  # prompts, domains in turn
max_new_tokens: int = 48
repeats: int = 2  # timed runs
loads: list = [1, 2, 4, 8, 16]  # requests in the batch
record: str = "dspark_cpu.json"  # of dspec eval, in data/profiles

# %%
import numpy as np

from dspec_lab.config import DecodeConfig
from dspec_lab.core.files import data_dir, read_json
from dspec_lab.evaluation import drafters, evaluate, prompts, report, worth
from dspec_lab.models import load
from dspec_lab.plots import scheduling
from dspec_lab.plots import worth as figures
from dspec_lab.scheduler import break_even
from dspec_lab.serving.presets import recorded_cpu_table
from dspec_lab.widgets.worth_panel import WorthPanel

# %%
run = DecodeConfig(max_new_tokens=max_new_tokens, temperature=0.0)
names = drafters.check_names(drafter_names)
chosen = prompts.load_prompts("all", samples)
if len(loads) < 2 or sorted(loads) != loads or loads[0] != 1:
    raise ValueError(f"two or more rising loads from 1 on, got {loads}")

# %% [markdown]
# ## What a round costs
#
# A round takes $T_d + T_v(B)$: drafting, and a pass of the target over $B$ rows. Plain decoding gains one token in
# $T_v(1)$. Below: the recorded pass of this project's CPU. A pass over 8 rows takes less than 8 passes over one, which
# is all that speculation lives on; once a batch has many rows, each further row costs as much as it may bring.

# %%
table = recorded_cpu_table()
plain_s = float(table.round_s_N(1, 0)[0])
print(f"{table.name}: plain decoding {1e3 * plain_s:.1f} ms a token")
scheduling.cost_figure({"this CPU": table}, title="one pass of the target, recorded")

# %% [markdown]
# ## The verdict, from a record
#
# `dspec eval` prints it below its table. The speed-up is that of all prompts of a set together. The interval comes from
# drawing prompts anew, because what differs most is texts, and is widened by the scatter of the timed repeats. Where
# it holds 1, nothing is settled. Where it lies below, the advice is to switch off.

# %%
recorded = worth.read_eval_rows(read_json(data_dir() / "profiles" / record))
found = worth.worth_rows(recorded)
for line in worth.worth_words(found):
    print("-", line)

# %%
figures.worth_figure(found, title=f"from {record}")

# %% [markdown]
# ## Break-even
#
# With a steady chance $a$ of each draft, $n$ drafts gain $1 + a + \ldots + a^n$ tokens. Which $a$ is enough depends on
# what drafting costs and on how many requests share the pass. The map takes the best $n$ everywhere. Marks are the
# recorded drafter by prompt set, at the $a$ that gives its accepted length and at its measured time of drafting. They
# bear the verdict on whole blocks, so a "no" (cross) may lie above the line: a shorter block would pay there.

# %%
maps = [break_even.break_even_map(table, requests=n) for n in loads if 2 * n <= table.last_row]
mine = [row for row in recorded if row.drafter == recorded[0].drafter]
answers = {entry.prompts_of: entry.answer for entry in found if entry.drafter == recorded[0].drafter}
marks = {}
for row in mine:
    accept = break_even.acceptance_of(row.accepted_length, row.gamma)
    answer = answers.get(row.benchmark, "unsettled")
    marks[row.benchmark.removesuffix("_style")] = (accept, 1e-3 * row.draft_ms, answer)

# %%
figures.break_even_figure(maps, points=marks, title=f"{mine[0].drafter} on the map of this CPU")

# %%
for entry in maps:
    needed = [np.interp(share * plain_s, entry.draft_s_Q, entry.break_even_Q) for share in (0.0, 0.25, 0.5)]
    words = ["never" if np.isnan(a) else f"{a:.2f}" for a in needed]
    print(f"{entry.requests:3} requests: acceptance needed {words[0]} with free drafts, {words[1]} where a block costs "
          f"a quarter of a plain token, {words[2]} where it costs half")

# %% [markdown]
# ## Now, on your machine
#
# The same verdict for a few prompts. So few give a wide interval: `dspec eval --prompts all --samples 27` takes more.

# %%
tokenizer, target = load.load_tokenizer(), load.load_target()
made = drafters.build_drafters(names, target)
rows = evaluate.evaluate(target, tokenizer, made, chosen, run, repeats=repeats)
here = worth.worth_rows(rows)
for line in worth.worth_words(here):
    print("-", line)

# %%
whole = [entry for entry in here if entry.prompts_of in ("all", "math", "code", "chat")]
figures.worth_figure(whole, title=f"{len(chosen)} prompts, now")

# %%
report.eval_table(rows, target.name)

# %% [markdown]
# ## Try it
#
# A drafter of your own: how often is a draft accepted, what does a block cost, how many requests share the batch?

# %%
panel = WorthPanel(table, loads=loads, points=marks)
panel

# %%
panel.static()

# %% [markdown]
# ## What was claimed

# %%
# a set of prompts is faster exactly where a round gains more than it costs, and verdicts follow their intervals
for entry in [*found, *here]:
    assert (entry.speedup > 1) == (entry.accepted_length > entry.break_even_length), entry
    assert entry.answer != "yes" or entry.low > 1
    assert entry.answer != "no" or entry.high < 1
# the same drafter is not worth the same everywhere
assert max(e.speedup for e in found) > 1.2 * min(e.speedup for e in found)
# the advice is given where the answer is no
for line in worth.worth_words([*found, *here]):
    assert ("NOT worth it" in line) == ("Switch it off here" in line), line

# %%
# dearer drafts never ask for less acceptance, and a full batch asks for more than an empty one
for entry in maps:
    known = entry.break_even_Q[~np.isnan(entry.break_even_Q)]
    assert (np.diff(known) >= 0).all()
first, last = maps[0].break_even_Q[0], maps[-1].break_even_Q[0]
assert np.isnan(last) or last > first
# and every text is plain decoding's own
assert all(row.outputs_equal_plain is not False for row in rows)
