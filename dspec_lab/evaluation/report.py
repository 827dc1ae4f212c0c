"""The table of `dspec eval` and `dspec demo`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dspec_lab.evaluation.equality import Verdict
from dspec_lab.evaluation.evaluate import EvalRow


def verdict_text(value: Verdict, gap: float | None) -> str:
    """The verdict as shown: yes, NO, near tie (gap), inconclusive; "by audit" above temperature 0."""
    if value is None:
        return "by audit"
    if value is True:
        return "yes"
    if value is False:
        return "NO"
    if value == "near_tie":
        return f"near tie ({gap:.3g} nats)"
    return "inconclusive"


def eval_table(rows: Sequence[EvalRow], title: str) -> Any:
    """A rich table, one line per row; narrow terminals fold its cells, nothing is cut off."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    columns = ("drafter", "benchmark", "T", "accepted length", "accept rate", "tok/s", "plain", "speed-up")
    for name in columns:
        table.add_column(name, justify="left" if name in columns[:2] else "right", overflow="fold")
    table.add_column("equals plain", overflow="fold")
    for row in rows:
        length = _text(row.accepted_length)
        if row.accepted_length_low is not None:
            length += f" ({row.accepted_length_low:.2f}-{row.accepted_length_high:.2f})"
        table.add_row(
            row.drafter,
            row.benchmark,
            f"{row.temperature:g}",
            length,
            _text(row.accept_rate),
            f"{row.tokens_per_s:.1f}",
            f"{row.plain_tokens_per_s:.1f}",
            f"{row.speedup:.2f} ({row.speedup_min:.2f}-{row.speedup_max:.2f})",
            verdict_text(row.outputs_equal_plain, row.max_flip_gap),
        )
    return table


NOTE = (
    "Accepted length: tokens per round, the extra token included (95 % bootstrap over prompts). "
    "Speed-up: over the lean plain loop, median over repeats (least-most); prefill left out."
)


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
