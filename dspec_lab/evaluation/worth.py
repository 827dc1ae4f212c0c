"""Is speculation worth it here? Speed-up of a drafter on a set of prompts, with an interval, and what to do about it.

A round pays if it gains more tokens than it costs in plain tokens; the cost is measured, so the verdict holds for this
machine, this load and these prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from dspec_lab.evaluation.evaluate import EvalRow
from dspec_lab.evaluation.intervals import pooled_ratio_interval

Answer = Literal["yes", "no", "unsettled", "texts differ"]
ALL = "all"
FEWEST_PROMPTS = 3  # that can settle a verdict: two alike would leave an interval of no width
FEW_PROMPTS = 8  # below, the percentile interval: BCa needs more different values


@dataclass(frozen=True, kw_only=True, slots=True)
class Worth:
    """One drafter on one set of prompts at one temperature."""

    drafter: str
    prompts_of: str  # a benchmark, a domain, or `all`
    domain: str  # of all its prompts; `all` where there are several
    temperature: float
    prompts: int
    accepted_length: float  # tokens a round gains
    break_even_length: float  # tokens plain decoding makes in the time of a round
    speedup: float
    low: float | None  # 95 % bootstrap over prompts, widened by the spread of the timed repeats; None for one prompt
    high: float | None
    answer: Answer


def worth_rows(rows: Sequence[EvalRow]) -> list[Worth]:
    """Per drafter and temperature: all prompts, then each domain and each benchmark, as far as these are smaller sets.

    Speed-up of a set: time of plain decoding for the tokens gained over the time of the rounds that gained them.
    """
    found = []
    for name in dict.fromkeys(row.drafter for row in rows):
        for temperature in dict.fromkeys(row.temperature for row in rows):
            mine = [row for row in rows if (row.drafter, row.temperature) == (name, temperature)]
            mine = [row for row in mine if row.by_prompt and row.plain_tokens_per_s > 0]
            seen: list[list[EvalRow]] = []
            for label, part in _sets(mine):
                if part and part not in seen:
                    seen.append(part)
                    found.append(_worth(name, label, temperature, part))
    return found


def worth_words(found: Sequence[Worth], *, many: int = 6) -> list[str]:
    """A line per drafter and temperature: the verdict on all its prompts, and on which sets another one holds."""
    lines = []
    for whole in [entry for entry in found if entry.prompts_of == ALL]:
        parts = [
            entry for entry in found
            if (entry.drafter, entry.temperature) == (whole.drafter, whole.temperature) and entry is not whole
        ]  # fmt: skip
        interval = "one prompt, no interval" if whole.low is None else f"{whole.low:.2f} to {whole.high:.2f}, 95 %"
        line = (
            f"{whole.drafter}, T = {whole.temperature:g}, {whole.prompts} prompts: {_verdict(whole)} "
            f"Speed-up {whole.speedup:.2f} ({interval}); a round costs {whole.break_even_length:.2f} plain tokens and "
            f"gains {whole.accepted_length:.2f}."
        )
        good, bad = (_largest([entry for entry in parts if entry.answer == answer])[:many] for answer in ("yes", "no"))
        if whole.answer == "no":
            line += " Switch it off here (--drafter none)"
            line += f", save for prompts like {_named(good)}." if good else "."
        elif bad and whole.answer in ("yes", "unsettled"):
            line += f" Switch it off for prompts like {_named(bad)}."
        lines.append(line)
    return lines


def read_eval_rows(record: Mapping[str, Any]) -> list[EvalRow]:
    """The rows of a record of `dspec eval --json`; `ValueError` for anything else."""
    known = {field.name for field in fields(EvalRow)}
    rows = record.get("rows")
    if not isinstance(rows, list) or not rows or any(set(row) != known for row in rows):
        raise ValueError("no record of dspec eval: its rows do not have the columns of one")
    return [EvalRow(**{**row, "by_prompt": {k: tuple(v) for k, v in row["by_prompt"].items()}}) for row in rows]


def _sets(rows: list[EvalRow]) -> list[tuple[str, list[EvalRow]]]:
    domains = dict.fromkeys(row.domain for row in rows)
    by_domain = [(domain, [row for row in rows if row.domain == domain]) for domain in domains]
    return [(ALL, rows), *by_domain, *((row.benchmark, [row]) for row in rows)]


def _worth(drafter: str, label: str, temperature: float, rows: Sequence[EvalRow]) -> Worth:
    plain_s, round_s, tokens, rounds = [], [], 0, 0
    for row in rows:
        one_round_s = 1e-3 * (row.draft_ms + row.verify_ms + row.overhead_ms)
        for committed, count in row.by_prompt.values():
            plain_s.append(committed / row.plain_tokens_per_s)
            round_s.append(count * one_round_s)
            tokens, rounds = tokens + committed, rounds + count
    speedup = sum(plain_s) / sum(round_s)
    low = high = None
    if len(plain_s) > 1:
        method = "percentile" if len(plain_s) < FEW_PROMPTS else "BCa"
        interval = pooled_ratio_interval(plain_s, round_s, method=method)
        low = interval.low * min(row.speedup_min / row.speedup for row in rows)
        high = interval.high * max(row.speedup_max / row.speedup for row in rows)
    answer: Answer = "unsettled"
    if any(row.outputs_equal_plain is False for row in rows):
        answer = "texts differ"
    elif low is not None and high is not None and len(plain_s) >= FEWEST_PROMPTS and not low <= 1 <= high:
        answer = "yes" if low > 1 else "no"
    return Worth(
        drafter=drafter, prompts_of=label, domain=rows[0].domain if len({row.domain for row in rows}) == 1 else ALL,
        temperature=temperature, prompts=len(plain_s),
        accepted_length=tokens / rounds, break_even_length=tokens / rounds / speedup, speedup=speedup, low=low,
        high=high, answer=answer,
    )  # fmt: skip


def _verdict(entry: Worth) -> str:
    return {
        "yes": "worth it here.",
        "no": "NOT worth it here.",
        "unsettled": "not settled whether it is worth it here.",
        "texts differ": "no verdict: its texts differ from plain decoding's.",
    }[entry.answer]


def _largest(entries: list[Worth]) -> list[Worth]:
    """Without the benchmarks whose whole domain is there."""
    domains = {entry.prompts_of for entry in entries if entry.prompts_of == entry.domain}
    return [entry for entry in entries if entry.prompts_of == entry.domain or entry.domain not in domains]


def _named(entries: Sequence[Worth]) -> str:
    return ", ".join(f"{entry.prompts_of} ({entry.speedup:.2f})" for entry in entries)
