"""`dspec generate`: answer one prompt, streaming; with `--show-rounds`, where each token came from."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from dspec_lab.cli.options import (
    add_confidence_options,
    add_decode_options,
    add_target_options,
    check_confidence,
    decode_config,
    dressed,
    load_models,
    within_reach,
)
from dspec_lab.cli.output import add_json_option, check_json_target, text_console, write_result

STYLES = {"draft": "green", "replacement": "bold red", "bonus": "bold cyan", "prefill": "dim", "plain": ""}
# what stands around a token where there is no colour
MARKS = {"draft": ("[", "]"), "replacement": ("<", ">"), "bonus": ("{", "}"), "prefill": ("", ""), "plain": ("", "")}


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the verb's parser to `subparsers`."""
    parser = subparsers.add_parser(
        "generate",
        help="answer one prompt with a drafter, streaming",
        description="Answer one prompt. The output law is the target's, whatever the drafter.",
    )
    parser.add_argument("message", nargs="?", help="the user's message, or - to read it from standard input")
    parser.add_argument("--prompt", help="the same as an option, for messages that begin with a dash")
    parser.add_argument(
        "--drafter", default="prompt_lookup", help="a name, NAME=CHECKPOINT, or none (default: prompt_lookup)"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--show-rounds", action="store_true", help="show rounds and the source of each token")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="stop before this text; repeatable")
    parser.add_argument("--raw", action="store_true", help="continue the text itself, without the chat template")
    parser.add_argument("--ignore-eos", action="store_true", help="go on past end tokens")
    add_decode_options(parser, max_new_tokens=256)
    add_confidence_options(parser)
    add_target_options(parser)
    add_json_option(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Stream the answer, then one line of numbers."""
    import sys

    from dspec_lab.bench.record import run_record
    from dspec_lab.core.acceptance import acceptance_stats
    from dspec_lab.evaluation.drafters import build_drafters, check_names
    from dspec_lab.verifier.decode import encode_chat, generate

    check_json_target(args.json)
    plain = args.drafter == "none"
    if not plain:
        check_names([args.drafter])
    calibration = check_confidence(args, [args.drafter])
    config = decode_config(
        args, temperature=args.temperature, stop_strings=tuple(args.stop), ignore_eos=args.ignore_eos
    )
    if (args.message is None) == (args.prompt is None):
        raise ValueError("give one prompt: dspec generate TEXT, or --prompt TEXT")
    text = args.prompt if args.message is None else sys.stdin.read() if args.message == "-" else args.message
    if not text.strip():
        raise ValueError("the prompt is empty")
    target, tokenizer = load_models(args)
    drafter = None
    if not plain:
        built = build_drafters([args.drafter], target, draft_model=args.draft_model)
        (drafter,) = dressed(built, [args.drafter], args, calibration).values()
    config = within_reach(config, drafter, args)
    prompt_ids = list(tokenizer(text)["input_ids"]) if args.raw else encode_chat(tokenizer, [text])
    console = text_console(args.json)
    shown = RoundPrinter(console, tokenizer) if args.show_rounds else TextPrinter(console, tokenizer, args.stop)
    result = generate(target, drafter, prompt_ids, config, tokenizer=tokenizer, on_tokens=shown)
    shown.finish(result.text or "")
    stats = acceptance_stats(result.rounds)
    decoded = len(result.token_ids) - 1
    summary = f"{len(result.token_ids)} tokens, {result.finish_reason}"
    if result.decode_s and decoded:
        summary += f", {decoded / result.decode_s:.1f} tok/s after the first"
    if stats.rounds:
        summary += (
            f"; {stats.rounds} rounds, accepted length {stats.accepted_length:.2f}, "
            f"{stats.num_accepted} of {stats.num_proposed} drafts accepted"
        )
    console.print(summary, style="dim", markup=False)
    settings = {key: value for key, value in vars(args).items() if key not in ("run", "verb", "debug")}
    record = run_record(settings, args.seed, dtype=str(target.dtype).removeprefix("torch."), model=target.name)
    write_result(args.json, {"generation": asdict(result), "run": record})
    return 0


class TextPrinter:
    """Prints text as it becomes certain: half characters and what may yet be a stop string are held back."""

    def __init__(self, console: Any, tokenizer: Any, stop_strings: Sequence[str]) -> None:
        self._console, self._tokenizer = console, tokenizer
        self._held = max((len(stop) - 1 for stop in stop_strings), default=0)
        self._ids: list[int] = []
        self._printed = ""

    def __call__(self, token_ids: Sequence[int], sources: Sequence[str]) -> None:
        from dspec_lab.verifier.stopping import spell

        self._ids += token_ids
        text = spell(self._tokenizer, self._ids).rstrip("\ufffd")
        self._show(text[: len(text) - self._held] if self._held else text)

    def finish(self, text: str) -> None:
        """Print what is left of the final text."""
        self._show(text)
        self._console.print()

    def _show(self, text: str) -> None:
        if text.startswith(self._printed):
            self._console.out(text[len(self._printed) :], end="", highlight=False)
            self._printed = text


class RoundPrinter:
    """One line a round: tokens kept, coloured by source, and how many of the drafts they were."""

    def __init__(self, console: Any, tokenizer: Any) -> None:
        self._console, self._tokenizer = console, tokenizer
        self._ids: list[int] = []
        self._round = 0
        if console.is_terminal and not console.no_color:
            legend = "[green]draft accepted[/]  [bold red]replacement[/]  [bold cyan]bonus[/]"
        else:
            legend = r"\[draft accepted]  <replacement>  {bonus}"
        console.print(legend)

    def __call__(self, token_ids: Sequence[int], sources: Sequence[str]) -> None:
        from rich.text import Text

        line = Text(f"{self._round:>4}  ", style="dim")
        colour = self._console.is_terminal and not self._console.no_color
        for token, source in zip(token_ids, sources, strict=True):
            piece = repr(self._piece(token))[1:-1]
            before, after = ("", "") if colour else MARKS[source]
            line.append(f"{before}{piece}{after}", style=STYLES[source])
        self._console.print(line)
        self._round += 1

    def finish(self, text: str) -> None:
        """Print the whole text."""
        self._console.print()
        self._console.out(text, highlight=False)

    def _piece(self, token: int) -> str:
        # the text a token adds to what stands before it
        before = self._tokenizer.decode(self._ids[-8:]) if self._ids else ""
        after = self._tokenizer.decode([*self._ids[-8:], token])
        self._ids.append(token)
        return after[len(before) :] if after.startswith(before) else self._tokenizer.decode([token])
