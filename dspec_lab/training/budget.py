"""How much training a checkpoint has had: its stages and the positions passed in them, from `training.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspec_lab.core.files import read_json

TRAINING = "training.json"  # beside the weights, written by `training.card`


@dataclass(frozen=True, slots=True)
class Stage:
    """One run of training. `history` are its validations, `data` response tokens by file and domain."""

    first_position: int  # positions (blocks, for block drafters) passed in the stages before
    history: Sequence[Mapping[str, Any]]
    data: Mapping[str, Mapping[str, int]]

    @property
    def positions(self) -> int:
        """Positions passed in this stage."""
        return int(self.history[-1]["anchors"])


def stages_of(record: Mapping[str, Any]) -> list[Stage]:
    """The stages of a training record, oldest first.

    Stages of the confidence head alone move no drafts and are left out. Raises `ValueError` for one without history.
    """
    found, at = [], record
    while at:
        if not at.get("history"):
            raise ValueError(f"a stage of training has no history, only {', '.join(at) or 'nothing'}")
        if at.get("run", {}).get("settings", {}).get("trained_part") != "confidence":
            found.append(at)
        at = at.get("before", {})
    stages, passed = list[Stage](), 0
    for stage in reversed(found):
        stages.append(Stage(passed, stage["history"], stage["data"]))
        passed += stages[-1].positions
    return stages


def read_stages(folder: Path | str) -> list[Stage]:
    """`stages_of` the record in a checkpoint folder; `ValueError` where there is none."""
    path = Path(folder) / TRAINING
    if not path.is_file():
        raise ValueError(f"{folder} has no {TRAINING}, so nothing is known of its training")
    return stages_of(read_json(path))


def positions_trained(folder: Path | str) -> int:
    """Positions that a checkpoint's draft layers were trained on, over all stages."""
    last = read_stages(folder)[-1]
    return last.first_position + last.positions
