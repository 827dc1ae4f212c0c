"""`dspec calibrate`: fit a drafter's confidences to what was accepted, and judge the fit on other prompts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dspec_lab.cli.output import add_json_option, check_json_target, text_console, write_result

METHODS = ("temperature", "platt", "isotonic", "entropy")
METHODS_HELP = f"{', '.join(METHODS)} (reads the draft's entropy beside its confidence); default: temperature"


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the verb's parser to `subparsers`."""
    parser = subparsers.add_parser(
        "calibrate",
        help="fit a drafter's confidences to what was accepted",
        description=(
            "Fit a map per draft position on some prompts of a trace (dspec eval --trace) and judge the survival that "
            "follows on the others; then judge every method by domain, each prompt by maps fitted on other prompts. "
            "generate and eval apply the file with --calibration."
        ),
    )
    parser.add_argument("traces", nargs="+", metavar="TRACES", help="Parquet files of dspec eval --trace")
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--out", metavar="FILE", help="fit, and write the calibration as JSON")
    task.add_argument("--check", metavar="FILE", help="judge this calibration on the traces and tell of drift")
    parser.add_argument("--drafter", help="which drafter, where the traces hold several")
    parser.add_argument("--temperature", type=float, help="which sampling temperature, where they hold several")
    parser.add_argument("--domain", default="all", help="fit and judge on this domain only (default: all)")
    parser.add_argument("--method", default="temperature", help=METHODS_HELP)
    parser.add_argument("--labels", default="outcome", help="outcome (default) or expected: last verdict by its chance")
    parser.add_argument("--held-out", type=float, default=0.5, help="share of prompts to judge on (default: 0.5)")
    parser.add_argument(
        "--folds", type=int, help="parts of the prompts in the judgement by domain (default: 4, or one per prompt)"
    )
    parser.add_argument("--bins", type=int, default=20, help="bins of the calibration error (default: 20)")
    parser.add_argument("--checkpoint", metavar="DIR", help="the drafter's checkpoint, whose hash goes into the file")
    parser.add_argument("--seed", type=int, default=0, help="of the split (default: 0)")
    add_json_option(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Fit, judge, write, and show the held-out numbers of every method; with `--check`, 1 where it finds drift.

    The file's own table judges the file's maps on the prompts they left out. The tables by domain judge the methods:
    each prompt by maps of the other folds, so that all of a domain's prompts count.
    """
    from dataclasses import asdict

    from dspec_lab.bench.record import run_record
    from dspec_lab.calibration.calibration import fit_calibration
    from dspec_lab.calibration.held_out import FOLDS
    from dspec_lab.calibration.records import read_rounds
    from dspec_lab.calibration.score import mean_error
    from dspec_lab.checkpoints.identity import checkpoint_hash
    from dspec_lab.cli.calibrate_held_out import (
        domain_record,
        domain_table,
        goal_lines,
        judge_by_domain,
        judge_signals,
        signal_table,
    )

    check_json_target(args.json)
    if args.check is not None:
        return _judge(args)
    _check(args)
    drafter_hash = None if args.checkpoint is None else checkpoint_hash(args.checkpoint)
    rounds = read_rounds(args.traces, drafter=args.drafter, temperature=args.temperature).of_domain(args.domain)
    folds = min(FOLDS, len(rounds.prompts)) if args.folds is None else args.folds
    if not 2 <= folds <= len(rounds.prompts):
        raise ValueError(f"--folds must lie in 2..{len(rounds.prompts)}, the number of prompts, got {folds}")
    options: dict[str, Any] = {
        "held_out": args.held_out, "seed": args.seed, "bins": args.bins, "labels": args.labels,
        "data": args.traces, "drafter_hash": drafter_hash,
    }  # fmt: skip
    fitted = fit_calibration(rounds, args.method, **options)
    errors = {"none": mean_error(list(fitted.before)), args.method: mean_error(list(fitted.after))}
    for method in METHODS:
        if method != args.method:
            try:
                errors[method] = mean_error(list(fit_calibration(rounds, method, **options).after))
            except ValueError as error:
                text_console(args.json).print(f"{method}: {error}", markup=False)
    path = fitted.save(args.out)
    console = text_console(args.json)
    console.print(_table(fitted))
    ordered = ", ".join(f"{name} {100 * errors[name]:.1f}" for name in ("none", *METHODS) if name in errors)
    console.print(f"mean held-out ECE of survival over positions, %: {ordered}", markup=False)
    for text in at_the_edge(fitted):
        console.print(text, markup=False)
    origin = fitted.provenance
    console.print(
        f"{origin.fit_rounds} rounds of {len(origin.fit_prompts)} prompts fitted, {origin.held_out_rounds} rounds of "
        f"{len(origin.held_out_prompts)} others judged; written to {path}",
        markup=False,
    )
    scores, notes = judge_by_domain(rounds, METHODS, folds=folds, seed=args.seed, bins=args.bins, labels=args.labels)
    areas, more = judge_signals(rounds, folds=folds, seed=args.seed)
    if scores:
        console.print(domain_table(scores, folds))
        console.print("\n".join(goal_lines(scores)), markup=False)
    if areas:
        console.print(signal_table(areas))
    for text in (*notes, *more):
        console.print(text, markup=False)
    settings = {key: value for key, value in vars(args).items() if key not in ("run", "verb", "debug")}
    result = {
        "file": str(path),
        "maps": [m.as_json() for m in fitted.maps],
        "before": [asdict(score) for score in fitted.before],
        "after": [asdict(score) for score in fitted.after],
        "mean_ece": errors,
        "folds": folds,
        "by_domain": [domain_record(score) for score in scores],
        "signals": [asdict(area) for area in areas],
        "run": run_record(settings, args.seed),
    }
    write_result(args.json, result)
    return 0


def at_the_edge(fitted: Any) -> list[str]:
    """A line for each map not to be trusted: a temperature at an end of the grid, or a map borrowed from before."""
    from dspec_lab.calibration.sts import GRID

    ends = (float(GRID.min()), float(GRID.max()))
    borrowed = [
        f"position {k}: too few drafts were accepted or rejected there, it takes the map of position {k - 1}"
        for k, (before, m) in enumerate(zip(fitted.maps, fitted.maps[1:], strict=False), 2)
        if m.method != "temperature" and m == before
    ]
    return borrowed + [
        f"position {k}: the temperature {m.temperature:g} is an end of the grid, too few rounds survived or were lost "
        "there to fit one"
        for k, m in enumerate(fitted.maps, 1)
        if m.method == "temperature" and m.temperature in ends
    ]


def _judge(args: argparse.Namespace) -> int:
    from dataclasses import asdict, replace

    from dspec_lab.bench.record import run_record
    from dspec_lab.calibration.calibration import load_calibration
    from dspec_lab.calibration.drift import drift_warnings
    from dspec_lab.calibration.records import read_rounds

    fitted = load_calibration(args.check)
    rounds = read_rounds(args.traces, drafter=args.drafter, temperature=args.temperature)
    before, after = fitted.judge(rounds)
    found = drift_warnings(fitted, rounds)
    console = text_console(args.json)
    console.print(_table(replace(fitted, before=tuple(before), after=tuple(after))))
    console.print("\n".join(f"drift: {text}" for text in found) or "no drift from the fit", markup=False)
    settings = {key: value for key, value in vars(args).items() if key not in ("run", "verb", "debug")}
    scores = {"before": [asdict(score) for score in before], "after": [asdict(score) for score in after]}
    write_result(args.json, {**scores, "drift": found, "run": run_record(settings, args.seed)})
    return 1 if found else 0


def _check(args: argparse.Namespace) -> None:
    if args.method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {args.method!r}")
    if args.labels not in ("outcome", "expected"):
        raise ValueError(f"labels must be outcome or expected, got {args.labels!r}")
    if args.bins < 1:
        raise ValueError(f"there must be at least 1 bin, got {args.bins}")
    if args.seed < 0:
        raise ValueError(f"seed must be at least 0, got {args.seed}")
    out = Path(args.out)
    if out.is_dir() or not out.resolve().parent.is_dir():
        raise ValueError(f"--out {args.out}: give a file in a folder that exists")


def _table(fitted: Any) -> Any:
    from rich.table import Table

    table = Table(title=f"{fitted.provenance.drafter}, held-out survival, {fitted.method}")
    for name in ("k", "map", "survived", "ECE before, %", "after", "floor", "AUROC", "Brier before", "after"):
        table.add_column(name, justify="right")
    for before, after in zip(fitted.before, fitted.after, strict=True):
        k = before.position
        table.add_row(
            "all" if k is None else str(k),
            "" if k is None else _words(fitted.maps[k - 1]),
            f"{before.survived:.3f}",
            _percent(before),
            _percent(after),
            f"{100 * after.ece_floor:.1f}",
            "" if after.auroc is None else f"{after.auroc:.3f}",
            f"{before.brier:.4f}",
            f"{after.brier:.4f}",
        )
    return table


def _words(position_map: Any) -> str:
    if position_map.method == "temperature":
        return f"T = {position_map.temperature:.2f}"
    if position_map.method == "platt":
        return f"{position_map.slope:.2f} x {position_map.bias:+.2f}"
    if position_map.method == "entropy":
        return f"{position_map.slope:.2f} x - {position_map.weight:.2f} H {position_map.bias:+.2f}"
    return f"{len(position_map.inputs)} knots"


def _percent(score: Any) -> str:
    bounds = "" if score.ece_low is None else f" [{100 * score.ece_low:.1f}, {100 * score.ece_high:.1f}]"
    return f"{100 * score.ece:.1f}{bounds}"
