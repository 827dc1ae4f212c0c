"""The part of `dspec calibrate` that judges by domain: cross-fitted errors, goals missed, other signals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dspec_lab.calibration.held_out import DomainScores
    from dspec_lab.calibration.records import Rounds
    from dspec_lab.calibration.signals import SignalArea


def judge_by_domain(rounds: Rounds, methods: tuple[str, ...], **options: Any) -> tuple[list[DomainScores], list[str]]:
    """(scores, notes): each method fitted on all domains and on each alone; a fit that is not possible gives a note."""
    from dspec_lab.calibration.held_out import domain_scores

    scores, notes = [], []
    for fitted_on in ("all", *rounds.domains) if len(rounds.domains) > 1 else rounds.domains:
        for method in methods:
            try:
                scores += domain_scores(rounds, method, fitted_on=fitted_on, **options)
            except ValueError as error:
                notes.append(f"{method} fitted on {fitted_on}: {error}")
    return scores, notes


def judge_signals(rounds: Rounds, **options: Any) -> tuple[list[SignalArea], list[str]]:
    """(areas, notes): AUROC of the confidence and of other signals; a trace without them gives a note."""
    from dspec_lab.calibration.signals import signal_areas

    try:
        return signal_areas(rounds, **options), []
    except ValueError as error:
        return [], [f"other signals: {error}"]


def domain_table(scores: list[DomainScores], folds: int) -> Any:
    """Mean ECE before and after by domain, fit and method, with the AUROC after at each position."""
    from rich.table import Table

    table = Table(title=f"mean ECE of survival over positions, %, and AUROC; cross-fitted in {folds} folds of prompts")
    for name in ("judged on", "fitted on", "method", "before", "after", "floor", "order", "AUROC at 1, 2, ..."):
        table.add_column(name, justify="right")
    for s in scores:
        areas = " ".join("-" if p.auroc is None else f"{p.auroc:.2f}" for p in s.after if p.position)
        table.add_row(
            f"{s.domain} ({s.prompts} prompts)", s.fitted_on, s.method,
            *(f"{100 * m.estimate:.2f} [{100 * m.low:.2f}, {100 * m.high:.2f}]" for m in (s.mean_before, s.mean_after)),
            f"{100 * s.mean_after.floor:.2f}", "kept" if s.order_kept else "not kept", areas,
        )  # fmt: skip
    return table


def domain_record(score: DomainScores) -> dict[str, Any]:
    """The scores as JSON: means over positions, what is missed, and the main numbers of each position."""
    from dataclasses import asdict

    return {
        **{name: getattr(score, name) for name in ("domain", "fitted_on", "method", "rounds", "prompts", "order_kept")},
        "mean_before": asdict(score.mean_before),
        "mean_after": asdict(score.mean_after),
        "unmet": score.unmet(),
        "positions": [
            {
                "position": after.position,
                "cases": after.cases,
                "survived": after.survived,
                "ece_before": before.ece,
                "ece_after": after.ece,
                "auroc_before": before.auroc,
                "auroc_after": after.auroc,
                "auroc_after_low": after.auroc_low,
                "auroc_after_high": after.auroc_high,
            }
            for before, after in zip(score.before, score.after, strict=True)
            if after.position is not None
        ],
    }


def goal_lines(scores: list[DomainScores]) -> list[str]:
    """The goals, then a line per domain and method (fitted on all that was given) with what is missed."""
    from dspec_lab.calibration.held_out import GOAL_AREA, GOAL_ERROR, GOAL_SHARE

    head = (
        f"goals: mean ECE after at most {100 * GOAL_ERROR:.0f} % and {GOAL_SHARE:g} of before, AUROC at least "
        f"{GOAL_AREA:g} at each position, order kept"
    )
    mine = [s for s in scores if s.fitted_on == scores[0].fitted_on]
    return [head, *(f"  {s.domain}, {s.method}: {'; '.join(s.unmet()) or 'all met'}" for s in mine)]


def signal_table(areas: list[SignalArea]) -> Any:
    """AUROC of the verdict on a draft: a row per domain and position, a column per signal."""
    from rich.table import Table

    from dspec_lab.calibration.signals import SIGNALS

    table = Table(title="AUROC of the verdict on draft k where it was reached")
    names = {"draft_entropy": "draft entropy", "both": "both, fitted", "chance": "1 - TV (ceiling)"}
    for name in ("domain", "k", "drafts", *(names.get(signal, signal) for signal in SIGNALS)):
        table.add_column(name, justify="right")
    rows: dict[tuple[str, int], dict[str, SignalArea]] = {}
    for area in areas:
        rows.setdefault((area.domain, area.position), {})[area.signal] = area
    for (domain, position), row in rows.items():
        cells = [f"{row[s].auroc:.2f} [{row[s].low:.2f}, {row[s].high:.2f}]" for s in SIGNALS]
        table.add_row(domain, str(position), str(row["confidence"].cases), *cells)
    return table
