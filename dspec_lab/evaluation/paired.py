"""Two drafters on the same prompts: difference of accepted length, with an interval that resamples prompts as pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dspec_lab.evaluation.evaluate import EvalRow
from dspec_lab.evaluation.intervals import paired_ratio_difference

EVERYTHING = "all prompts"


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedRow:
    """Accepted length of `drafter` less that of `other`, on one benchmark, all of a domain, or all there are."""

    drafter: str
    other: str
    prompts_of: str  # a benchmark, "DOMAIN, all", or `EVERYTHING`
    temperature: float
    prompts: int  # that gave both a round
    difference: float
    low: float  # 95 % bootstrap over prompts
    high: float

    @property
    def settled(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low > 0 or self.high < 0


def paired_rows(rows: Sequence[EvalRow], drafter: str | None = None) -> list[PairedRow]:
    """`drafter` (by default the first) against each other: by benchmark, by domain where it has several, over all.

    Each prompt counts by its rounds, so the last depends on the mixture of domains. A set of fewer than two common
    prompts gives no row. Raises `ValueError` for a drafter that is not there.
    """
    names = list(dict.fromkeys(row.drafter for row in rows))
    if drafter is None and names:
        drafter = names[0]
    if drafter not in names:
        raise ValueError(f"there is no drafter {drafter!r} among {names}")
    found: list[PairedRow] = []
    for temperature in dict.fromkeys(row.temperature for row in rows):
        here = [row for row in rows if row.temperature == temperature]
        for label, part in _groups(here):
            mine = _counts(part, drafter)
            for other in names:
                theirs = _counts(part, other)
                common = [key for key in mine if key in theirs]
                if other == drafter or len(common) < 2:
                    continue
                samples = [[counts[key][at] for key in common] for counts in (mine, theirs) for at in (0, 1)]
                # few prompts may have too few different values for BCa
                interval = paired_ratio_difference(*samples, method="percentile" if len(common) < 8 else "BCa")
                found.append(
                    PairedRow(
                        drafter=drafter,
                        other=other,
                        prompts_of=label,
                        temperature=temperature,
                        prompts=len(common),
                        difference=interval.estimate,
                        low=interval.low,
                        high=interval.high,
                    )  # fmt: skip
                )
    return found


def paired_table(rows: Sequence[PairedRow]) -> Any:
    """A rich table, one line per pair and prompt set."""
    from rich import box
    from rich.table import Table

    title = f"accepted length of {rows[0].drafter} less that of" if rows else "no pair"
    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    for name in ("drafter", "prompts", "T", "difference (95 %)", "settled"):
        table.add_column(name, overflow="fold")
    for row in rows:
        difference = f"{row.difference:+.2f} ({row.low:+.2f} to {row.high:+.2f})"
        settled = "yes" if row.settled else "no: the interval holds 0"
        table.add_row(row.other, f"{row.prompts_of} ({row.prompts})", f"{row.temperature:g}", difference, settled)
    return table


def _groups(rows: Sequence[EvalRow]) -> list[tuple[str, list[EvalRow]]]:
    groups = {row.benchmark: [r for r in rows if r.benchmark == row.benchmark] for row in rows}
    for domain in dict.fromkeys(row.domain for row in rows):
        part = [row for row in rows if row.domain == domain]
        if len({row.benchmark for row in part}) > 1:
            groups[f"{domain}, all"] = part
    if len({row.domain for row in rows}) > 1:
        groups[EVERYTHING] = list(rows)
    return list(groups.items())


def _counts(rows: Sequence[EvalRow], drafter: str) -> dict[tuple[str, str], tuple[int, int]]:
    return {(row.benchmark, key): c for row in rows if row.drafter == drafter for key, c in row.by_prompt.items()}
