"""`dspec train`: a drafter from the target's responses."""

from __future__ import annotations

import argparse
from typing import Any

from dspec_lab.cli.options import load_models
from dspec_lab.cli.output import add_json_option, check_json_target, text_console, write_result


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the verb's parser to `subparsers`: one parser a drafter, and one to make responses."""
    from dspec_lab.cli import train_responses
    from dspec_lab.training.train_config import DRAFTERS

    parser = subparsers.add_parser(
        "train",
        help="train a drafter on the target's responses",
        description="Train a drafter, or make the responses to train on.",
    )
    kinds = parser.add_subparsers(dest="what", metavar="DRAFTER", required=True)
    for name in DRAFTERS:
        add_drafter_parser(kinds, name)
    train_responses.add_parser(kinds)
    return parser


def add_drafter_parser(kinds: Any, name: str) -> None:
    """Add the parser that trains the drafter `name`."""
    parser = kinds.add_parser(
        name,
        help=f"train {name}",
        description=f"Train {name}. A run that was cut short goes on where it stopped when the same command is given "
        "again. `accelerate launch --module dspec_lab.cli.main train ...` spreads it over processes.",
    )
    parser.add_argument("--responses", nargs="+", required=True, metavar="FILE", help="Parquet files of responses")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="checkpoint, state to resume from, history")
    parser.add_argument("--config", metavar="FILE", help="settings in YAML or JSON over the drafter's defaults")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="one setting; may be given several times"
    )
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--minutes", type=float, help="end after this long; the schedule follows the clock")
    budget.add_argument("--steps", type=int, help="optimiser steps")
    parser.add_argument("--seed", type=int, help="of weights, order and anchors")
    parser.add_argument(
        "--cache", metavar="FOLDER", help="where features are kept (default: features/ in the program's cache folder)"
    )
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--estimate", action="store_true", help="only say what the run would take")
    only.add_argument(
        "--read-ahead",
        action="store_true",
        help="only put the target's features for this run into the cache, last step first: started beside the run "
        "itself, it lets a second core read while the first one trains",
    )
    parser.add_argument("--tensorboard", metavar="FOLDER", help="also write a TensorBoard log")
    group = parser.add_argument_group("target")
    group.add_argument("--target", default="smollm2", help="smollm2 (default) or a model folder")
    group.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    group.add_argument("--threads", type=int, help="CPU threads (default: OMP_NUM_THREADS, else all cores)")
    add_json_option(parser)
    parser.set_defaults(train=run_drafter)


def run(args: argparse.Namespace) -> int:
    """Train a drafter, or make responses."""
    return args.train(args)


def run_drafter(args: argparse.Namespace) -> int:
    """Check the settings, say what the run will take, train."""
    from pathlib import Path

    from dspec_lab.core.files import cache_dir
    from dspec_lab.training.train_config import default_config, read_config

    check_json_target(args.json)
    changes = parse_settings(args.set)
    for name in ("minutes", "steps", "seed"):
        if getattr(args, name) is not None:
            changes[name] = getattr(args, name)
    if args.config is None:
        config = default_config(args.what, **changes)
    else:
        config = read_config(args.config, args.what, **changes)
    for path in args.responses:
        if not Path(path).is_file():
            raise FileNotFoundError(f"there is no file of responses {path}")
    out = Path(args.out)
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file, not a folder")
    cache = cache_dir() / "features" if args.cache is None else Path(args.cache)

    from dspec_lab.bench.record import run_record
    from dspec_lab.training.build import tapped_layers
    from dspec_lab.training.corpus import Corpus, feature_reader, read_corpus_files
    from dspec_lab.training.data import generation_prompt
    from dspec_lab.training.estimate import estimate
    from dspec_lab.training.fit import fit
    from dspec_lab.training.responses import count_tokens, read_responses

    accelerator = start_processes(args.device)
    args.dtype = config.precision
    if accelerator is not None:
        args.device = str(accelerator.device)
    target, tokenizer = load_models(args)
    target_config = lean_config(target, args.target)
    sets = read_corpus_files(args.responses, config, target.vocab_size, generation_prompt(tokenizer))
    first = accelerator is None or accelerator.is_main_process
    console = text_console(args.json)
    expected = estimate(config, target, sets, cache)
    if first:
        for line in expected.lines():
            console.print(line, markup=False)
    settings = {**config.to_dict(), "responses": [Path(path).name for path in args.responses], "target": args.target}
    record = run_record(settings, config.seed, dtype=config.precision, model=target.name)
    if args.estimate:
        from dataclasses import asdict

        write_result(args.json, {"estimate": asdict(expected), "run": record})
        return 0
    reader = feature_reader(config, target, tapped_layers(config, target))
    corpus = Corpus(sets, reader, config, cache)
    if args.read_ahead:
        from dspec_lab.training.progress import ReadingDisplay
        from dspec_lab.training.read_ahead import read_ahead

        if accelerator is not None:
            raise ValueError(f"--read-ahead runs in one process, not in {accelerator.num_processes}")
        tokens = read_ahead(corpus, config, ReadingDisplay())
        console.print(f"{tokens} tokens read into {cache}", markup=False)
        write_result(args.json, {"tokens_read": tokens, "run": record})
        return 0
    out.mkdir(parents=True, exist_ok=True)
    with displays(args, config.drafter, first) as display:
        result = fit(config, target, target_config, corpus, out, display=display, accelerator=accelerator)
    if first:
        from dspec_lab.training.card import write_card

        tokens = {Path(path).name: count_tokens(read_responses(path)) for path in args.responses}
        write_card(out / "checkpoint", config, result.state, tokens, target.name, record)
        minutes = result.state.seconds / 60
        console.print(f"{config.drafter}: {result.state.step} steps in {minutes:.1f} min, {result.checkpoint}")
        write_result(args.json, {"history": result.state.history, "run": record})
    return 0


def parse_settings(pairs: list[str]) -> dict[str, Any]:
    """Settings from NAME=VALUE; values are read as YAML (numbers, true, null, lists, else text)."""
    import yaml

    settings: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ValueError(f"--set needs NAME=VALUE, got {pair!r}")
        try:
            settings[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ValueError(f"--set {pair!r}: {' '.join(str(error).split())}") from error
    return settings


def start_processes(device: str) -> Any:
    """An accelerator if this is one of several processes, else None."""
    import os

    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return None
    from accelerate import Accelerator

    return Accelerator(cpu=device == "cpu")


def lean_config(target: Any, name: str) -> dict[str, Any]:
    """The target's config.json; training reads its weights directly, so it must be a lean decoder."""
    from pathlib import Path

    from dspec_lab.core.files import read_json
    from dspec_lab.models.decoder import LeanDecoder
    from dspec_lab.models.fetch import default_model_folder

    if not isinstance(target, LeanDecoder):
        raise ValueError(f"training needs a target that the lean decoder runs, and a local folder; {name} is neither")
    folder = default_model_folder() if name == "smollm2" else Path(name).expanduser()
    return read_json(folder / "config.json")


def displays(args: argparse.Namespace, what: str, first: bool) -> Any:
    """The displays of this process, to be used in a `with`."""
    from contextlib import contextmanager

    from dspec_lab.training.progress import ConsoleDisplay, Displays, TensorBoardDisplay

    @contextmanager
    def opened() -> Any:
        board = [TensorBoardDisplay(args.tensorboard)] if args.tensorboard and first else []
        with ConsoleDisplay(what) as console:
            yield Displays([console, *board] if first else board)

    return opened()
