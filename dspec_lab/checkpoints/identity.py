"""By what a checkpoint is told from another. No torch."""

from __future__ import annotations

from pathlib import Path

from dspec_lab.core.files import file_hash

WEIGHTS = "model.safetensors"


def checkpoint_hash(folder: Path | str) -> str:
    """sha256 of a checkpoint's weights; `ValueError` for a folder without any."""
    weights = Path(folder) / WEIGHTS
    if not weights.is_file():
        raise ValueError(f"{folder} is no checkpoint: it has no {weights.name}")
    return file_hash(weights)
