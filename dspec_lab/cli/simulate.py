"""`dspec simulate`: policies under a range of loads, from a cost table and a law of acceptance, without a model."""

from __future__ import annotations

import argparse
from typing import Any

from dspec_lab.cli.options import drafter_list
from dspec_lab.cli.output import add_json_option, check_json_target, text_console, write_result

DEFAULT_POLICIES = "full,fixed-1,early-stop,delayed"


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the verb's parser to `subparsers`."""
    parser = subparsers.add_parser(
        "simulate",
        help="policies under load, without a model",
        description="Simulate a batch under closed-loop load: throughput, speed per user, budget and waste by policy.",
    )
    parser.add_argument("--preset", help="cpu, h100, h200, a6000, v4-flash or v4-pro")
    parser.add_argument("--cost-table", metavar="FILE", help="a cost table (ours or SGLang's) in place of the preset's")
    parser.add_argument("--trace", metavar="FILE", help="replay a trace's acceptance in place of the preset's law")
    parser.add_argument("--policies", default=DEFAULT_POLICIES, help=f"comma-separated (default: {DEFAULT_POLICIES})")
    parser.add_argument("--requests", help="numbers in flight, comma-separated (default: the preset's)")
    parser.add_argument("--request-rounds", type=int, default=60_000, help="per point (default: 60000)")
    parser.add_argument("--tokens", type=int, default=256, help="new tokens of a request, mean (default: 256)")
    parser.add_argument("--gate", action="store_true", help="also skip drafting where it does not pay")
    parser.add_argument("--lossy", action="store_true", help="allow policies that are not lossless (oracle and such)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--validate", metavar="FILE", help="a record of serve-bench: simulate its points and compare")
    add_json_option(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print a table of all points, and the comparison with the paper where the preset has one."""
    from dspec_lab.bench.record import run_record
    from dspec_lab.scheduler.policies import policy_from_name
    from dspec_lab.serving.sweep import against_paper, sweep

    check_json_target(args.json)
    if args.validate is not None:
        return _validate(args)
    preset = _preset(args)
    if args.seed < 0:
        raise ValueError(f"seed must be 0 or more, got {args.seed}")
    names = drafter_list(args.policies)
    policies = [policy_from_name(name, preset.table, lossy=args.lossy) for name in names]
    if args.cost_table and not args.gate and not any(policy.uses_table for policy in policies):
        # its times still set the clock, but nothing is scheduled by it
        text_console("-").print(f"note: no policy of {args.policies} looks at the cost table {args.cost_table}")
    requests = _counts(args.requests) if args.requests else preset.concurrency
    console, progress = text_console(args.json), text_console("-")
    points = sweep(
        preset, policies, requests, request_rounds=args.request_rounds, tokens=args.tokens, gate=args.gate,
        seed=args.seed, progress=lambda text: progress.print(text, style="dim"),
    )  # fmt: skip
    for note in (*preset.notes, *preset.table.findings(need_rows=max(requests) * (1 + preset.acceptance.gamma))):
        console.print(f"- {note}", markup=False)
    console.print(_table(points, preset))
    result: dict[str, Any] = {"points": [point.as_dict() for point in points], "notes": list(preset.notes)}
    if preset.sla_tok_per_s is not None and not (args.trace or args.cost_table):
        result["paper"] = {}
        for policy in policies:
            if not policy.uses_table or not policy.lossless:
                continue
            try:
                found = against_paper(points, preset, policy.name)
            except ValueError as error:
                console.print(f"{policy.name}, beside the paper: not compared, {error}", markup=False)
                continue
            result["paper"][policy.name] = found
            console.print(paper_words(policy.name, found), markup=False)
    settings = {key: value for key, value in vars(args).items() if key not in ("run", "verb", "debug")}
    write_result(args.json, {**result, "run": run_record(settings, args.seed, model=preset.table.name)})
    return 0


def _validate(args: argparse.Namespace) -> int:
    from rich.table import Table

    from dspec_lab.bench.record import run_record
    from dspec_lab.core.files import read_json
    from dspec_lab.serving.validate import largest_error, paces, points_as_dicts, validate

    given = [f"--{name.replace('_', '-')}" for name in ("preset", "cost_table", "trace") if getattr(args, name)]
    if given:
        raise ValueError(f"--validate takes everything from its record; leave out {', '.join(given)}")
    record = read_json(args.validate)
    if not isinstance(record, dict):
        raise ValueError(f"{args.validate} is no record of serve-bench")
    points = validate(record)
    (median, largest), pace = largest_error(points), paces(points)
    left, left_most = largest_error(points, pace)
    table = Table(title="engine and simulator", title_justify="left")
    for name in ("policy", "requests", "tok/s", "simulated", "error", "tokens a round", "simulated", "ms", "simulated"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for p in points:
        table.add_row(
            p.policy, str(p.requests), f"{p.engine_tok_per_s:.1f}", f"{p.simulated_tok_per_s:.1f}",
            f"{p.throughput_error:+.0%}", f"{p.engine_accepted_length:.2f}", f"{p.simulated_accepted_length:.2f}",
            f"{p.engine_round_ms:.1f}", f"{p.simulated_round_ms:.1f}",
        )  # fmt: skip
    console = text_console(args.json)
    console.print(table)
    console.print(f"throughput is off by {median:.0%} in the median, {largest:.0%} at most, over {len(points)} points")
    factors = ", ".join(f"{factor:.2f} at {requests}" for requests, factor in pace.items())
    console.print(
        f"simulated over engine by requests: {factors} (the machine's pace, or what turns cost; fitted on these "
        f"points); without it {left:.0%} in the median, {left_most:.0%} at most"
    )
    settings = {key: value for key, value in vars(args).items() if key not in ("run", "verb", "debug")}
    result = {"points": points_as_dicts(points), "median_error": median, "largest_error": largest}
    result |= {"pace_by_requests": pace, "median_error_left": left, "largest_error_left": left_most}
    write_result(args.json, {**result, "run": run_record(settings, args.seed, model=record["run"].get("model"))})
    return 0


def paper_words(policy: str, found: dict[str, Any]) -> str:
    """The comparison with the paper in one line."""
    gain, speed = found["throughput_gain"], found["speed_gain"]
    return (
        f"{policy} over MTP-1 at {found['sla_tok_per_s']:g} tok/s a user: throughput {gain['ours']:+.0%} (paper "
        f"{gain['paper']:+.0%}), at equal throughput each user {speed['ours']:+.0%} (paper {speed['paper']:+.0%}); "
        f"budget within {found['budget_largest_error_tokens']:.2f} tokens of Figure 8; "
        f"free parameters: {', '.join(found['free_parameters'])}"
    )


def _preset(args: argparse.Namespace) -> Any:
    from dataclasses import replace

    from dspec_lab.scheduler.cost_table import load_table
    from dspec_lab.serving.acceptance import TraceAcceptance
    from dspec_lab.serving.presets import PRESETS, Preset, load_preset, paper_acceptance
    from dspec_lab.verifier.trace import read_trace

    if args.preset is None and args.cost_table is None:
        raise ValueError(f"name a --preset ({', '.join(PRESETS)}) or a --cost-table")
    if args.preset is not None:
        preset = load_preset(args.preset)
    else:
        preset = Preset(
            name="own table", table=load_table(args.cost_table), acceptance=paper_acceptance(),
            concurrency=(1, 4, 16, 32), notes=("acceptance: the paper's Figure 2 (Qwen3-4B), spread assumed",),
        )  # fmt: skip
    if args.cost_table is not None:
        table = load_table(args.cost_table)
        preset = replace(preset, table=table, notes=(*preset.notes, f"cost table: {args.cost_table}"))
    if args.trace is not None:
        law = TraceAcceptance(read_trace(args.trace))
        preset = replace(
            preset, acceptance=law, notes=(f"acceptance: {law.requests} requests of {args.trace}, replayed",)
        )
    return preset


def _counts(text: str) -> tuple[int, ...]:
    counts = []
    for part in text.split(","):
        if not part.strip().isdigit() or int(part) < 1:
            raise ValueError(f"numbers of requests must be whole and at least 1, got {part!r}")
        counts.append(int(part))
    return tuple(sorted(set(counts)))


def _table(points: Any, preset: Any) -> Any:
    from rich.table import Table

    table = Table(title=f"{preset.name}: {preset.table.name}", title_justify="left")
    columns = ("policy", "requests", "tok/s", "tok/s a user", "p50", "p95", "tokens a round", "budget", "waste", "ms")
    for name in columns:
        table.add_column(name, justify="left" if name == "policy" else "right")
    for point in points:
        s = point.summary
        table.add_row(
            point.policy, str(point.concurrency), f"{s.throughput_tok_per_s:.1f}", f"{s.user_tok_per_s:.1f}",
            _number(s.user_p50_tok_per_s), _number(s.user_p95_tok_per_s), f"{s.accepted_length:.2f}",
            f"{s.budget:.2f}", f"{s.wasted_rows:.0%}", f"{1e3 * s.round_s:.2f}",
        )  # fmt: skip
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
