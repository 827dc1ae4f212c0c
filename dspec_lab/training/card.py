"""The card of a trained drafter: what it was trained on, for how long, how its measures went, how to do it again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspec_lab.core.files import write_json, write_text
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
    write_json(folder / "training.json", {"history": state.history, "data": tokens, "run": record})
    minutes = state.seconds / 60
    lines = [
        f"# {config.drafter} for {target}",
        "",
        f"{state.step} steps of {config.sequences_per_step} sequences, {state.anchors} blocks or positions, "
        f"{minutes:.0f} min on {record['cpu'] if record['gpu'] is None else record['gpu']} with {record['threads']} "
        f"threads, seed {config.seed}.",
        "",
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
