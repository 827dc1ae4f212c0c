"""What every verb does alike: `--json FILE`, tables, and lines of progress that stay out of the results."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from dspec_lab.core.files import json_text, write_text


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the option `--json FILE` (`-` is standard output)."""
    parser.add_argument("--json", metavar="FILE", help="also write the result as JSON; - is standard output")


def check_json_target(target: str | None) -> None:
    """Raise ValueError now, not after the work, when `target` cannot be written."""
    if target is None or target == "-":
        return
    path = Path(target)
    if target == "" or path.is_dir():
        raise ValueError(f"--json {target!r} is a folder, give a file name or -")
    if not path.parent.is_dir():
        raise ValueError(f"--json {target}: there is no folder {path.parent}")


def write_result(target: str | None, result: Any) -> None:
    """Write `result` to the file of `--json`, whole, or to standard output for `-`; None writes nothing."""
    if target is None:
        return
    text = json_text(result)
    if target == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        write_text(target, text)


def text_console(target: str | None) -> Any:
    """Rich console for the text a person reads: standard output, or standard error while JSON takes that (`-`)."""
    from rich.console import Console

    console = Console(stderr=target == "-", highlight=False, soft_wrap=True)
    if not console.is_terminal:
        # a file or pipe has no width that a table must fold to
        console.width = 140
    return console


class ConsoleProgress:
    """Progress on standard error: a moving bar on a terminal, a line at each tenth elsewhere.

    Call it with (what is done, bytes done, bytes in all); 0 of 0 is a plain message. Use it in a `with` block.
    """

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._bar: Any = None
        self._task: Any = None
        self._label = ""
        self._tenth = -1

    def __enter__(self) -> ConsoleProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        if total <= 0:
            self._stop()
            self._console.print(what, markup=False)
        elif self._console.is_terminal:
            self._move_bar(what, done, total)
        else:
            self._print_tenths(what, done, total)

    def _move_bar(self, what: str, done: int, total: int) -> None:
        from rich import progress

        if self._bar is None or what != self._label:
            self._stop()
            self._bar = progress.Progress(
                progress.TextColumn("{task.description}", markup=False),
                progress.BarColumn(),
                progress.DownloadColumn(),
                progress.TransferSpeedColumn(),
                progress.TimeRemainingColumn(),
                console=self._console,
            )
            self._bar.start()
            self._task = self._bar.add_task(what, total=total)
            self._label = what
        self._bar.update(self._task, completed=done)

    def _print_tenths(self, what: str, done: int, total: int) -> None:
        if what != self._label:
            self._label, self._tenth = what, -1
        tenth = 10 * done // total
        if tenth != self._tenth:
            self._tenth = tenth
            self._console.print(f"{what}: {done / 1e6:.1f} of {total / 1e6:.1f} MB", markup=False)

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self._label = ""
