"""What a person sees of a run: a bar or lines with loss, acceptance, speed and time left; TensorBoard on request."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dspec_lab.training.fit import Display, StepReport

LINE_EVERY_S = 20.0  # between lines where there is no terminal


class ConsoleDisplay:
    """A moving bar on a terminal, a line now and then elsewhere; a line for each validation. Use it in a `with`."""

    def __init__(self, what: str) -> None:
        from rich.console import Console

        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._what, self._bar, self._task = what, None, None
        self._last = -LINE_EVERY_S

    def __enter__(self) -> ConsoleDisplay:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def on_step(self, report: StepReport) -> None:
        """Move the bar, or print a line if the last one is old enough."""
        line = step_line(report)
        if not self._console.is_terminal:
            if time.monotonic() - self._last >= LINE_EVERY_S or report.progress >= 1:
                self._last = time.monotonic()
                self._console.print(line, markup=False)
            return
        if self._bar is None:
            from rich import progress

            self._bar = progress.Progress(
                progress.TextColumn("{task.fields[what]}", markup=False),
                progress.BarColumn(bar_width=24),
                progress.TaskProgressColumn(),
                progress.TextColumn("{task.description}", markup=False),
                console=self._console,
            )
            self._bar.start()
            self._task = self._bar.add_task(line, total=1.0, what=self._what)
        self._bar.update(self._task, completed=report.progress, description=line)

    def on_validation(self, step: int, measures: Mapping[str, Any]) -> None:
        """Print the measures of each domain."""
        if not measures:
            self._console.print(f"step {step}: no prompt was held out, nothing to validate on", markup=False)
        for domain, row in measures.items():
            self._console.print(f"validation, step {step}, {domain}: {measure_line(row)}", markup=False)

    def on_lengths(self, lengths: Mapping[str, Any]) -> None:
        """Print the accepted lengths of the end."""
        if lengths:
            parts = ", ".join(f"{name} {row['accepted_length']:.2f}" for name, row in lengths.items())
            self._console.print(f"accepted length, greedy decoding of held-out prompts: {parts}", markup=False)


class ReadingDisplay:
    """A line now and then about features that are read ahead."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._started, self._last = time.monotonic(), -LINE_EVERY_S

    def __call__(self, step: int, tokens: int) -> None:
        """Print what was read up to now, if the last line is old enough."""
        now = time.monotonic()
        if now - self._last >= LINE_EVERY_S:
            self._last = now
            rate = tokens / max(now - self._started, 1e-9)
            self._console.print(f"step {step}: {tokens} tokens read, {rate:.0f} tok/s", markup=False)


class StepLog:
    """Keeps every report, for figures; prints nothing."""

    def __init__(self) -> None:
        self.steps: list[StepReport] = []
        self.validations: dict[int, Mapping[str, Any]] = {}
        self.lengths: Mapping[str, Any] = {}

    def on_step(self, report: StepReport) -> None:
        """Keep the report."""
        self.steps.append(report)

    def on_validation(self, step: int, measures: Mapping[str, Any]) -> None:
        """Keep the measures by step."""
        self.validations[step] = measures

    def on_lengths(self, lengths: Mapping[str, Any]) -> None:
        """Keep the accepted lengths of the end."""
        self.lengths = lengths


class TensorBoardDisplay:
    """Scalars of steps and validations in TensorBoard's format."""

    def __init__(self, folder: Path | str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError("a TensorBoard log needs the package tensorboard: pip install tensorboard") from error
        self._writer = SummaryWriter(str(folder))

    def on_step(self, report: StepReport) -> None:
        """Loss, expected accepted length, rates and speed."""
        for name in ("loss", "tau", "rate", "grad_norm", "tokens_per_s", "anchors_per_s"):
            self._writer.add_scalar(f"train/{name}", getattr(report, name), report.step)
        for k, value in enumerate(report.accept_rate):
            self._writer.add_scalar(f"train/accept_rate@{k}", value, report.step)

    def on_validation(self, step: int, measures: Mapping[str, Any]) -> None:
        """The measures of each domain."""
        for domain, row in measures.items():
            for name in ("tau", "tau_greedy"):
                if row[name] is not None:
                    self._writer.add_scalar(f"validation/{domain}/{name}", row[name], step)
        self._writer.flush()

    def on_lengths(self, lengths: Mapping[str, Any]) -> None:
        """Accepted length of each domain."""
        for domain, row in lengths.items():
            self._writer.add_scalar(f"on_policy/{domain}", row["accepted_length"], 0)
        self._writer.flush()


class Displays:
    """Several displays as one."""

    def __init__(self, displays: Sequence[Display]) -> None:
        self._displays = displays

    def on_step(self, report: StepReport) -> None:
        """Pass on to all."""
        for display in self._displays:
            display.on_step(report)

    def on_validation(self, step: int, measures: Mapping[str, Any]) -> None:
        """Pass on to all."""
        for display in self._displays:
            display.on_validation(step, measures)

    def on_lengths(self, lengths: Mapping[str, Any]) -> None:
        """Pass on to all."""
        for display in self._displays:
            display.on_lengths(lengths)


def step_line(report: StepReport) -> str:
    """One line about a step."""
    rates = " ".join(f"{value:.2f}".removeprefix("0") for value in report.accept_rate)
    return (
        f"step {report.step} loss {report.loss:.3f} tau {report.tau:.2f} accept {rates} lr {report.rate:.1e} "
        f"{report.tokens_per_s:.0f} tok/s {report.anchors_per_s:.0f} anchors/s left {clock(report.seconds_left)}"
    )


def measure_line(row: Mapping[str, Any]) -> str:
    """One line about a domain's validation."""

    def listed(values: Sequence[float | None]) -> str:
        return " ".join("-" if value is None else f"{value:.2f}".removeprefix("0") for value in values)

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    return (
        f"tau at T=1 {number(row['tau'])} (accept {listed(row['accept_rate'])}), "
        f"greedy {number(row['tau_greedy'])} (agree {listed(row['greedy_hit'])})"
    )


def clock(seconds: float) -> str:
    """h:mm:ss, or m:ss below an hour."""
    if seconds != seconds:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
