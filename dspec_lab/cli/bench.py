"""`dspec bench`: time the default model: decode (beside transformers' `generate`), ragged batches, trees."""

from __future__ import annotations

import argparse
from typing import Any

from dspec_lab.cli.options import drafter_list
from dspec_lab.cli.output import add_json_option, check_json_target, text_console, write_result


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the verb's parser to `subparsers`."""
    parser = subparsers.add_parser(
        "bench",
        help="time the decoding loop",
        description="Time the default model. decode: plain decoding, drafters and transformers' generate. ragged: one "
        "pass for 1, 4 and 16 requests against single passes, the gain that the cost curve allows, and drafting in one "
        "pass against one by one. trees: accepted length and time of trees of width 1, 2 and 3.",
    )
    parser.add_argument("what", nargs="?", default="decode", help="decode (default), ragged or trees")
    parser.add_argument(
        "--drafters",
        help="names, separated by commas (default: prompt_lookup; trees: autoregressive; ragged: one, dspark)",
    )
    parser.add_argument("--prompts", default="all", help="prompt file or bundled set (default: all)")
    parser.add_argument("--samples", type=int, default=3, help="prompts (default: 3)")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens per prompt (default: 64)")
    parser.add_argument("--gamma", type=int, help="drafted tokens per round (default: 7; trees: 4); not for ragged")
    parser.add_argument("--repeats", type=int, default=5, help="default: 5")
    parser.add_argument("--dtype", default="bf16", help="fp32 or bf16 (default: bf16)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    add_json_option(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print ratios and times; the record goes to `--json`."""
    if args.what not in ("decode", "ragged", "trees"):
        raise ValueError(f"dspec bench times decode, ragged or trees, got {args.what!r}")
    if args.what == "ragged" and args.gamma is not None:
        raise ValueError("dspec bench ragged has its own draft lengths: leave --gamma out")
    usual = {"decode": "prompt_lookup", "trees": "autoregressive", "ragged": "dspark"}
    args.drafters = args.drafters or usual[args.what]
    args.gamma = args.gamma or (4 if args.what == "trees" else 7)
    if args.what != "decode":
        from dspec_lab.cli.bench_batches import run_batches

        return run_batches(args)
    import torch
    from rich.table import Table

    from dspec_lab.bench.decode import bench_decode, load_hub_model
    from dspec_lab.bench.record import run_record
    from dspec_lab.evaluation.drafters import build_drafters, check_names
    from dspec_lab.evaluation.prompts import load_prompts
    from dspec_lab.models.decoder import LeanDecoder
    from dspec_lab.models.fetch import ensure_smollm2
    from dspec_lab.models.load import load_tokenizer, parse_dtype
    from dspec_lab.verifier.decode import encode_chat

    check_json_target(args.json)
    names = check_names(drafter_list(args.drafters))
    if args.threads < 1:
        raise ValueError(f"threads must be at least 1, got {args.threads}")
    prompts = load_prompts(args.prompts, args.samples)
    dtype = parse_dtype(args.dtype, "cpu")
    torch.set_num_threads(args.threads)
    folder = ensure_smollm2()
    target, tokenizer = LeanDecoder.from_folder(folder, dtype=dtype), load_tokenizer("smollm2")
    console = text_console(args.json)
    result = bench_decode(
        target,
        build_drafters(names, target),
        [encode_chat(tokenizer, prompt.turns[:1]) for prompt in prompts],
        hub_model=load_hub_model(folder, dtype),
        new_tokens=args.new_tokens,
        gamma=args.gamma,
        repeats=args.repeats,
        progress=lambda text: text_console("-").print(text, style="dim"),
    )
    table = Table(title=f"{target.name}, {args.dtype}, {args.threads} threads, {target.ops.name} row ops")
    for name in ("decoder", "ms per token", "speed-up over plain"):
        table.add_column(name, justify="left" if name == "decoder" else "right")
    for name, times in result["ms_per_token"].items():
        ratio = result["speedup_over_plain"][name]
        table.add_row(
            name,
            f"{times['median']:.1f} [{times['min']:.1f}, {times['max']:.1f}]",
            f"{ratio['median']:.2f} [{ratio['min']:.2f}, {ratio['max']:.2f}]",
        )
    console.print(table)
    console.print("median over repeats [least, most]; greedy, prefill left out")
    console.print(f"lean plain loop over generate: {result['plain_over_generate']['median']:.2f}x")
    for name, shares in result["overhead_share"].items():
        text = ", ".join(f"{at} {s['share']:.1%} ({s['ms_per_round']:.2f} ms a round)" for at, s in shares.items())
        console.print(f"loop overhead with {name}: {text}")
    settings = {key: value for key, value in vars(args).items() if key not in ("run", "verb", "debug", "json")}
    record = run_record({**settings, "row_ops": target.ops.name}, seed=0, dtype=args.dtype, model=target.name)
    write_result(args.json, {**result, "run": record})
    return 0
