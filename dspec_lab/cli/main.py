"""The `dspec` command. A verb is a module of this folder with `add_parser(subparsers)` and `run(args) -> int`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from dspec_lab import __version__

# (verb, one line of help), in the order of a first visit. A verb whose module is not there yet is left out.
VERBS = (
    ("doctor", "check this machine: versions, speed support, model, tools"),
    ("fetch", "get the default model into the cache"),
    ("demo", "plain decoding against every drafter on bundled prompts"),
    ("generate", "answer one prompt with a drafter, streaming"),
    ("eval", "accepted length, rates and speed-up of drafters on prompts"),
    ("audit", "test that decoding is lossless"),
    ("train", "train a drafter on the target's responses"),
    ("calibrate", "fit a drafter's confidences to what was accepted"),
    ("profile", "time the target by rows and context: the scheduler's cost table"),
    ("serve-bench", "the batched engine under load, policy by policy"),
    ("simulate", "policies under load, without a model"),
    ("bench", "time the decoding loop"),
    ("notebooks", "run, check and list the notebooks"),
)


class OneLineParser(argparse.ArgumentParser):
    """A parser that takes no shortened options and says what is wrong in one line. Its subparsers do the same."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"dspec: error: {message} (see {self.prog} --help)\n")


def build_parser(verb: str | None = None) -> argparse.ArgumentParser:
    """The parser of `dspec`. Only `verb` gets its options: the other modules are not imported."""
    parser = OneLineParser(
        prog="dspec",
        description="Speculative decoding on a real model: draft cheaply, verify in one pass, keep the target's law.",
    )
    parser.add_argument("--version", action="version", version=f"dspec_lab {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, line in available_verbs():
        if name == verb:
            module(name).add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=line, add_help=False)
    for sub in subparsers.choices.values():
        sub.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
        )
    return parser


def available_verbs() -> list[tuple[str, str]]:
    """Verbs whose module exists, with their line of help."""
    here = Path(__file__).parent
    return [(name, line) for name, line in VERBS if (here / f"{_module_name(name)}.py").is_file()]


def module(verb: str) -> Any:
    """The module of `verb`, imported."""
    return importlib.import_module(f"dspec_lab.cli.{_module_name(verb)}")


def _module_name(verb: str) -> str:
    return verb.replace("-", "_")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status of `dspec` with these arguments: 0 done, 1 a check failed, 2 bad input, 130 stopped by Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    named = next((word for word in arguments if not word.startswith("-")), None)
    debug = False
    try:
        args = build_parser(named).parse_args(arguments)
        debug = args.debug
        return int(module(args.verb).run(args))
    except BrokenPipeError:  # the reader of stdout (head, less) went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError) as error:
        if debug:
            raise
        print(f"dspec: error: {one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("dspec: stopped", file=sys.stderr)
        return 130


def one_line(error: BaseException) -> str:
    """The message of `error` on one line; its type where it has no message."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
