"""Rounds of a drafter on prompts that nobody was trained on, many requests a pass: what calibration is judged on.

    python -m dspec_lab.bench.fresh_trace OUT.parquet --source chat --count 400 --without data/responses/*.parquet

A bundled set of prompts is small, and the calibration error of few rounds is mostly noise (its `floor`). Own generators
and the target itself (`self-chat`) give as many prompts as are wanted; those that occur in the responses named by
`--without` are left out. Times in such a trace are shares of a batch's pass: judge speed with `dspec eval`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dspec_lab.bench.record import wanted_threads
from dspec_lab.config import DecodeConfig
from dspec_lab.drafters.protocol import Drafter
from dspec_lab.models.decoder import LeanDecoder
from dspec_lab.verifier.ragged import BatchRequest, generate_batch
from dspec_lab.verifier.trace import trace_rows, write_trace

GROUP = 64  # prompts whose generations are held at a time


def fresh_prompts(
    sources: Sequence[str],
    count: int,
    seed: int,
    target: LeanDecoder,
    tokenizer: Any,
    without: Sequence[Path | str] = (),
    *,
    longest: int | None = None,
) -> dict[str, tuple[str, list[int]]]:
    """(domain, token ids) by id of at most `count` prompts of each source; none whose ids are a prompt of `without`.

    None has more than `longest` tokens.
    """
    from dspec_lab.training.prompts.sources import gather
    from dspec_lab.training.responses import read_responses
    from dspec_lab.verifier.decode import encode_chat

    known = {tuple(response.prompt_ids.tolist()) for path in without for response in read_responses(path)}
    found: dict[str, tuple[str, list[int]]] = {}
    too_long = 0  # one prompt that does not fit would end the whole run
    for index, prompt in enumerate(gather(sources, count, seed, target, tokenizer)):
        ids = encode_chat(tokenizer, prompt.turns)
        if longest is not None and len(ids) > longest:
            too_long += 1
        elif tuple(ids) not in known:
            found[f"{prompt.source}/{seed}/{index:04d}"] = prompt.domain, ids
    if not found:
        more = f", or one of {too_long} with more than {longest} tokens" if too_long else ""
        raise ValueError(f"every prompt of {', '.join(sources)} with seed {seed} is among the responses left out{more}")
    if too_long:
        print(f"{too_long} prompts of more than {longest} tokens are left out", file=sys.stderr)
    return found


def fresh_rows(
    target: LeanDecoder,
    drafter: Drafter,
    prompts: Mapping[str, tuple[str, Sequence[int]]],
    config: DecodeConfig,
    *,
    batch: int = 16,
) -> Iterator[dict[str, Any]]:
    """Trace rows of each prompt's rounds, `batch` requests a pass; the texts are those of single requests."""
    names = list(prompts)
    for at in range(0, len(names), GROUP):
        group = names[at : at + GROUP]
        wanted = [
            BatchRequest(request_id=name, prompt_ids=tuple(prompts[name][1]), config=config, drafter=drafter)
            for name in group
        ]
        for name, generation in generate_batch(target, wanted, max_active=batch, trace=True).items():
            yield from trace_rows(
                generation, request_id=name, prompt_id=name, domain=prompts[name][0], drafter=drafter.name,
                temperature=config.temperature,
            )  # fmt: skip


def compact(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with chances and entropies to four decimals and times to ten microseconds, which pack into a third."""
    kept = dict(row)
    for name in ("confidence", "accept_prob", "target_entropy_bits", "draft_entropy_bits"):
        kept[name] = [round(value, 4) for value in row[name]]
    for name in ("draft_s", "verify_s", "overhead_s"):
        kept[name] = round(row[name], 5)
    return kept


def main(argv: Sequence[str] | None = None) -> int:
    """Gather prompts, decode them, write the trace."""
    parser = argparse.ArgumentParser(description="Rounds of a drafter on fresh prompts, as a trace.")
    parser.add_argument("out", help="the Parquet file to write")
    parser.add_argument("--source", nargs="+", default=["chat"], help="as of dspec train responses (default: chat)")
    parser.add_argument("--count", type=int, default=400, help="prompts of each source (default: 400)")
    parser.add_argument("--seed", type=int, default=71, help="of the prompts (default: 71)")
    parser.add_argument("--without", nargs="*", default=[], metavar="FILE", help="responses whose prompts are left out")
    parser.add_argument("--drafter", default="dspark", help="name, or NAME=CHECKPOINT (default: dspark)")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--gamma", type=int, default=7)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--batch", type=int, default=16, help="requests a pass (default: 16)")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args(argv)
    try:
        return _record(args)
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))


def _record(args: argparse.Namespace) -> int:
    import torch

    from dspec_lab.evaluation.drafters import build_drafters
    from dspec_lab.models.load import load_target, load_tokenizer, parse_dtype
    from dspec_lab.training.prompts.sources import check_source

    out = Path(args.out)
    if out.suffix != ".parquet" or not out.resolve().parent.is_dir():
        raise ValueError(f"{args.out}: give a .parquet file in a folder that exists")
    for name in args.source:
        check_source(name)
    for name, value in (("count", args.count), ("batch", args.batch), ("threads", args.threads)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    config = DecodeConfig(gamma=args.gamma, max_new_tokens=args.max_new_tokens, temperature=args.temperature)
    torch.set_num_threads(wanted_threads() if args.threads is None else args.threads)
    target = load_target(args.target, parse_dtype(args.dtype, args.device), args.device)
    if not isinstance(target, LeanDecoder):
        raise ValueError(f"only lean decoders run many requests a pass; {target.name} is another kind")
    tokenizer = load_tokenizer(args.target)
    ((_, drafter),) = build_drafters([args.drafter], target).items()
    longest = target.max_context - args.max_new_tokens
    if longest < 1:
        raise ValueError(f"max-new-tokens {args.max_new_tokens} leave no room in a context of {target.max_context}")
    prompts = fresh_prompts(args.source, args.count, args.seed, target, tokenizer, args.without, longest=longest)
    rows = [compact(row) for row in fresh_rows(target, drafter, prompts, config, batch=args.batch)]
    print(f"{len(rows)} rounds of {len(prompts)} prompts written to {write_trace(out, rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
