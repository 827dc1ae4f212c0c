"""`dspec audit`: is decoding with a drafter lossless, and would the audit notice if it were not?"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from dspec_lab.cli.options import drafter_list
from dspec_lab.cli.output import add_json_option, check_json_target, text_console, write_result

if TYPE_CHECKING:
    from dspec_lab.verifier.audit_report import AuditReport


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the verb's parser to `subparsers`."""
    parser = subparsers.add_parser(
        "audit",
        help="test that decoding is lossless",
        description="Test that decoding with a drafter has the target's law: exactly where the law is known, by "
        "sampling elsewhere, token for token on the default model (where it is in the cache). Planted faults go "
        "through the same checks. Exit status 0 only if all checks pass and every planted fault FAILs.",
    )
    parser.add_argument("--drafters", metavar="NAMES", help="names, separated by commas (default: all)")
    parser.add_argument("--quick", action="store_true", help="fewer samplers, laws and texts")
    parser.add_argument("--no-model", action="store_true", help="leave the default model out")
    parser.add_argument("--samples", type=int, metavar="N", help="texts per sampled check (default: 2000, quick 400)")
    parser.add_argument("--seed", type=int, default=0, help="of the sampled checks (default: 0)")
    add_json_option(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run every check and print the table; 0 when each verdict is the expected one."""
    check_json_target(args.json)
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from dspec_lab.bench.record import run_record
    from dspec_lab.evaluation.drafters import available
    from dspec_lab.models.fetch import default_model_folder
    from dspec_lab.scheduler.batch import audit_policies
    from dspec_lab.verifier.audit import DRAFTERS, audit, check_samples

    known = tuple(dict.fromkeys((*DRAFTERS, *available())))
    names = known if args.drafters is None else drafter_list(args.drafters)
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        named = f"unknown drafter {unknown[0]!r}" if unknown else "no drafter was named"
        raise ValueError(f"{named}; known are {', '.join(known)}")
    if args.seed < 0:
        raise ValueError(f"seed must be 0 or more, got {args.seed}")
    if args.samples is not None:
        check_samples(args.samples)
    console = text_console(args.json)
    on_model = [name for name in names if name in available()]
    folder, more = default_model_folder(), []
    if args.no_model:
        note = "the default model was left out (--no-model)"
    elif not folder.is_dir():
        note = f"no default model in {folder.parent}: its checks were left out (dspec fetch smollm2 gets it)"
    else:
        note, more = "", default_model_jobs(on_model, seed=args.seed, quick=args.quick)
    with Progress(
        TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
        console=Console(stderr=True, highlight=False), transient=True,
    ) as bar:  # fmt: skip
        task = bar.add_task("audit")
        report = audit(
            drafters=[name for name in names if name in DRAFTERS],
            policies=audit_policies(),
            more=more,
            seed=args.seed,
            samples=args.samples,
            quick=args.quick,
            progress=lambda what, done, total: bar.update(task, description=what[:70], completed=done, total=total),
        )
    console.print(audit_table(report))
    console.print("".join((report.summary, f"; {note}" if note else "")), markup=False)
    settings = {"drafters": list(names), "quick": args.quick, "samples": args.samples, "model": not note}
    write_result(args.json, {**report.as_dict(), "note": note, "run": run_record(settings, seed=args.seed)})
    return 0 if report.ok else 1


def default_model_jobs(names: list[str], *, seed: int, quick: bool) -> list[Any]:
    """The checks on the default model; nothing is loaded before the first of them runs."""
    from dspec_lab.evaluation.model_audit import PROMPTS, model_jobs
    from dspec_lab.models.load import load_target, load_tokenizer
    from dspec_lab.verifier.decode import encode_chat

    if not names:
        return []
    tokenizer = load_tokenizer()
    prompts = [encode_chat(tokenizer, [text]) for text in PROMPTS]
    return model_jobs(lambda dtype: load_target(dtype=dtype), prompts, drafters=names, seed=seed, quick=quick)


def audit_table(report: AuditReport) -> Any:
    """The rows as a rich table: honest checks first, then planted faults."""
    from rich.table import Table
    from rich.text import Text

    table = Table(pad_edge=False)
    for heading in ("check", "drafter or fault", "settings", "verdict", "evidence"):
        table.add_column(heading, overflow="fold")
    for row in sorted(report.rows, key=lambda row: row.expected == "FAIL"):
        verdict = Text(row.verdict, style="green" if row.as_expected else "bold red")
        if not row.as_expected:
            verdict.append(f" (expected {row.expected})")
        table.add_row(row.check, row.subject, row.settings, verdict, row.evidence)
    return table
