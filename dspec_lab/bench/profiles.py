"""The records of runs in the data folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dspec_lab.core.files import data_dir, read_json


def kernel_records(folder: Path | None = None) -> dict[str, dict[str, Any]]:
    """Records of the kernel benchmark by file name; empty where no GPU has run it yet."""
    folder = folder or data_dir() / "profiles"
    return {path.name: read_json(path) for path in sorted(folder.glob("kernels_*.json"))}
