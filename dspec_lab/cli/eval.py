"""`dspec eval`: drafters on prompts, as a table and as JSON."""

from __future__ import annotations

import argparse
from typing import Any

from dspec_lab.cli.options import (
    add_confidence_options,
    add_decode_options,
    add_target_options,
    check_confidence,
    decode_config,
    drafter_list,
    dressed,
    load_models,
)
from dspec_lab.cli.output import add_json_option, check_json_target, text_console, write_result
from dspec_lab.evaluation.lengths import USUAL_GAMMA, side_by_side, within_reach


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the verb's parser to `subparsers`."""
    parser = subparsers.add_parser(
        "eval",
        help="accepted length, rates and speed-up of drafters on prompts",
        description="Compare drafters with the lean plain loop. One row per drafter, benchmark and temperature.",
    )
    parser.add_argument("--drafters", required=True, help="names, or NAME=CHECKPOINT, separated by commas")
    parser.add_argument("--prompts", required=True, help='a JSONL file of {"turns": [...]}, or a bundled set\'s name')
    parser.add_argument("--samples", type=int, help="use the first prompts only")
    parser.add_argument("--temperature", default="0", help="one, or several separated by commas (default: 0)")
    parser.add_argument("--repeats", type=int, default=2, help="timed runs of each prompt (default: 2)")
    parser.add_argument(
        "--trace", metavar="FILE", help="also record rounds, with laws and entropies, to a Parquet file"
    )
    add_decode_options(parser, max_new_tokens=128, several_lengths=True)
    add_confidence_options(parser)
    add_target_options(parser)
    add_json_option(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Check everything that can be checked, then load, then run. 1 if a text differs from plain decoding's."""
    from dataclasses import asdict
    from pathlib import Path

    from dspec_lab.bench.record import run_record
    from dspec_lab.evaluation.drafters import build_drafters, check_names
    from dspec_lab.evaluation.prompts import load_prompts

    check_json_target(args.json)
    names = check_names(drafter_list(args.drafters))
    calibration = check_confidence(args, names)
    lengths = None if args.gamma is None else draft_lengths(args.gamma)
    longest = USUAL_GAMMA if lengths is None else max(lengths)
    configs = [decode_config(args, gamma=longest, temperature=value) for value in temperatures(args.temperature)]
    if args.repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {args.repeats}")
    if args.trace is not None and not Path(args.trace).resolve().parent.is_dir():
        raise ValueError(f"--trace {args.trace}: there is no folder {Path(args.trace).parent}")
    prompts = load_prompts(args.prompts, args.samples)
    target, tokenizer = load_models(args)
    drafters = dressed(build_drafters(names, target, draft_model=args.draft_model), names, args, calibration)
    gammas = within_reach(drafters)
    if lengths is not None:
        drafters, gammas = side_by_side(drafters, lengths)

    from rich.progress import Progress

    from dspec_lab.evaluation.evaluate import DTYPE_NAMES, evaluate, rows_as_dicts
    from dspec_lab.evaluation.paired import paired_rows, paired_table
    from dspec_lab.evaluation.report import NOTE, eval_table
    from dspec_lab.evaluation.worth import worth_rows, worth_words

    console = text_console(args.json)
    rows, traces = [], [] if args.trace else None
    from rich.console import Console

    with Progress(console=Console(stderr=True), transient=True) as bar:
        for config in configs:
            task = bar.add_task(f"T = {config.temperature:g}", total=None)

            def report(done: int, total: int, what: str, task: Any = task) -> None:
                bar.update(task, completed=done, total=total, description=what)

            rows += evaluate(
                target, tokenizer, drafters, prompts, config, repeats=args.repeats, gammas=gammas, progress=report,
                traces=traces,
            )  # fmt: skip
    console.print(eval_table(rows, f"{target.name}, {DTYPE_NAMES[str(target.dtype)]}"))
    console.print(NOTE)
    worth = worth_rows(rows)
    for line in worth_words(worth):
        console.print(f"- {line}", markup=False)
    pairs = paired_rows(rows)
    if pairs:
        console.print(paired_table(pairs))
    if traces is not None:
        from dspec_lab.verifier.trace import write_trace

        if traces:
            console.print(f"{len(traces)} rounds written to {write_trace(args.trace, traces)}")
        else:
            console.print(f"no rounds to write to {args.trace}: every text ended with its first token")
    settings = {key: value for key, value in vars(args).items() if key not in ("run", "verb", "debug")}
    record = run_record(
        {**settings, "repeats": args.repeats, "row_ops": row_ops_name(target)},
        args.seed, dtype=DTYPE_NAMES[str(target.dtype)], model=target.name,
    )  # fmt: skip
    paired = [asdict(row) | {"settled": row.settled} for row in pairs]
    result = {"rows": rows_as_dicts(rows), "paired": paired, "worth": [asdict(entry) for entry in worth]}
    write_result(args.json, {**result, "run": record})
    return 1 if any(row.outputs_equal_plain is False for row in rows) else 0


def draft_lengths(text: str) -> list[int]:
    """Draft lengths of a comma-separated list; `ValueError` names what is no whole number of at least 1."""
    values = []
    for part in text.split(","):
        if not part.strip().isdigit() or int(part) < 1:
            raise ValueError(f"gamma must be a whole number of at least 1, got {part!r}")
        values.append(int(part))
    return values


def temperatures(text: str) -> list[float]:
    """Temperatures of a comma-separated list; `ValueError` names what is not a number."""
    values = []
    for part in text.split(","):
        try:
            values.append(float(part))
        except ValueError:
            raise ValueError(f"temperature must be a number, got {part!r}") from None
    return values


def row_ops_name(target: Any) -> str | None:
    """Which row ops a lean decoder runs on (native or torch); None for other targets."""
    ops = getattr(target, "ops", None)
    return None if ops is None else ops.name
