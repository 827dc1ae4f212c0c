# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 07 Confidence
#
# **Question.** Does the drafter know when it is wrong, and what is that knowledge worth?
#
# **Claim.** Its confidence tells good drafts from bad ones, though less well than the paper's. What it is off by is
# little, and mostly a bias: no temperature (the paper's map) takes it away, a slope with a bias (Platt) does. No map of
# it can mend the telling apart; at temperature 0 the entropy of the draft's own law can. Cutting blocks where survival is unlikely then trades
# rejected drafts for tokens; the best threshold depends on what a verified row costs.
#
# The confidence $c_k$ is the chance that draft $k$ survives given that all before it did; survival is
# $a_k = \prod_{i \le k} c_i$. Sequential temperature scaling (STS) goes through $k = 1 \ldots \gamma$ and searches
# the temperature of $c_k$ that minimises the calibration error (ECE) of $a_k$, earlier positions fixed.

# %% tags=["parameters"]
trace_files: list = []  # names in data/traces; all of them when empty
drafter: str = "dspark"
temperature: float = 1.0  # sampling temperature of the trace
greedy_temperature: float = 0.0  # of the trace in the section on a second signal
many_rounds: str = "fresh/dspark_chat_T0.parquet"  # in data/traces, with rounds enough of one domain
held_out: float = 0.5  # share of prompts to judge on
seed: int = 0
synthetic_rounds_count: int = 20000
resamples: int = 400  # of the intervals over prompts
positions: list = [1, 3, 5, 7]  # of the reliability diagrams, as far as the drafter has them

# %%
from dspec_lab.calibration import calibration as fits
from dspec_lab.calibration.drift import drift_warnings
from dspec_lab.calibration.held_out import domain_scores
from dspec_lab.calibration.records import read_rounds, trace_paths
from dspec_lab.calibration.score import mean_error
from dspec_lab.calibration.signals import signal_areas
from dspec_lab.calibration.split import split_by_prompt
from dspec_lab.calibration.synthetic import synthetic_rounds
from dspec_lab.evaluation import thresholds
from dspec_lab.evaluation.paper import paper_table
from dspec_lab.plots.calibration import errors_figure, reliability_figure
from dspec_lab.plots.held_out import held_out_figure
from dspec_lab.plots.thresholds import threshold_figure
from dspec_lab.serving.presets import recorded_cpu_table
from dspec_lab.widgets.confidence_panels import ReliabilityPanel, ThresholdPanel

# %%
paths = trace_paths(trace_files)
options = {"held_out": held_out, "seed": seed, "resamples": resamples}
rounds = read_rounds(paths, drafter=drafter, temperature=temperature)
shown = [k for k in positions if 1 <= k <= rounds.widest]
if not shown or synthetic_rounds_count < 1000:
    raise ValueError(f"need a position in 1..{rounds.widest} and 1000 synthetic rounds, got {positions}, "
                     f"{synthetic_rounds_count}")
fit, judge = split_by_prompt(rounds, held_out=held_out, seed=seed)
print(f"{len(fit)} rounds of {len(fit.prompts)} prompts to fit, {len(judge)} of {len(judge.prompts)} to judge")

# %% [markdown]
# ## Where the truth is known
#
# Made-up rounds whose stated confidences are distorted by known temperatures. The fit must find them, and the held-out
# error must fall to what chance alone leaves.

# %%
truth = (2.0, 1.6, 0.7, 1.3, 2.4)
known = synthetic_rounds(synthetic_rounds_count, truth, prompts=120, seed=seed)
recovered = fits.fit_calibration(known, **options)
for k, (wanted, found) in enumerate(zip(truth, recovered.maps), 1):
    before, after = recovered.before[k - 1].ece, recovered.after[k - 1].ece
    print(f"position {k}: temperature {found.temperature:.2f} (made with {wanted}), ECE {before:.3f} -> {after:.3f}")

# %% [markdown]
# ## The drafter's own confidences
#
# The same on recorded rounds; those at temperature 1 are of the head before its training on unseen texts. Judged on prompts that the fit has not seen; fitting and judging on a shared prompt is
# refused. The dotted floor is the error that perfect chances would show with so few rounds.

# %%
fitted = fits.fit_calibration(rounds, **options)
errors_figure(fitted.before, fitted.after, paper=paper_table("fig6_summary"), title=f"{drafter}, T = {temperature:g}")

# %%
after = fitted.apply(judge)
reliability_figure(judge, after, shown, paper=paper_table("fig6_reliability"), title="held-out prompts")

