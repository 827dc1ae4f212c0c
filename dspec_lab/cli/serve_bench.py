"""`dspec serve-bench`: the batched engine with real model calls under load, policy by policy."""

from __future__ import annotations

import argparse
from typing import Any

from dspec_lab.cli.options import (
    add_decode_options,
    add_target_options,
    check_confidence,
    decode_config,
    drafter_list,
    dressed,
    load_models,
    within_reach,
)
from dspec_lab.cli.output import add_json_option, check_json_target, text_console, write_result

GATE = "+gate"
DEFAULT_POLICIES = "full,fixed-1,fixed-3,fixed-5,threshold-0.5,early-stop,delayed,early-stop+gate,delayed+gate"


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the verb's parser to `subparsers`."""
    parser = subparsers.add_parser(
        "serve-bench",
        help="the batched engine under load, policy by policy",
        description="Serve many requests in one batch of the real model: throughput, speed per user, budget, waste.",
    )
    parser.add_argument("--drafter", default="dspark", help="a drafter or NAME=FOLDER (default: dspark)")
    parser.add_argument(
        "--policies", default=DEFAULT_POLICIES,
        help=f"comma-separated; +gate also decides whether to draft at all (default: {DEFAULT_POLICIES})",
    )  # fmt: skip
    parser.add_argument("--requests", default="1,4,16,32", help="numbers in flight (default: 1,4,16,32)")
    parser.add_argument(
        "--waves", type=int, default=2,
        help="requests served per place, closed loop, and at least one for each prompt (default: 2)",
    )  # fmt: skip
    parser.add_argument("--rate", type=float, help="open loop: arrivals a second, in place of the closed loop")
    parser.add_argument("--burst", type=int, default=1, help="open loop: requests that arrive together (default: 1)")
    parser.add_argument("--arrivals", type=int, default=32, help="open loop: requests in all (default: 32)")
    parser.add_argument("--prompts", default="all", help="prompt file or bundled set (default: all)")
    parser.add_argument("--samples", type=int, default=18, help="prompts that requests take turns with (default: 18)")
    parser.add_argument("--temperature", type=float, default=0.0, help="default: 0")
    parser.add_argument("--repeats", type=int, default=2, help="timed runs of each policy and load (default: 2)")
    parser.add_argument("--cost-table", metavar="FILE", help="cost table (default: one is measured first)")
    parser.add_argument("--calibration", metavar="FILE", help="calibrate confidences with this file of dspec calibrate")
    parser.add_argument("--gate", action="store_true", help="also run each policy with draft gating")
    parser.add_argument("--no-plain", action="store_true", help="leave plain batched decoding out")
    add_decode_options(parser, max_new_tokens=64)
    add_target_options(parser)
    add_json_option(parser)
    # a static threshold is a policy here
    parser.set_defaults(confidence_threshold=None)
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure, print, and compare every text with plain decoding's; 1 if one differs."""
    from dspec_lab.bench.record import run_record
    from dspec_lab.evaluation.drafters import build_drafters, check_names
    from dspec_lab.models.decoder import LeanDecoder
    from dspec_lab.scheduler.cost_table import CostTable, load_table
    from dspec_lab.scheduler.policies import policy_from_name
    from dspec_lab.serving.compare import against_fixed, compare_policies
    from dspec_lab.serving.measured import measure_acceptance
    from dspec_lab.serving.profile import profile_target
    from dspec_lab.verifier.decode import generate

    check_json_target(args.json)
    check_names([args.drafter])
    calibration = check_confidence(args, [args.drafter])
    config = decode_config(args, temperature=args.temperature)
    requests = counts(args.requests, "numbers of requests")
    for name in ("waves", "repeats", "samples"):
        if getattr(args, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(args, name)}")
    loads = _loads(args, requests)
    # names are checked with a table that will do, before the model is loaded
    free, gated = policy_names(args.policies, args.gate)
    stand_in = CostTable(rows=(1, 2), seconds=(1.0, 2.0))
    wanted = [policy_from_name(name, stand_in) for name in (*free, *gated)]
    need_table = bool(gated) or any(policy.uses_table for policy in wanted)
    if calibration is not None:
        _check_calibration(args, calibration, wanted, config.gamma)
    if args.cost_table is not None and not need_table:
        raise ValueError(f"--cost-table {args.cost_table}: no policy of {args.policies} looks at it; add --gate or one")
    table = load_table(args.cost_table) if args.cost_table is not None else None
    target, tokenizer = load_models(args)
    if not isinstance(target, LeanDecoder):
        raise ValueError(f"only lean decoders run ragged batches; {target.name} is another kind")
    built = build_drafters([args.drafter], target, draft_model=args.draft_model)
    ((_, drafter),) = dressed(built, [args.drafter], args, calibration).items()
    config = within_reach(config, drafter, args)
    prompts = served_prompts(tokenizer, args.prompts, args.samples)
    console, progress = text_console(args.json), text_console("-")
    if calibration is not None and calibration.provenance.temperature != config.temperature:
        fitted = calibration.provenance.temperature
        console.print(f"- calibration: fitted at temperature {fitted:g}, this load runs at {config.temperature:g}")

    def say(text: str) -> None:
        progress.print(text, style="dim")

    last = max(requests) * (1 + config.gamma)
    if table is None and need_table:
        rows = [count for count in PROBES if count < last] + [last]
        table = profile_target(
            target, rows=rows, contexts=(128,), repeats=3, drafter=drafter, prompts=prompts, config=config, progress=say
        )
    for finding in table.findings(need_rows=last) if table is not None else ():
        console.print(f"- cost table: {finding}", markup=False)
    settings = {key: value for key, value in vars(args).items() if key not in ("run", "verb", "debug")}
    record = run_record(
        {**settings, "row_ops": target.ops.name}, args.seed, dtype=str(target.dtype), model=target.name
    )  # fmt: skip
    entries, rows, plain = [], list[dict[str, Any]](), []
    if config.temperature == 0:
        say(f"{len(prompts)} texts of plain decoding, to compare with")
        plain = [generate(target, None, ids, config).token_ids for ids in prompts]
    result: dict[str, Any] = {"cost_table": table.as_dict() if table else None, "run": record, "acceptance": None}
    for places, load in loads.items():
        here = compare_policies(
            target, prompts, config, drafter, [policy_from_name(name, table) for name in free],
            gated=[policy_from_name(name, table) for name in gated], table=table, loads={places: load},
            total=lambda places: max(args.waves * places, len(prompts)), repeats=args.repeats, plain=not args.no_plain,
            progress=say,
        )  # fmt: skip
        verdicts = texts_against_plain(target, prompts, plain, here) if plain else {}
        entries += here
        rows += [{**entry.as_dict(), **verdicts.get((entry.policy, entry.requests), NO_VERDICT)} for entry in here]
        result |= {"rows": rows, "against_fixed": against_fixed(entries), "complete": False}
        if args.json not in (None, "-"):
            write_result(args.json, result)  # a run that is cut off keeps the loads it has finished
    console.print(_table(rows, f"{target.name}, {drafter.name}, gamma {config.gamma}, T = {config.temperature:g}"))
    for found in against_fixed(entries):
        console.print(_fixed_words(found), markup=False)
    measured = None
    if config.temperature == 0:
        say("acceptance at every token of the texts")
        measured = measure_acceptance(target, drafter, prompts, served_domains(args.prompts, args.samples), config)
        for domain, seen in measured.by_domain().items():
            console.print(f"{domain}: {seen['accepted_drafts']:.2f} drafts accepted a block, {seen['texts']} texts")
    result |= {"acceptance": measured.as_dict() if measured else None, "complete": True}
    write_result(args.json, result)
    return 1 if any(row["outputs_equal_plain"] is False for row in rows) else 0


