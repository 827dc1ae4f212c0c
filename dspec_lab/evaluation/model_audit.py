"""The audit's checks on a real model: greedy text equals plain decoding's, and sampled text follows the model's law."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspec_lab.config import VERIFICATIONS, DecodeConfig, Verification
from dspec_lab.core.sampling import law
from dspec_lab.core.streams import RandomStreams
from dspec_lab.core.types import Generation
from dspec_lab.drafters.protocol import Drafter
from dspec_lab.evaluation.drafters import build_drafters
from dspec_lab.evaluation.equality import Flip, find_flip, verdict
from dspec_lab.models.protocol import Target
from dspec_lab.verifier.audit_report import AuditRow, Outcome, Seen
from dspec_lab.verifier.cases import AuditCase
from dspec_lab.verifier.exact_audit import seen_in
from dspec_lab.verifier.goodness import chi_square
from dspec_lab.verifier.mutants import MUTANTS, Mutant

# text that repeats itself in part, so that every drafter is right at times and wrong at times
PROMPTS = (
    "Write the list of months from January to June, one per line, then write the same list again in reverse order.",
    "Write a Python function that returns the sum of the squares of a list, and a second one for the cubes.",
)
ALPHA = 1e-4
EFFECT_NATS = 0.8  # the shift of the mean surprisal for which the power is stated
BINS = 10
SAMPLED_GAMMA = 2  # at temperature 1 few drafts come further, and drafting is what takes the time
REAL_MUTANTS = ("KV off by one", "greedy match")

Job = Callable[[], AuditRow]


class ModelChecks:
    """Checks of one target in one dtype; `load` is called when the first of them runs."""

    def __init__(
        self,
        load: Callable[[], Target],
        dtype: str,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        seed: int,
    ) -> None:
        self._load, self._dtype, self._prompts, self._seed = load, dtype, [tuple(ids) for ids in prompts], seed
        self._greedy = DecodeConfig(gamma=4, max_new_tokens=max_new_tokens, ignore_eos=True, seed=seed)
        self._target: Target | None = None
        self._drafters: dict[str, Drafter] = {}
        self._plain: list[Generation] = []

    @property
    def target(self) -> Target:
        """The model, loaded once."""
        if self._target is None:
            self._target = self._load()
        return self._target

    def drafter(self, name: str) -> Drafter:
        """The drafter of that name for the target, made once."""
        if name not in self._drafters:
            self._drafters |= build_drafters([name], self.target)
        return self._drafters[name]

    def plain(self) -> list[Generation]:
        """Plain greedy decoding of the prompts."""
        if not self._plain:
            self._plain = self._run(self._case(None, self._greedy))
        return self._plain

    def greedy_row(self, name: str, mutant: Mutant | None = None) -> AuditRow:
        """Greedy text with a drafter against plain decoding, token for token; a flip is measured."""
        start = time.perf_counter()
        case = self._case(self.drafter(name), self._greedy)
        runs = self._run(mutant.plant(case) if mutant else case)
        flips = [
            find_flip(self.target, plain.prompt_ids, plain.token_ids, run.token_ids)
            for plain, run in zip(self.plain(), runs, strict=True)
        ]
        found = verdict(runs, flips)
        seen = sum((seen_in(run) for run in runs), Seen())
        words: dict[object, Outcome] = {True: "pass", "near_tie": "pass", "inconclusive": "inconclusive"}
        return AuditRow(
            check="planted fault" if mutant else "greedy text",
            subject=f"{mutant.name} ({name})" if mutant else name,
            settings=f"{self.target.name}, T=0, {self._dtype}",
            verdict=words.get(found, "FAIL"),
            expected="FAIL" if mutant else "pass",
            evidence=_flip_words(flips, seen),
            value=max((abs(flip.gap) for flip in flips if flip), default=0.0),
            limit=max((flip.tolerance for flip in flips if flip), default=0.0),
            seen=seen,
            details={"outputs_equal_plain": found, "fault": mutant.fault if mutant else None},
            wall_s=time.perf_counter() - start,
        )

    def sampled_row(self, name: str, rule: Verification, mutant: Mutant | None = None) -> AuditRow:
        """Sampled tokens at T = 1, each against the model's law after the text before it. Two tests share ALPHA.

        A token's place in its law (mass of the likelier tokens, plus a random part of its own) is uniform whatever the
        law is, so all tokens of all texts share one chi-square test over equal bins of it. Its surprisal has the law's
        entropy as its mean: a law that is too sharp or too flat moves the sum.
        """
        start = time.perf_counter()
        config = replace(
            self._greedy, gamma=SAMPLED_GAMMA, temperature=1.0, verification=rule,
            max_new_tokens=2 * self._greedy.max_new_tokens,
        )  # fmt: skip
        case = self._case(self.drafter(name), config)
        runs = self._run(mutant.plant(case) if mutant else case)
        noise = np.random.default_rng(self._seed)
        counts, excess_nats, variance = Counter[int](), 0.0, 0.0
        for run in runs:
            probs_JV, ids_J1 = self._laws(run, config)
            places_J = places(probs_JV, ids_J1, torch.tensor(noise.random(len(run.token_ids))))
            counts.update((places_J * BINS).long().clamp(max=BINS - 1).tolist())
            more_nats, more_variance = surprisal_excess(probs_JV, ids_J1)
            excess_nats, variance = excess_nats + more_nats, variance + more_variance
        test = chi_square([(counts, {index: 1 / BINS for index in range(BINS)})])
        surprisal = MeanTest(excess_nats, variance, test.samples)
        seen = sum((seen_in(run) for run in runs), Seen())
        p_value = min(1.0, 2 * min(test.p_value, surprisal.p_value))
        return AuditRow(
            check="planted fault" if mutant else "sampled text",
            subject=f"{mutant.name} ({name})" if mutant else name,
            settings=f"{self.target.name}, T=1, {rule}, {self._dtype}, {test.samples} tokens",
            verdict="FAIL" if p_value < ALPHA else "inconclusive" if seen.missing else "pass",
            expected="FAIL" if mutant else "pass",
            evidence=f"p {p_value:.2g}; mean surprisal {surprisal.excess:+.2f} nats from the law's entropy; "
            f"{EFFECT_NATS} nats would show with chance {surprisal.power(EFFECT_NATS, ALPHA / 2):.2f}",
            value=p_value,
            limit=ALPHA,
            seen=seen,
            details={
                "fault": mutant.fault if mutant else None,
                "bin_counts": [counts[index] for index in range(BINS)],
                "places_p_value": test.p_value,
                "surprisal_p_value": surprisal.p_value,
                "surprisal_excess_nats": surprisal.excess,
                "effect_nats": EFFECT_NATS,
                "power": surprisal.power(EFFECT_NATS, ALPHA / 2),
            },
            wall_s=time.perf_counter() - start,
        )

    def _case(self, drafter: Drafter | None, config: DecodeConfig) -> AuditCase:
        return AuditCase(target=self.target, drafter=drafter, prompt_ids=self._prompts[0], config=config)

    def _run(self, case: AuditCase) -> list[Generation]:
        return [
            replace(case, prompt_ids=ids).generation(RandomStreams(self._seed, f"model {index}"))
            for index, ids in enumerate(self._prompts)
        ]

    def _laws(self, run: Generation, config: DecodeConfig) -> tuple[Tensor, Tensor]:
        session = self.target.session(capacity=len(run.prompt_ids) + len(run.token_ids))
        rows_JV = session.extend([*run.prompt_ids, *run.token_ids[:-1]], logit_rows=len(run.token_ids)).logits_JV
        probs_JV = law(rows_JV, config.sampling).double()
        return probs_JV, torch.tensor(run.token_ids, device=probs_JV.device)[:, None]


def places(probs_JV: Float[Tensor, "J V"], ids_J1: Int[Tensor, "J 1"], part_J: Float[Tensor, " J"]) -> Tensor:
    """Where each token lies in its law, likeliest first, in [0, 1]; `part_J` is uniform and places it in its own mass.

    Tokens of equal chance count as one.
    """
    own_J1 = probs_JV.gather(-1, ids_J1)
    zero = torch.zeros_like(probs_JV)
    before_J = torch.where(probs_JV > own_J1, probs_JV, zero).sum(-1)
    return before_J + torch.where(probs_JV == own_J1, probs_JV, zero).sum(-1) * part_J.to(before_J)


def surprisal_excess(probs_JV: Float[Tensor, "J V"], ids_J1: Int[Tensor, "J 1"]) -> tuple[float, float]:
    """(summed surprisal less the summed entropy, its variance under the laws), in nats."""
    logp_JV = torch.where(probs_JV > 0, probs_JV, torch.ones_like(probs_JV)).log()
    entropy_J = -(probs_JV * logp_JV).sum(-1)
    variance_J = (probs_JV * logp_JV**2).sum(-1) - entropy_J**2
    surprisal_J = -probs_JV.gather(-1, ids_J1).log()[:, 0]
    return float((surprisal_J - entropy_J).sum()), float(variance_J.clamp_min(0).sum())


@dataclass(frozen=True, slots=True)
class MeanTest:
    """Is a sum of independent numbers, less its expectation, as small as its variance allows? Normal approximation."""

    total: float
    variance: float
    samples: int

    @property
    def excess(self) -> float:
        """Per sample."""
        return self.total / self.samples

    @property
    def p_value(self) -> float:
        """Two-sided; 0 for any excess where nothing was left to chance."""
        if self.variance <= 0:
            return 1.0 if self.total == 0 else 0.0
        return math.erfc(abs(self.total) / math.sqrt(2 * self.variance))

    def power(self, effect: float, alpha: float) -> float:
        """Chance of p < alpha when the mean is off by `effect` per sample."""
        if self.variance <= 0:
            return 1.0
        normal = NormalDist()
        return normal.cdf(effect * self.samples / math.sqrt(self.variance) - normal.inv_cdf(1 - alpha / 2))


def model_jobs(
    load: Callable[[str], Target],
    prompts: Sequence[Sequence[int]],
    *,
    drafters: Sequence[str],
    seed: int = 0,
    quick: bool = False,
) -> list[Job]:
    """The checks of a real model, to be called one by one; `load` gets "fp32" or "bf16".

    Greedy in both dtypes with every drafter, sampled in bf16 with both rules, and two planted faults.
    """
    if not drafters:
        return []
    prompts = prompts[:1] if quick else prompts
    length = 24 if quick else 32
    made = {
        name: ModelChecks(lambda n=name: load(n), name, prompts, max_new_tokens=length, seed=seed)
        for name in ("fp32", "bf16")
    }
    jobs: list[Job] = []
    for checks in made.values():
        jobs += [lambda c=checks, n=name: c.greedy_row(n) for name in drafters]
    first = drafters[0]
    named = {mutant.name: mutant for mutant in MUTANTS}
    late, greedy = (named[name] for name in REAL_MUTANTS)
    jobs.append(lambda: made["fp32"].greedy_row(first, late))
    if not quick:
        jobs += [lambda r=rule: made["bf16"].sampled_row(first, r) for rule in VERIFICATIONS]
        jobs.append(lambda: made["bf16"].sampled_row(first, "token", greedy))
    return jobs


def _flip_words(flips: Sequence[Flip | None], seen: Seen) -> str:
    real = [flip for flip in flips if flip is not None]
    missing = f"; {seen.missing}" if seen.missing else ""
    if not real:
        return f"all {len(flips)} texts equal plain decoding's{missing}"
    worst = max(real, key=lambda flip: abs(flip.gap))
    return (
        f"{len(real)} of {len(flips)} texts differ, first at token {worst.position}; log-probability gap "
        f"{worst.gap:.3g}, rounding explains {worst.tolerance:.3g}{missing}"
    )
