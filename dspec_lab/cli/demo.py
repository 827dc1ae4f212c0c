"""`dspec demo`: plain decoding against every drafter on bundled prompts, with verdicts and two figures."""

from __future__ import annotations

import argparse
from typing import Any

from dspec_lab.cli.options import add_target_options, load_models
from dspec_lab.cli.output import add_json_option, check_json_target, text_console, write_result

DOMAINS = ("math", "code", "chat")


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the verb's parser to `subparsers`."""
    parser = subparsers.add_parser(
        "demo",
        help="plain decoding against every drafter on bundled prompts",
        description="Decode bundled math, code and chat prompts plainly and with every drafter; greedy.",
    )
    parser.add_argument("--samples", type=int, default=2, help="prompts per domain (default: 2)")
    parser.add_argument("--max-new-tokens", type=int, default=24, help="default: 24")
    parser.add_argument("--gamma", type=int, default=7, help="drafted tokens per round (default: 7)")
    parser.add_argument("--repeats", type=int, default=1, help="timed runs of each prompt (default: 1)")
    parser.add_argument(
        "--figures", default="figures", metavar="FOLDER", help="where the figures go (default: figures)"
    )
    add_target_options(parser)
    add_json_option(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the table, write the figures. 1 if a text differs from plain decoding's."""
    from dataclasses import replace
    from pathlib import Path

    from rich.console import Console
    from rich.progress import Progress

    from dspec_lab.bench.record import run_record
    from dspec_lab.config import DecodeConfig
    from dspec_lab.core.files import write_bytes
    from dspec_lab.evaluation.drafters import available, build_drafters
    from dspec_lab.evaluation.evaluate import DTYPE_NAMES, evaluate, rows_as_dicts
    from dspec_lab.evaluation.lengths import within_reach
    from dspec_lab.evaluation.prompts import load_prompts
    from dspec_lab.evaluation.report import NOTE, eval_table
    from dspec_lab.plots.style import png_bytes
    from dspec_lab.plots.summary import acceptance_figure, speed_figure

    check_json_target(args.json)
    config = DecodeConfig(gamma=args.gamma, max_new_tokens=args.max_new_tokens)
    if args.repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {args.repeats}")
    folder = Path(args.figures)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--figures {folder} is a file, not a folder")
    # one benchmark a domain: the first prompts of its styles, in turn; two turns of a chat would double its share
    prompts = [
        replace(prompt, benchmark=f"{domain} (bundled)", turns=prompt.turns[:1])
        for domain in DOMAINS
        for prompt in load_prompts(domain, args.samples)
    ]
    target, tokenizer = load_models(args)
    drafters = build_drafters(available(), target, draft_model=args.draft_model)
    console = text_console(args.json)
    dtype = DTYPE_NAMES[str(target.dtype)]
    console.print(
        f"{target.name} in {dtype}: {len(prompts)} prompts, {args.max_new_tokens} tokens each, "
        f"plain decoding and {len(drafters)} drafters, {args.repeats} timed run(s), greedy"
    )
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("demo", total=None)
        rows = evaluate(
            target, tokenizer, drafters, prompts, config, repeats=args.repeats,
            # one pass a drafted token: a long draft of an untrained model would only cost time
            gammas=within_reach(drafters, args.gamma) | {"autoregressive": min(3, args.gamma)},
            progress=lambda done, total, what: bar.update(task, completed=done, total=total, description=what),
        )  # fmt: skip
    console.print(eval_table(rows, f"{target.name}, {dtype}"))
    console.print(NOTE)
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in (("demo_speed", speed_figure(rows)), ("demo_acceptance", acceptance_figure(rows))):
        console.print(f"figure: {write_bytes(folder / f'{name}.png', png_bytes(figure))}")
    settings = {key: value for key, value in vars(args).items() if key not in ("run", "verb", "debug")}
    record = run_record(settings, config.seed, dtype=dtype, model=target.name)
    write_result(args.json, {"rows": rows_as_dicts(rows), "run": record})
    return 1 if any(row.outputs_equal_plain is False for row in rows) else 0
