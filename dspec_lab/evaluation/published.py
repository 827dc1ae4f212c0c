"""What the DSpark paper reports beside what this project measured: pairs of numbers that mean the same.

The paper's targets have 4 to 14 billion weights (offline) and more (serving), its drafters five layers and far more
training; the default target here has 135 million. So sizes are expected to differ; order and direction may carry over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from dspec_lab.evaluation.evaluate import EvalRow
from dspec_lab.evaluation.intervals import pooled_ratio_interval
from dspec_lab.evaluation.paired import EVERYTHING, paired_rows

if TYPE_CHECKING:
    import pandas as pd

IN_PAPER = {"dspark": "DSpark", "dflash": "DFlash", "eagle3": "Eagle3"}  # the paper's names
ALL = "all"  # domains
Outcome = Literal["repeated", "not settled", "contrary", "size only"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """One published number and ours. `low` and `high` bound ours (95 % over prompts), None where nothing was resampled.

    `neutral` is the value that would mean "no effect", such as 0 for a difference; None where only the size compares.
    """

    what: str
    where: str  # in the paper
    unit: str
    paper: float
    ours: float
    low: float | None = None
    high: float | None = None
    neutral: float | None = None

    @property
    def outcome(self) -> Outcome:
        """Whether ours lies on the paper's side of `neutral`: settled so, not settled, or settled otherwise."""
        if self.neutral is None:
            return "size only"
        sign = 1 if self.paper > self.neutral else -1
        bounds = [self.ours if bound is None else bound for bound in (self.low, self.high)]
        away = sorted(sign * (bound - self.neutral) for bound in bounds)
        if away[0] > 0:
            return "repeated"
        return "contrary" if away[1] < 0 else "not settled"

    def line(self) -> str:
        """In words."""
        spread = " (no interval)" if self.low is None else f" ({self.low:.2f} to {self.high:.2f})"
        unit = f" {self.unit}" * bool(self.unit)
        return f"{self.what}: paper {self.paper:.2f}, here {self.ours:.2f}{spread}{unit}; {self.outcome}"


def accepted_lengths(rows: Sequence[EvalRow], table1: pd.DataFrame, target: str = "Qwen3-4B") -> list[Compared]:
    """Accepted length by drafter and domain. The paper's are means over a domain's benchmarks, at temperature 1."""
    found = []
    for domain in _domains(rows):
        for name in _drafters(rows):
            counts = [pair for r in rows if r.domain == domain and r.drafter == name for pair in r.by_prompt.values()]
            interval = pooled_ratio_interval(*zip(*counts, strict=True), method="percentile")
            found.append(
                Compared(
                    what=f"{name}, {domain}", where="Table 1", unit="tokens a round",
                    paper=_published(table1, target, name, domain),
                    ours=interval.estimate, low=interval.low, high=interval.high,
                )
            )  # fmt: skip
    return found


def leads(rows: Sequence[EvalRow], table1: pd.DataFrame, target: str = "Qwen3-4B") -> list[Compared]:
    """How much longer DSpark's accepted length is than each other's, paired by prompt here: by domain, and over all."""
    pairs = {(pair.other, pair.prompts_of): pair for pair in paired_rows(rows, "dspark")}
    found = []
    for domain in [*_domains(rows), ALL]:
        for name in _drafters(rows):
            # a domain of one benchmark has no row of its own
            pair = pairs.get((name, EVERYTHING if domain == ALL else f"{domain}, all"))
            if pair is None:
                continue
            lead = _published(table1, target, "dspark", domain) - _published(table1, target, name, domain)
            found.append(
                Compared(
                    what=f"dspark - {name}, {domain}", where="Table 1", unit="tokens a round", paper=lead,
                    ours=pair.difference, low=pair.low, high=pair.high, neutral=0.0,
                )
            )  # fmt: skip
    return found


