"""The card of a trained drafter: what it was trained on, for how long, how its measures went, how to do it again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspec_lab.core.files import read_json, write_json, write_text
from dspec_lab.training.budget import TRAINING, stages_of
from dspec_lab.training.state import RunState
from dspec_lab.training.train_config import TrainConfig


def write_card(
    folder: Path,
    config: TrainConfig,
    state: RunState,
    tokens: Mapping[str, Mapping[str, int]],
    target: str,
    record: Mapping[str, Any],
) -> Path:
    """Write `README.md` and `training.json` beside the weights. `tokens` are response tokens by file and domain."""
    before = None
    if config.start_from is not None:
        held = Path(config.start_from) / TRAINING
        before = read_json(held) if held.is_file() else {}
    about = {"history": state.history, "data": tokens, "run": record}
    write_json(folder / TRAINING, about if before is None else {**about, "before": before})
    minutes = state.seconds / 60
    lines = [
        f"# {config.drafter} for {target}",
        "",
        f"{state.step} steps of {config.sequences_per_step} sequences, {state.anchors} blocks or positions, "
        f"{minutes:.0f} min on {record['cpu'] if record['gpu'] is None else record['gpu']} with {record['threads']} "
        f"threads, seed {config.seed}.",
        "",
        *_earlier(before),
        "## Data",
        "",
        "| file | response tokens |",
        "|---|---|",
        *(
            f"| {Path(name).name} | {', '.join(f'{domain} {count}' for domain, count in counts.items())} |"
            for name, counts in tokens.items()
        ),
        "",
        f"A share of {config.validation_share} of the prompts is held out; the measures below are from it.",
        "",
        "## Course",
        "",
        "tau is the expected accepted length at temperature 1 for blocks that start anywhere, with 1 - TV at each",
        "position; greedy counts agreeing largest tokens on greedy responses. `training.json` has every position.",
        "",
        *_course(state.history),
        "",
        *_lengths(state.history),
        "## Again",
        "",
        "Settings that differ from none are left at their defaults; all are in `config.json` under training_config.",
        f"`dspec train {config.drafter} --responses FILE... --out FOLDER --config training_config.yaml`",
        "",
    ]
    return write_text(folder / "README.md", "\n".join(lines))


def _earlier(before: Mapping[str, Any] | None) -> list[str]:
    if before is None:
        return []
    if not before.get("history"):
        return ["The run went on from an earlier checkpoint, which has no record of its training.", ""]
    last, passed = before["history"][-1], sum(stage.positions for stage in stages_of(before))
    data = "; ".join(
        f"{name}: {', '.join(f'{domain} {count}' for domain, count in counts.items())}"
        for name, counts in before.get("data", {}).items()
    )
    return [
        f"The run went on from a checkpoint of {last['step']} steps ({last['anchors']} blocks or positions, "
        f"{last['minutes']:.0f} min; response tokens {data}); its record is under `before` in `{TRAINING}`. "
        f"With its own earlier stages that one had passed {passed} positions.",
        "",
    ]


def _lengths(history: list[dict[str, Any]]) -> list[str]:
    lengths = history[-1].get("on_policy", {}) if history else {}
    if not lengths:
        return []
    parts = [f"{name} {row['accepted_length']:.2f} ({row['rounds']} rounds)" for name, row in lengths.items()]
    return ["Accepted length of greedy decoding on a few held-out prompts: " + ", ".join(parts) + ".", ""]


def _course(history: list[dict[str, Any]]) -> list[str]:
    domains = [name for name in (history[-1]["measures"] if history else {})]
    head = ["step", "minutes", *(f"{name}: tau, greedy" for name in domains)]
    rows = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for entry in history:
        cells = [str(entry["step"]), f"{entry['minutes']:.1f}"]
        for name in domains:
            row = entry["measures"].get(name, {})
            cells.append(", ".join("-" if row.get(key) is None else f"{row[key]:.2f}" for key in ("tau", "tau_greedy")))
        rows.append("| " + " | ".join(cells) + " |")
    return rows
