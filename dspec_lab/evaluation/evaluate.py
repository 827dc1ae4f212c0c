"""Drafters on prompts: accepted length, rates, equality and speed, beside the lean plain loop."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from dspec_lab.config import DecodeConfig
from dspec_lab.core.acceptance import acceptance_stats
from dspec_lab.core.types import Generation
from dspec_lab.drafters.protocol import Drafter
from dspec_lab.evaluation.equality import Flip, Verdict, find_flip, largest_gap, verdict
from dspec_lab.evaluation.intervals import pooled_ratio_interval
from dspec_lab.evaluation.prompts import Prompt
from dspec_lab.models.protocol import Target
from dspec_lab.verifier.decode import encode_chat, generate
from dspec_lab.verifier.stopping import spell
from dspec_lab.verifier.trace import trace_rows

DTYPE_NAMES = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float64": "fp64"}


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalRow:
    """One drafter on one benchmark at one temperature. Rates are shares 0..1; speeds count tokens after the first."""

    drafter: str
    benchmark: str
    domain: str
    temperature: float
    gamma: int
    samples: int  # prompts
    rounds: int
    num_committed: int
    accepted_length: float | None  # pooled: committed / rounds; None without a round
    accepted_length_low: float | None  # 95 % bootstrap over prompts; None for fewer than two
    accepted_length_high: float | None
    accept_rate: float | None  # accepted / proposed; None where nothing was proposed
    verify_rate: float | None
    survival_by_position: list[float] = field(default_factory=list)
    accept_by_position: list[float | None] = field(default_factory=list)
    tokens_per_s: float
    plain_tokens_per_s: float
    speedup: float  # median over repeats of the ratio within a repeat
    speedup_min: float
    speedup_max: float
    draft_ms: float  # mean per round
    verify_ms: float
    overhead_ms: float
    dtype: str
    outputs_equal_plain: Verdict  # None above temperature 0
    max_flip_gap: float | None
    # per prompt that had a round: (committed tokens, rounds), for paired comparisons
    by_prompt: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(slots=True)
class Task:
    """One turn of one prompt, with the history that plain decoding gave it."""

    prompt: Prompt
    turn: int
    prompt_ids: list[int]


@dataclass(slots=True)
class Runs:
    """All runs of one decoder on one benchmark: `by_repeat[r][i]` is task i in repeat r."""

    by_repeat: list[list[Generation]] = field(default_factory=list)

    def tokens_per_s(self, repeat: int) -> float:
        """Tokens after the first per second of decoding, pooled over tasks."""
        tokens = sum(len(run.token_ids) - 1 for run in self.by_repeat[repeat])
        seconds = sum(run.decode_s for run in self.by_repeat[repeat])
        return tokens / seconds if tokens else 0.0


Progress = Callable[[int, int, str], None]


def evaluate(
    target: Target,
    tokenizer: Any,
    drafters: Mapping[str, Drafter],
    prompts: Sequence[Prompt],
    config: DecodeConfig,
    *,
    repeats: int = 2,
    gammas: Mapping[str, int] | None = None,
    progress: Progress | None = None,
    traces: list[dict[str, Any]] | None = None,
) -> list[EvalRow]:
    """One row per drafter and benchmark, in that order of benchmarks.

    Plain decoding and the drafters take turns on each prompt, `repeats` times, so that a change of the machine's load
    meets them alike. Later turns of a prompt follow plain decoding's replies. With `traces`, one more, untimed run
    per drafter and prompt records laws and entropies into it. `gammas` gives some drafters a draft length of their own.
    Raises `ValueError` for a prompt that does not fit.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    if not drafters:
        raise ValueError("no drafter to evaluate")
    settings = {name: replace(config, gamma=(gammas or {}).get(name, config.gamma)) for name in drafters}
    benchmarks = list(dict.fromkeys(prompt.benchmark for prompt in prompts))
    total = len(prompts) * (repeats + (traces is not None)) * (len(drafters) + 1)
    report = progress or (lambda done, total, what: None)
    rows: list[EvalRow] = []
    done = 0
    _warm_up(target, drafters, encode_chat(tokenizer, prompts[0].turns[:1]), config, settings)
    for benchmark in benchmarks:
        chosen = [prompt for prompt in prompts if prompt.benchmark == benchmark]
        plain, runs, tasks = Runs(), {name: Runs() for name in drafters}, list[Task]()
        for repeat in range(repeats):
            plain.by_repeat.append([])
            for name in drafters:
                runs[name].by_repeat.append([])
            for prompt in chosen:
                replies: list[str] = []
                for turn in range(len(prompt.turns)):
                    task = Task(prompt, turn, encode_chat(tokenizer, prompt.turns, replies))
                    request = f"{prompt.prompt_id}#{turn}"
                    if repeat == 0:
                        tasks.append(task)
                    baseline = generate(target, None, task.prompt_ids, config, request_id=request)
                    plain.by_repeat[repeat].append(baseline)
                    replies.append(spell(tokenizer, baseline.token_ids))
                    for name, drafter in drafters.items():
                        run = generate(target, drafter, task.prompt_ids, settings[name], request_id=request)
                        runs[name].by_repeat[repeat].append(run)
                done += 1 + len(drafters)
                report(done, total, f"{prompt.prompt_id}, repeat {repeat + 1} of {repeats}")
        for name, drafter in drafters.items():
            rows.append(_row(target, name, benchmark, tasks, plain, runs[name], settings[name]))
            if traces is not None:
                for task in tasks:
                    request = f"{task.prompt.prompt_id}#{task.turn}"
                    run = generate(target, drafter, task.prompt_ids, settings[name], request_id=request, trace=True)
                    traces += trace_rows(
                        run, request_id=request, prompt_id=task.prompt.prompt_id, domain=task.prompt.domain,
                        drafter=name, temperature=config.temperature,
                    )  # fmt: skip
        if traces is not None:
            done += len(chosen) * (1 + len(drafters))
            report(done, total, f"traced {benchmark}")
    return rows


