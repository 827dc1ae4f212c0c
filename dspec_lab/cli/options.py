"""Options that several verbs share."""

from __future__ import annotations

import argparse
from typing import Any

from dspec_lab.config import VERIFICATIONS, DecodeConfig


def add_target_options(parser: argparse.ArgumentParser) -> None:
    """Which target, in which dtype, on which device, with how many threads."""
    group = parser.add_argument_group("target")
    group.add_argument("--target", default="smollm2", help="smollm2 (default), a model folder, or a hub name")
    group.add_argument("--dtype", default="auto", help="auto, fp32, bf16 or fp16 (default: auto)")
    group.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    group.add_argument("--threads", type=int, help="CPU threads (default: all cores)")
    group.add_argument("--draft-model", metavar="MODEL", help="model folder or hub name for the drafter autoregressive")


def add_decode_options(parser: argparse.ArgumentParser, *, max_new_tokens: int) -> None:
    """The settings of `DecodeConfig`, temperature apart."""
    group = parser.add_argument_group("decoding")
    group.add_argument("--gamma", type=int, default=7, help="drafted tokens per round (default: 7)")
    group.add_argument("--top-k", type=int, default=0, help="keep the k most likely tokens; 0 keeps all (default)")
    group.add_argument("--top-p", type=float, default=1.0, help="keep the most likely tokens of this mass (default: 1)")
    group.add_argument("--max-new-tokens", type=int, default=max_new_tokens, help=f"default: {max_new_tokens}")
    group.add_argument("--verification", default="token", help=f"{' or '.join(VERIFICATIONS)} (default: token)")
    group.add_argument("--seed", type=int, default=0, help="of the random streams (default: 0)")


def decode_config(args: argparse.Namespace, **more: Any) -> DecodeConfig:
    """The `DecodeConfig` of parsed options; `ValueError` names a bad value."""
    return DecodeConfig(
        gamma=args.gamma,
        top_k=args.top_k,
        top_p=args.top_p,
        max_new_tokens=args.max_new_tokens,
        verification=args.verification,
        seed=args.seed,
        **more,
    )


def drafter_list(text: str) -> tuple[str, ...]:
    """Names of a comma-separated list."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def load_models(args: argparse.Namespace) -> tuple[Any, Any]:
    """(target, tokenizer) of parsed options."""
    import torch

    from dspec_lab.bench.record import usable_cores
    from dspec_lab.models.load import load_target, load_tokenizer, parse_dtype

    threads = usable_cores() if args.threads is None else args.threads
    if threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    torch.set_num_threads(threads)
    target = load_target(args.target, parse_dtype(args.dtype, args.device), args.device)
    return target, load_tokenizer(args.target)