# %% [markdown]
# A temperature cannot move a confidence of one half. Where a head is biased, Platt scaling (slope and bias) or an
# isotonic map can do more; with few rounds they can also do worse, and a position with too few verdicts takes the map
# of the one before it. All three keep the order at a position.

# %%
calibrations, mean_errors = {"temperature": fitted}, {"none": mean_error(list(fitted.before))}
mean_errors["temperature"] = mean_error(list(fitted.after))
for method in ("platt", "isotonic"):
    calibrations[method] = fits.fit_calibration(rounds, method, **options)
    mean_errors[method] = mean_error(list(calibrations[method].after))
print({name: round(value, 4) for name, value in mean_errors.items()})
print("drift of the held-out half against the fit:", drift_warnings(fitted, judge) or "none")

# %% [markdown]
# ## Domain by domain
#
# Half of the prompts of one domain leave few rounds to judge, and twenty bins of few rounds show an error by chance
# alone. So here every prompt is judged once, by maps fitted on the other folds of prompts. Beside it, what the verdict
# on the first draft could be told by: the confidence, the entropy of the draft's law, both in a fitted regression, and
# the known chance $1 - TV$, which takes the target's law and is as well as anything before the draw can do.

# %%
by_domain = [score for method in calibrations
             for score in domain_scores(rounds, method, seed=seed, resamples=resamples)]
areas = signal_areas(rounds, seed=seed, resamples=resamples)
for score in by_domain:
    before, after = score.mean_before, score.mean_after
    print(f"{score.domain}, {score.method}: mean ECE {100 * before.estimate:.2f} -> {100 * after.estimate:.2f} % "
          f"[{100 * after.low:.2f}, {100 * after.high:.2f}]; {'; '.join(score.unmet()) or 'all goals met'}")
held_out_figure(by_domain, areas, title=f"{drafter}, T = {temperature:g}")

# %% [markdown]
# The paper reports an AUROC of 0.81 to 0.90 on a 4B target. A head is a linear map of what the draft layers know, and
# these layers were trained for about two hours on two cores.

# %% [markdown]
# ## A second signal
#
# At temperature 0 a draft is right or wrong, and a drafter torn between tokens is often wrong: the entropy $H_k$ of its
# law then tells more than the head, which as a linear map must guess it. An *entropy map* reads both,
# $\mathrm{sigmoid}(s \, \mathrm{logit} \, c_k - w H_k + b)$. It may reorder drafts, which no map of $c_k$ alone can. $H_k$ is
# that of the law before the draw, a function of the drafts before $k$, so a block cut by it stays lossless.

# %%
greedy = read_rounds(paths, drafter=drafter, temperature=greedy_temperature)
greedy_scores = [score for method in ("temperature", "entropy")
                 for score in domain_scores(greedy, method, seed=seed, resamples=resamples)]
greedy_areas = signal_areas(greedy, seed=seed, resamples=resamples)
for score in greedy_scores:
    told = " ".join("-" if s.auroc is None else f"{s.auroc:.2f}" for s in score.after if s.position)
    print(f"{score.domain}, {score.method}: mean ECE {100 * score.mean_before.estimate:.2f} -> "
          f"{100 * score.mean_after.estimate:.2f} % (floor {100 * score.mean_after.floor:.2f}), AUROC at 1, 2, ...: {told}")
held_out_figure(greedy_scores, greedy_areas, title=f"{drafter}, T = {greedy_temperature:g}")

# %% [markdown]
# ## Rounds enough to see the error
#
# On the bundled prompts most of the error is the *floor*: what perfect chances would show with so few rounds. A recorded
# trace of many more chat prompts, none of which occurs in the training data, shows what a map is worth there.

# %%
many = read_rounds(trace_paths([many_rounds]), drafter=drafter, temperature=greedy_temperature)
many_scores = [score for method in ("platt", "entropy")
               for score in domain_scores(many, method, seed=seed, resamples=resamples)]
print(f"{len(many)} rounds of {len(many.prompts)} prompts, {', '.join(many.domains)}")
for score in many_scores:
    told = " ".join(f"{s.auroc:.2f}" for s in score.after if s.position)
    print(f"{score.method}: mean ECE {100 * score.mean_before.estimate:.2f} -> {100 * score.mean_after.estimate:.2f} % "
          f"(floor {100 * score.mean_after.floor:.2f}), AUROC at 1, 2, ...: {told}; "
          f"{'; '.join(score.unmet()) or 'all goals met'}")

