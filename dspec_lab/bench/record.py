"""The record of a run: settings, seed, versions and machine, so that a number can be read later."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from dspec_lab import __version__

LIBRARIES = ("torch", "transformers", "tokenizers", "datasets", "numpy", "triton")


def run_record(
    settings: Any, seed: int | None, *, dtype: str | None = None, model: str | None = None
) -> dict[str, Any]:
    """JSON-ready record of one run: `settings` as resolved, `seed`, `dtype`, versions, threads, CPU and GPU, date.

    `settings` is a mapping or a dataclass. torch is asked about threads and the GPU only if it is loaded already:
    a run that never needed it stays quick, and those fields are None.
    """
    return {
        "settings": json_ready(settings),
        "seed": seed,
        "dtype": dtype,
        "model": model,
        "date_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        **machine(),
    }


def versions() -> dict[str, str | None]:
    """Version of Python, this package and the libraries it stands on; None where one is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "dspec_lab": __version__}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def machine() -> dict[str, Any]:
    """System, CPU name and cores, and, if torch is loaded, its thread count and the GPU's name."""
    torch = sys.modules.get("torch")
    gpu = None
    if torch is not None and torch.cuda.is_available():
        gpu = torch.cuda.get_device_name()
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "cpu_cores": usable_cores(),
        "threads": None if torch is None else torch.get_num_threads(),
        "gpu": gpu,
    }


def cpu_name() -> str:
    """The processor's name as the system gives it, else its architecture."""
    listing = Path("/proc/cpuinfo")
    if listing.is_file():
        for line in listing.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores this process may run on, which a container can set below what the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def wanted_threads() -> int:
    """CPU threads where none are asked for: OMP_NUM_THREADS, as libraries have it, or one for each core."""
    text = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # what follows is for nested regions
    if not text:
        return usable_cores()
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"OMP_NUM_THREADS must be a whole number of at least 1, got {text!r}")
    return int(text)


def json_ready(value: Any) -> Any:
    """`value` in JSON's own types: dataclasses and mappings as objects, paths as text. Others raise TypeError."""
    if is_dataclass(value) and not isinstance(value, type):
        return json_ready(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_ready(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a setting of type {type(value).__name__} cannot be recorded: {value!r}")
