"""`dspec profile`: time the real target by rows and context, and write the cost table that scheduling needs."""

from __future__ import annotations

import argparse
from typing import Any

from dspec_lab.cli.options import add_target_options, check_confidence, dressed, load_models
from dspec_lab.cli.output import add_json_option, check_json_target, text_console, write_result


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the verb's parser to `subparsers`."""
    from dspec_lab.serving.profile import CONTEXTS, ROWS

    parser = subparsers.add_parser(
        "profile",
        help="time the target by rows and context: the scheduler's cost table",
        description="Time the target's pass over rows and contexts. The JSON result is a cost table, raw samples kept.",
    )
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="row counts, comma-separated")
    parser.add_argument("--contexts", default=",".join(map(str, CONTEXTS)), help="context lengths, comma-separated")
    parser.add_argument("--repeats", type=int, default=5, help="timed passes of each kind (default: 5)")
    parser.add_argument("--drafter", help="a drafter (or NAME=FOLDER) whose cost is fitted too")
    parser.add_argument("--calibration", metavar="FILE", help="time it with this calibration, which also takes time")
    parser.add_argument("--gamma", type=int, default=7, help="its drafted tokens per round (default: 7)")
    parser.add_argument("--sglang", metavar="FILE", help="also write SGLang's table of steps per second")
    parser.add_argument("--requests", type=int, default=1, help="request count that SGLang's table holds for")
    add_target_options(parser)
    add_json_option(parser)
    parser.set_defaults(confidence_threshold=None)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the table with what is to be known of it; `--json` is the table itself."""
    from rich.table import Table

    from dspec_lab.bench.record import run_record
    from dspec_lab.cli.serve_bench import counts, served_prompts
    from dspec_lab.config import DecodeConfig
    from dspec_lab.evaluation.drafters import build_drafters, check_names
    from dspec_lab.models.decoder import LeanDecoder
    from dspec_lab.scheduler.cost_table import pass_medians
    from dspec_lab.scheduler.sglang_table import without_request_terms, write_sglang
    from dspec_lab.serving.profile import profile_target

    check_json_target(args.json)
    rows, contexts = counts(args.rows, "row counts"), counts(args.contexts, "contexts")
    config = DecodeConfig(gamma=args.gamma, max_new_tokens=24, ignore_eos=True)
    if args.repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {args.repeats}")
    if args.drafter is None and args.calibration is not None:
        raise ValueError(f"--calibration {args.calibration} belongs to a drafter: give --drafter too")
    calibration = None
    if args.drafter is not None:
        check_names([args.drafter])
        calibration = check_confidence(args, [args.drafter])
    target, tokenizer = load_models(args)
    if not isinstance(target, LeanDecoder):
        raise ValueError(f"only lean decoders run ragged batches; {target.name} is another kind")
    drafter, prompts = None, []
    if args.drafter is not None:
        built = build_drafters([args.drafter], target, draft_model=args.draft_model)
        drafter = next(iter(dressed(built, [args.drafter], args, calibration).values()))
        prompts = served_prompts(tokenizer, "all", 4)
    console, progress = text_console(args.json), text_console("-")
    settings = {key: value for key, value in vars(args).items() if key not in ("run", "verb", "debug", "json")}
    table = profile_target(
        target, rows=rows, contexts=contexts, repeats=args.repeats, drafter=drafter, prompts=prompts, config=config,
        run=run_record({**settings, "row_ops": target.ops.name}, None, dtype=str(target.dtype), model=target.name),
        progress=lambda text: progress.print(text, style="dim"),
    )  # fmt: skip
    shown = Table(title=f"{target.name}, one pass at a context of {table.context_tokens}", title_justify="left")
    for name in ("rows", "ms, few requests", "ms a row", "rows/s", "ms, one row each"):
        shown.add_column(name, justify="right")
    passes = pass_medians(table.samples, table.context_tokens)
    for count in table.rows:
        few, one_each = min(requests for rows, requests in passes if rows == count), passes.get((count, count))
        seconds = passes[count, few]
        shown.add_row(
            f"{count}", f"{1e3 * seconds:.2f}", f"{1e3 * seconds / count:.2f}", f"{count / seconds:.0f}",
            f"{1e3 * one_each:.2f}" if one_each is not None and few < count else "",
        )  # fmt: skip
    console.print(shown)
    if table.request_probes:
        terms = zip(table.request_probes, table.request_s, strict=True)
        more = ", ".join(f"{count}: {1e3 * seconds:.2f}" for count, seconds in terms)
        console.print(f"ms that a pass over so many requests takes more than over one: {more}")
    console.print(f"context: {1e9 * table.context_s:.2f} ns more per row and context token")
    if drafter is not None:
        d = table.draft
        by_requests = ", ".join(
            f"{count}: {1e3 * seconds:.2f}" for count, seconds in zip(d.request_probes, d.request_s, strict=True)
        )
        console.print(
            f"drafting with {d.drafter} ({'one pass for all' if d.joint else 'a pass for each'}), ms by requests: "
            f"{by_requests}, and {1e3 * d.per_token_s:.2f} ms a token; round: {1e3 * table.fixed_s:.2f} ms + "
            f"{1e3 * table.settle_per_request_s:.2f} ms a request"
        )
    for finding in table.findings():
        console.print(f"- {finding}", markup=False)
    if args.sglang is not None:
        path = write_sglang(args.sglang, without_request_terms(table, args.requests))
        console.print(f"SGLang's table for {args.requests} requests: {path}")
    write_result(args.json, table.as_dict())
    return 0
