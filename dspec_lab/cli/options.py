"""Options that several verbs share."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dspec_lab.config import VERIFICATIONS, DecodeConfig
from dspec_lab.evaluation import lengths
from dspec_lab.evaluation.lengths import USUAL_GAMMA


def add_target_options(parser: argparse.ArgumentParser) -> None:
    """Which target, in which dtype, on which device, with how many threads."""
    group = parser.add_argument_group("target")
    group.add_argument("--target", default="smollm2", help="smollm2 (default), a model folder, or a hub name")
    group.add_argument("--dtype", default="auto", help="auto, fp32, bf16 or fp16 (default: auto)")
    group.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    group.add_argument("--threads", type=int, help="CPU threads (default: OMP_NUM_THREADS, else all cores)")
    group.add_argument("--draft-model", metavar="MODEL", help="model folder or hub name for the drafter autoregressive")


def add_decode_options(parser: argparse.ArgumentParser, *, max_new_tokens: int, several_lengths: bool = False) -> None:
    """The settings of `DecodeConfig`, temperature apart. With `several_lengths` `--gamma` is a list, read as text."""
    group = parser.add_argument_group("decoding")
    usual = f"default: {USUAL_GAMMA}, or as many as the drafter was trained for"
    if several_lengths:
        group.add_argument("--gamma", help=f"drafted tokens per round, one or several separated by commas ({usual})")
    else:
        group.add_argument("--gamma", type=int, help=f"drafted tokens per round ({usual})")
    group.add_argument("--top-k", type=int, default=0, help="keep the k most likely tokens; 0 keeps all (default)")
    group.add_argument("--top-p", type=float, default=1.0, help="keep the most likely tokens of this mass (default: 1)")
    group.add_argument("--max-new-tokens", type=int, default=max_new_tokens, help=f"default: {max_new_tokens}")
    group.add_argument("--verification", default="token", help=f"{' or '.join(VERIFICATIONS)} (default: token)")
    group.add_argument("--seed", type=int, default=0, help="of the random streams (default: 0)")


def decode_config(args: argparse.Namespace, **more: Any) -> DecodeConfig:
    """The `DecodeConfig` of parsed options; `ValueError` names a bad value. Without `--gamma` the usual length."""
    return DecodeConfig(
        gamma=more.pop("gamma", USUAL_GAMMA if args.gamma is None else args.gamma),
        top_k=args.top_k,
        top_p=args.top_p,
        max_new_tokens=args.max_new_tokens,
        verification=args.verification,
        seed=args.seed,
        **more,
    )


def within_reach(config: DecodeConfig, drafter: Any, args: argparse.Namespace) -> DecodeConfig:
    """`config` as it is where `--gamma` was given; else with no more tokens a round than the drafter can draft."""
    if args.gamma is not None or drafter is None:
        return config
    return replace(config, gamma=lengths.within_reach({drafter.name: drafter}, config.gamma)[drafter.name])


def drafter_list(text: str) -> tuple[str, ...]:
    """Names of a comma-separated list."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def load_models(args: argparse.Namespace) -> tuple[Any, Any]:
    """(target, tokenizer) of parsed options."""
    import torch

    from dspec_lab.bench.record import wanted_threads
    from dspec_lab.models.load import load_target, load_tokenizer, parse_dtype

    threads = wanted_threads() if args.threads is None else args.threads
    if threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    torch.set_num_threads(threads)
    target = load_target(args.target, parse_dtype(args.dtype, args.device), args.device)
    return target, load_tokenizer(args.target)


def add_confidence_options(parser: argparse.ArgumentParser) -> None:
    """What to do with a drafter's confidences: calibrate them, cut the block by them."""
    group = parser.add_argument_group("confidence")
    group.add_argument("--calibration", metavar="FILE", help="calibrate confidences with this file of dspec calibrate")
    group.add_argument(
        "--confidence-threshold", type=float, metavar="C",
        help="cut a block before the first draft whose survival is below C (default: whole blocks)",
    )  # fmt: skip


def check_confidence(args: argparse.Namespace, names: Sequence[str]) -> Any:
    """The calibration of parsed options, or None. Checked before a model is loaded; a file nobody uses is refused."""
    threshold = args.confidence_threshold
    if threshold is not None and not 0 <= threshold <= 1:
        raise ValueError(f"the confidence threshold must lie in 0..1, got {threshold}")
    if args.calibration is None:
        return None
    from dspec_lab.calibration.calibration import load_calibration

    calibration = load_calibration(args.calibration)
    if not any(fits(calibration, name) for name in names):
        wanted = calibration.provenance.drafter
        raise ValueError(f"{args.calibration} was fitted for the drafter {wanted!r}, not for {', '.join(names)}")
    return calibration


def fits(calibration: Any, given: str) -> bool:
    """Whether a drafter named NAME or NAME=FOLDER is the one that the calibration was fitted for."""
    from dspec_lab.calibration.drafters import refuse_other_drafter

    try:
        refuse_other_drafter(calibration, given.partition("=")[0], weights_hash(calibration, given))
    except ValueError:
        return False
    return True


def weights_hash(calibration: Any, given: str) -> str | None:
    """sha256 of the weights behind NAME or NAME=FOLDER, where the calibration has one to compare with."""
    from dspec_lab.checkpoints.identity import checkpoint_hash
    from dspec_lab.evaluation.drafters import TRAINED, split_name, trained_folder

    name, folder = split_name(given)
    if folder is None and name in TRAINED:
        folder = trained_folder(name)
    return None if folder is None or calibration.provenance.drafter_hash is None else checkpoint_hash(folder)


def dressed(drafters: Mapping[str, Any], names: Sequence[str], args: argparse.Namespace, calibration: Any) -> dict:
    """The drafters as the options want them; a changed one goes by its new name. `names` are in their order."""
    from dspec_lab.calibration.drafters import dress_drafter

    made = {}
    for (name, drafter), given in zip(drafters.items(), names, strict=True):
        mine = calibration if calibration is not None and fits(calibration, given) else None
        known = None if mine is None else weights_hash(mine, given)
        new = dress_drafter(drafter, calibration=mine, threshold=args.confidence_threshold, drafter_hash=known)
        made[name if new is drafter else new.name] = new
    return made