PROBES = (1, 2, 4, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 192, 256, 384, 512)
NO_VERDICT: dict[str, Any] = {"outputs_equal_plain": None, "max_flip_gap": None}


def texts_against_plain(target: Any, prompts: Any, plain: Any, entries: Any) -> dict[Any, dict[str, Any]]:
    """Per entry: does every text of every repeat equal `plain`, what plain decoding alone gives for its prompt?"""
    from dspec_lab.evaluation.equality import find_flip, largest_gap, verdict

    seen: dict[Any, Any] = {}
    found = {}
    for entry in entries:
        texts = [(int(name), text) for run in entry.runs for name, text in run.generations.items()]
        flips = []
        for index, text in texts:
            key = (index % len(prompts), tuple(text.token_ids))
            if key not in seen:
                seen[key] = find_flip(target, prompts[key[0]], plain[key[0]], text.token_ids)
            flips.append(seen[key])
        value = verdict([text for _, text in texts], flips)
        if value == "inconclusive" and all(run.summary.drafted == 0 for run in entry.runs):
            value = True  # plain decoding, or a gate that let nobody draft: nothing that a verdict could miss
        found[entry.policy, entry.requests] = {"outputs_equal_plain": value, "max_flip_gap": largest_gap(flips)}
    return found


def policy_names(text: str, all_gated: bool) -> tuple[list[str], list[str]]:
    """(policies without gating, policies with it) of a comma-separated list; a name may end in `+gate`."""
    names = drafter_list(text)
    free = [name for name in names if not name.endswith(GATE)]
    gated = [name.removesuffix(GATE) for name in names if name.endswith(GATE)]
    return free, list(dict.fromkeys([*gated, *free])) if all_gated else gated