# %% [markdown]
# ## Try it: reliability

# %%
panel = ReliabilityPanel(judge, calibrations, paper=paper_table("fig6_reliability"))
panel

# %%
panel.static()

# %% [markdown]
# ## What a threshold does
#
# A block is cut before the first draft whose survival falls below the threshold. Whether draft $k$ is verified then
# depends on the drafts before it alone, so the output law stays the target's. Recorded whole blocks are cut after the
# fact; the speed uses the times of the trace, and of the measured cost table how a pass over fewer rows compares.

# %%
method = min(calibrations, key=mean_errors.get)
after = calibrations[method].apply(judge)
print(f"calibrated by {method}, the map of the least error")
cost = thresholds.recorded_cost(judge, recorded_cpu_table())
sweep = thresholds.threshold_sweep(after, cost=cost)
best = thresholds.best_threshold(sweep)
threshold_figure(sweep, chosen=best.threshold, paper=paper_table("fig5_threshold_sweep"), domain="chat")

# %%
for domain in after.domains:
    mine = thresholds.threshold_sweep(after.of_domain(domain), cost=cost)
    top = thresholds.best_threshold(mine)
    print(f"{domain}: best threshold {top.threshold:.2f}, {top.tokens_per_s:.1f} tokens/s (whole blocks "
          f"{mine[0].tokens_per_s:.1f}); gained per row sent {mine[0].verify_rate:.2f} -> {top.verify_rate:.2f}")

# %% [markdown]
# ## Try it: threshold

# %%
sweep_panel = ThresholdPanel({"calibrated": after, "raw": judge}, cost=cost, paper=paper_table("fig5_threshold_sweep"))
sweep_panel

# %%
sweep_panel.static()

# %% [markdown]
# ## What was claimed

# %%
# known temperatures are found, and the held-out error of each position falls to 2 % or what chance leaves
assert all(abs(m.temperature / t - 1) < 0.2 for m, t in zip(recovered.maps, truth))
assert all(score.ece <= max(0.02, 1.5 * score.ece_floor) for score in recovered.after)
# on the drafter the best map's mean error over positions is at most 2 % and three quarters of before; temperatures do
# less
lowest = min(error for name, error in mean_errors.items() if name != "none")
assert lowest <= 0.02 and lowest <= 0.75 * mean_errors["none"], mean_errors
assert mean_errors["platt"] < mean_errors["temperature"], mean_errors

# %%
# on held-out chat alone, Platt maps leave at most 2 % and less than before; all maps keep the order
chat = {score.method: score for score in by_domain if score.domain == "chat"}
assert chat["platt"].mean_after.estimate <= min(0.02, chat["platt"].mean_before.estimate)
assert chat["temperature"].mean_after.estimate > chat["platt"].mean_after.estimate
assert all(score.order_kept for score in by_domain)
# at the first draft of chat the entropy adds little to the confidence, and both stay far below the ceiling
area = {a.signal: a.auroc for a in areas if (a.domain, a.position) == ("chat", 1)}
assert area["both"] < area["confidence"] + 0.03 < area["chance"] - 0.05, area

# %%
# greedy, both signals together tell survivors from others at every position of every domain; the head alone does not
joint = {score.domain: score for score in greedy_scores if score.method == "entropy"}
alone = {score.domain: score for score in greedy_scores if score.method == "temperature"}
known = {domain: [s.auroc for s in score.after if s.position and s.auroc is not None] for domain, score in joint.items()}
assert all(area >= 0.75 for areas in known.values() for area in areas), known
assert all(joint[domain].after[0].auroc > alone[domain].after[0].auroc + 0.03 for domain in joint)
assert joint["chat"].mean_after.estimate <= 0.02, joint["chat"].mean_after

# %%
# with rounds enough Platt maps meet every goal: at most 2 % and half of before, AUROC 0.75 at each position, order kept
assert not many_scores[0].unmet(), many_scores[0].unmet()

# %%
# confidences tell survivors from others, and calibration keeps the order of the first position
assert all(score.auroc is None or score.auroc > 0.5 for score in fitted.after if score.position)
assert abs(fitted.before[0].auroc - fitted.after[0].auroc) < 1e-6
# a higher threshold sends and rejects less; the best one is at least as fast as whole blocks
assert all(a.rejected >= b.rejected and a.accepted >= b.accepted for a, b in zip(sweep, sweep[1:]))
assert best.tokens_per_s >= sweep[0].tokens_per_s