def _warm_up(
    target: Target,
    drafters: Mapping[str, Drafter],
    prompt_ids: list[int],
    config: DecodeConfig,
    settings: Mapping[str, DecodeConfig],
) -> None:
    for name, drafter in (("", None), *drafters.items()):
        mine = settings.get(name, config)
        tokens = min(8, mine.max_new_tokens)
        short = replace(mine, max_new_tokens=tokens, ignore_eos=True, stop_strings=())
        generate(target, drafter, prompt_ids, short)


def _row(
    target: Target, name: str, benchmark: str, tasks: list[Task], plain: Runs, runs: Runs, config: DecodeConfig
) -> EvalRow:
    first = runs.by_repeat[0]
    records = [record for run in first for record in run.rounds]
    stats = acceptance_stats(records)
    flips: list[Flip | None] = []
    equal: Verdict = None
    if config.temperature == 0:
        flips = [
            find_flip(target, task.prompt_ids, a.token_ids, b.token_ids)
            for task, a, b in zip(tasks, plain.by_repeat[0], first, strict=True)
        ]
        equal = verdict(first, flips)
    counts = _by_prompt(tasks, first)
    low, high = _interval(counts)
    ratios = [
        runs.tokens_per_s(r) / plain.tokens_per_s(r) if plain.tokens_per_s(r) else 1.0
        for r in range(len(runs.by_repeat))
    ]
    timed = [record for repeat in runs.by_repeat for run in repeat for record in run.rounds]
    mean_ms = {
        part: 1e3 * statistics.fmean(getattr(record, part) for record in timed) if timed else 0.0
        for part in ("draft_s", "verify_s", "overhead_s")
    }
    return EvalRow(
        drafter=name,
        benchmark=benchmark,
        domain=tasks[0].prompt.domain,
        temperature=config.temperature,
        gamma=config.gamma,
        samples=len({task.prompt.prompt_id for task in tasks}),
        rounds=stats.rounds,
        num_committed=stats.num_committed,
        accepted_length=_number(stats.accepted_length),
        accepted_length_low=low,
        accepted_length_high=high,
        accept_rate=_number(stats.accept_rate),
        verify_rate=_number(stats.verify_rate),
        survival_by_position=stats.survival_by_position,
        accept_by_position=[_number(share) for share in stats.accept_by_position],
        tokens_per_s=statistics.median(runs.tokens_per_s(r) for r in range(len(runs.by_repeat))),
        plain_tokens_per_s=statistics.median(plain.tokens_per_s(r) for r in range(len(plain.by_repeat))),
        speedup=statistics.median(ratios),
        speedup_min=min(ratios),
        speedup_max=max(ratios),
        draft_ms=mean_ms["draft_s"],
        verify_ms=mean_ms["verify_s"],
        overhead_ms=mean_ms["overhead_s"],
        dtype=DTYPE_NAMES.get(str(target.dtype), str(target.dtype)),
        outputs_equal_plain=equal,
        max_flip_gap=largest_gap(flips),
        by_prompt=counts,
    )


def _by_prompt(tasks: list[Task], runs: list[Generation]) -> dict[str, tuple[int, int]]:
    counts: dict[str, tuple[int, int]] = {}
    for task, run in zip(tasks, runs, strict=True):
        committed, rounds = counts.get(task.prompt.prompt_id, (0, 0))
        if run.rounds:
            counts[task.prompt.prompt_id] = (committed + run.num_committed, rounds + len(run.rounds))
    return counts


def _interval(counts: Mapping[str, tuple[int, int]]) -> tuple[float | None, float | None]:
    if len(counts) < 2:
        return None, None
    interval = pooled_ratio_interval([c for c, _ in counts.values()], [r for _, r in counts.values()])
    return interval.low, interval.high


def _number(value: float) -> float | None:
    # JSON has no NaN
    return None if value != value else value


def rows_as_dicts(rows: Sequence[EvalRow]) -> list[dict[str, Any]]:
    """Rows as JSON-ready objects."""
    return [asdict(row) for row in rows]
