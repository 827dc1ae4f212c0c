"""`dspec bench ragged` and `dspec bench trees`."""

from __future__ import annotations

import argparse
from typing import Any

from dspec_lab.cli.options import drafter_list
from dspec_lab.cli.output import check_json_target, text_console, write_result


def run_batches(args: argparse.Namespace) -> int:
    """Time passes of many requests, or trees; the record goes to `--json`."""
    import torch

    from dspec_lab.bench.drafting import bench_drafting
    from dspec_lab.bench.ragged import REQUESTS, bench_ragged
    from dspec_lab.bench.record import run_record
    from dspec_lab.bench.trees import bench_trees
    from dspec_lab.evaluation.drafters import build_drafters, check_names
    from dspec_lab.evaluation.prompts import load_prompts
    from dspec_lab.models.decoder import LeanDecoder
    from dspec_lab.models.fetch import ensure_smollm2
    from dspec_lab.models.load import load_tokenizer, parse_dtype
    from dspec_lab.verifier.decode import encode_chat

    check_json_target(args.json)
    names = check_names(drafter_list(args.drafters))
    if args.what == "ragged" and len(names) != 1:
        raise ValueError(f"dspec bench ragged times the drafting of one drafter, got {', '.join(names)}")
    if args.threads < 1:
        raise ValueError(f"threads must be at least 1, got {args.threads}")
    prompts = load_prompts(args.prompts, max(args.samples, 16) if args.what == "ragged" else args.samples)
    torch.set_num_threads(args.threads)
    target = LeanDecoder.from_folder(ensure_smollm2(), dtype=parse_dtype(args.dtype, "cpu"))
    tokenizer = load_tokenizer("smollm2")
    ids = [encode_chat(tokenizer, prompt.turns[:1]) for prompt in prompts]
    console, errors = text_console(args.json), text_console("-")

    def say(text: str) -> None:
        errors.print(text, style="dim", markup=False)

    title = f"{target.name}, {args.dtype}, {args.threads} threads, {target.ops.name} row ops"
    if args.what == "ragged":
        (drafter,) = build_drafters(names, target).values()
        drafting = bench_drafting(target, drafter, ids, requests=REQUESTS, repeats=args.repeats, progress=say)
        result = bench_ragged(target, ids, repeats=args.repeats, progress=say) | {"drafting": drafting}
        console.print(_ragged_table(result, title))
        console.print("medians over repeats; bound: what the cost of a pass by its rows, measured beside it, allows")
        console.print(_drafting_table(drafting))
        unequal = [count for count, row in drafting["by_requests"].items() if not row["drafts_equal"]]
        if unequal:
            console.print(f"drafts of a joint pass differ from single ones at {', '.join(unequal)} requests")
        bad = [count for count, row in result["by_requests"].items() if not row["round"]["outputs_equal"]]
        if bad:
            console.print(f"texts of a batch differ from single requests' at {', '.join(bad)} requests")
    else:
        drafters = build_drafters(names, target)
        rows = bench_trees(
            target, drafters, ids, gamma=args.gamma, new_tokens=args.new_tokens, repeats=args.repeats, progress=say
        )
        console.print(_tree_table(rows, title))
        console.print("pays: less time per token than width 1 in every repeat")
        result, unequal = {"rows": rows}, list[str]()
        bad = [row for row in rows if row.get("outputs_equal_plain") is False]
    settings = {key: value for key, value in vars(args).items() if key not in ("run", "verb", "debug", "json")}
    record = run_record({**settings, "row_ops": target.ops.name}, seed=0, dtype=args.dtype, model=target.name)
    write_result(args.json, {**result, "run": record})
    return 1 if bad or unequal else 0


def _ragged_table(result: dict[str, Any], title: str) -> Any:
    from rich.table import Table

    table = Table(title=title)
    for name in ("requests", "rows", "single ms", "ragged ms", "ratio", "bound", "ratio / bound", "whole rounds"):
        table.add_column(name, justify="right")
    for count, row in result["by_requests"].items():
        table.add_row(
            count,
            str(sum(row["rows"])),
            f"{row['single_ms']['median']:.1f}",
            f"{row['ragged_ms']['median']:.1f}",
            f"{row['ratio']['median']:.2f} [{row['ratio']['min']:.2f}, {row['ratio']['max']:.2f}]",
            f"{row['bound']['median']:.2f}",
            f"{row['share_of_bound']:.1%}",
            f"{row['round']['ratio']['median']:.2f}",
        )
    return table


def _drafting_table(drafting: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table(title=f"drafting with {drafting['drafter']}, {drafting['gamma']} tokens a request")
    for name in ("requests", "one by one ms", "one pass ms", "ratio"):
        table.add_column(name, justify="right")
    for count, row in drafting["by_requests"].items():
        table.add_row(
            count,
            f"{row['single_ms']['median']:.1f}",
            f"{row['joint_ms']['median']:.1f}",
            f"{row['ratio']['median']:.2f} [{row['ratio']['min']:.2f}, {row['ratio']['max']:.2f}]",
        )
    return table


def _tree_table(rows: list[dict[str, Any]], title: str) -> Any:
    from rich.table import Table

    table = Table(title=title)
    for name in ("drafter", "T", "width", "rows", "accepted length", "ms a round", "ms a token", "gain", "pays"):
        table.add_column(name, justify="left" if name in ("drafter", "pays") else "right")
    for row in rows:
        head = (row["drafter"], f"{row['temperature']:g}", str(row["width"]))
        if "refused" in row:
            table.add_row(*head, "", "", "", "", "", f"not run: {row['refused']}")
            continue
        table.add_row(
            *head,
            f"{row['rows_per_round']:.1f}",
            f"{row['accepted_length']:.2f}",
            f"{row['ms_per_round']['median']:.1f}",
            f"{row['ms_per_token']['median']:.1f}",
            f"{row['gain']['median']:.2f} [{row['gain']['min']:.2f}, {row['gain']['max']:.2f}]",
            row["pays"] or "",
        )
    return table