def kept_along_block(rows: Sequence[EvalRow], figure2: pd.DataFrame, positions: int = 4) -> list[Compared]:
    """Conditional acceptance at positions 2 to `positions`, their mean, over that at position 1.

    Below 1 acceptance falls along the block. Ours from the survival by position of each prompt set, weighed by rounds.
    """
    if positions < 2:
        raise ValueError(f"positions must be at least 2, got {positions}")
    found = []
    for domain in _domains(rows):
        for name in _drafters(rows):
            part = [row for row in rows if row.domain == domain and row.drafter == name]
            survival = [
                sum(
                    row.rounds * (row.survival_by_position[k] if k < len(row.survival_by_position) else 0.0)
                    for row in part
                )
                for k in range(positions)
            ]
            if not all(survival[:-1]):
                continue
            ours = [survival[k] / survival[k - 1] for k in range(1, positions)]
            curve = figure2[(figure2["domain"] == domain) & (figure2["drafter"] == IN_PAPER[name])]
            by_position = dict(zip(curve["position"], curve["conditional_acceptance"], strict=True))
            theirs = [by_position[k + 1] for k in range(1, positions)]
            rounds = sum(row.rounds for row in part)
            found.append(
                Compared(
                    what=f"{name}, {domain}", where="Figure 2", unit="of position 1",
                    paper=sum(theirs) / len(theirs) / by_position[1],
                    ours=sum(ours) / len(ours) / (survival[0] / rounds),
                )
            )  # fmt: skip
    return found


def calibration(record: Mapping[str, Any], summary: pd.DataFrame, method: str, domain: str) -> list[Compared]:
    """Calibration error of survival after over before, and AUROC, at the positions that the paper prints.

    `record` is one of `dspec calibrate --json`. The paper's method is sequential temperatures.
    """
    parts = [part for part in record["by_domain"] if part["method"] == method and part["domain"] == domain]
    if not parts:
        raise ValueError(f"the record has no method {method!r} on {domain!r}")
    mine = {row["position"]: row for row in parts[0]["positions"]}
    found = []
    for row in summary.itertuples():
        here = mine.get(row.position)
        if here is None:
            continue
        found += [
            Compared(
                what=f"ECE, draft {row.position}", where="Figure 6", unit="after / before", neutral=1.0,
                paper=row.ece_after / row.ece_before, ours=here["ece_after"] / here["ece_before"],
            ),
            Compared(
                what=f"AUROC, draft {row.position}", where="Figure 6", unit="AUROC", paper=row.auc, neutral=0.5,
                ours=here["auroc_after"], low=here["auroc_after_low"], high=here["auroc_after_high"],
            ),
        ]  # fmt: skip
    return found


def serving(found: Mapping[str, Any]) -> list[Compared]:
    """The system's gains over MTP-1, from `serving.sweep.against_paper` (shares)."""
    words = {"throughput_gain": "throughput at equal speed", "speed_gain": "speed of a user at equal throughput"}
    return [
        Compared(
            what=words[name], where="Figure 7", unit="share gained over MTP-1", neutral=0.0,
            paper=found[name]["paper"], ours=found[name]["ours"],
        )
        for name in words
    ]  # fmt: skip


def _published(table1: pd.DataFrame, target: str, drafter: str, domain: str) -> float:
    part = table1[(table1["target"] == target) & (table1["drafter"] == IN_PAPER[drafter])]
    if domain != ALL:
        part = part[part["domain"] == domain]
    if part.empty:
        raise ValueError(f"the paper has no {drafter} on {domain} for {target!r}")
    return float(part["accepted_length"].mean())


def _domains(rows: Sequence[EvalRow]) -> list[str]:
    return [domain for domain in ("math", "code", "chat") if any(row.domain == domain for row in rows)]


def _drafters(rows: Sequence[EvalRow]) -> list[str]:
    return [name for name in IN_PAPER if any(row.drafter == name for row in rows)]