def _check_calibration(args: argparse.Namespace, calibration: Any, policies: Any, gamma: int) -> None:
    from dspec_lab.scheduler.policies import FixedLength, FullBlock

    if all(isinstance(policy, (FixedLength, FullBlock)) for policy in policies):
        raise ValueError(f"--calibration {args.calibration}: no policy of {args.policies} looks at confidences")
    if gamma > calibration.gamma and args.gamma is not None:
        raise ValueError(f"{args.calibration} calibrates {calibration.gamma} positions, gamma is {gamma}")


def _fixed_words(found: dict[str, Any]) -> str:
    ratios = ", ".join(f"{name} {ratio:.2f}" for name, ratio in found["ratio"].items())
    words = f"{found['requests']} requests: best of plain and fixed {found['best_fixed']}; of it {ratios or '-'}"
    if found.get("best_drafting") not in (None, found["best_fixed"]):
        ratios = ", ".join(f"{name} {ratio:.2f}" for name, ratio in found["ratio_to_drafting"].items())
        words += f"; of the best that drafts, {found['best_drafting']}, {ratios or '-'}"
    return words


def served_domains(name: str, count: int) -> list[str]:
    """Domains of `served_prompts`."""
    from dspec_lab.evaluation.prompts import load_prompts

    return [prompt.domain for prompt in load_prompts(name, count)]


def served_prompts(tokenizer: Any, name: str, count: int) -> list[list[int]]:
    """First turns of a prompt set, encoded; domains take turns in a mixed set."""
    from dspec_lab.evaluation.prompts import load_prompts
    from dspec_lab.verifier.decode import encode_chat

    return [encode_chat(tokenizer, prompt.turns[:1]) for prompt in load_prompts(name, count)]


def counts(text: str, what: str) -> tuple[int, ...]:
    """Whole numbers of a comma-separated list, rising; `ValueError` names what is none."""
    found = []
    for part in text.split(","):
        if not part.strip().isdigit() or int(part) < 1:
            raise ValueError(f"{what} must be whole and at least 1, got {part!r}")
        found.append(int(part))
    return tuple(sorted(set(found)))


def _loads(args: argparse.Namespace, requests: tuple[int, ...]) -> dict[int, Any]:
    import numpy as np

    from dspec_lab.serving.workload import ClosedLoop, OpenLoop, burst_arrivals, poisson_arrivals

    if args.rate is None:
        if args.burst != 1:
            raise ValueError(f"--burst {args.burst} belongs to an open loop: give --rate too")
        return {count: ClosedLoop(concurrency=count) for count in requests}
    rng = np.random.default_rng(args.seed)
    if args.burst > 1:
        times = burst_arrivals(args.rate, args.arrivals, args.burst, rng)
    else:
        times = poisson_arrivals(args.rate, args.arrivals, rng)
    return {count: OpenLoop(arrivals_s=times, max_active=count) for count in requests}


def _table(rows: list[dict[str, Any]], title: str) -> Any:
    from rich.table import Table

    from dspec_lab.evaluation.report import verdict_text

    table = Table(title=title, title_justify="left")
    for name in (
        "policy", "requests", "tok/s (range)", "user p50", "p95", "tokens a round", "budget", "waste", "starved",
        "equals plain",
    ):  # fmt: skip
        table.add_column(name, justify="left" if name in ("policy", "equals plain") else "right")
    for row in rows:
        table.add_row(
            row["policy"], str(row["requests"]),
            f"{row['throughput_tok_per_s']:.1f} ({row['throughput_min']:.1f}-{row['throughput_max']:.1f})",
            f"{row['user_p50_tok_per_s']:.1f}", f"{row['user_p95_tok_per_s']:.1f}", f"{row['accepted_length']:.2f}",
            f"{row['budget']:.2f}", f"{row['wasted_rows']:.0%}", str(row["most_starved_rounds"]),
            verdict_text(row["outputs_equal_plain"], row["max_flip_gap"]),
        )  # fmt: skip
    return table
