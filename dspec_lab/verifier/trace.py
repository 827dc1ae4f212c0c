"""Traces: one row a round, in Parquet. The one input of calibration, plots, simulator and viewer."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspec_lab.core.types import Generation

if TYPE_CHECKING:
    from datasets import Dataset

# column -> type; lists hold one entry per draft position 1..gamma of the round
_LISTS = {
    "draft_ids": "int32",
    "confidence": "float32",
    "accepted": "bool",
    "accept_prob": "float32",
    "target_entropy_bits": "float32",
    "draft_entropy_bits": "float32",
}
COLUMNS: Mapping[str, str] = {
    "request_id": "string",
    "prompt_id": "string",
    "domain": "string",
    "drafter": "string",
    "temperature": "float32",
    "round": "int32",
    "context_tokens": "int32",
    "gamma": "int32",
    "draft_ids": "list",
    "confidence": "list",
    "accepted": "list",
    "num_accepted": "int32",
    "accept_prob": "list",
    "target_entropy_bits": "list",
    "draft_entropy_bits": "list",
    "draft_s": "float64",
    "verify_s": "float64",
    "overhead_s": "float64",
}
# written when all rows have it; older traces do not
OPTIONAL: Mapping[str, str] = {
    "next_token": "int32",  # the target's own token that ended the round, -1 where an end token or a cap left none
}


def trace_rows(
    generation: Generation, *, request_id: str, prompt_id: str, domain: str, drafter: str, temperature: float
) -> list[dict[str, Any]]:
    """The rounds of one request as rows. A drafter without confidences or a law leaves those lists empty."""
    return [
        {
            "request_id": request_id,
            "prompt_id": prompt_id,
            "domain": domain,
            "drafter": drafter,
            "temperature": temperature,
            "round": record.round,
            "context_tokens": record.context_tokens,
            "gamma": record.gamma,
            "draft_ids": list(record.draft_ids),
            "confidence": list(record.confidence or ()),
            "accepted": [k < record.num_accepted for k in range(record.gamma)],
            "num_accepted": record.num_accepted,
            "accept_prob": list(record.accept_prob or ()),
            "target_entropy_bits": list(record.target_entropy_bits or ()),
            "draft_entropy_bits": list(record.draft_entropy_bits or ()),
            "draft_s": record.draft_s,
            "verify_s": record.verify_s,
            "overhead_s": record.overhead_s,
            "next_token": record.next_token if record.num_committed > record.num_accepted else -1,
        }
        for record in generation.rounds
    ]


def write_trace(path: Path | str, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write `rows` to a Parquet file, whole. Raises `ValueError` for rows of another schema or none at all."""
    from datasets import Dataset, Features, List, Value

    rows = list(rows)
    if not rows:
        raise ValueError(f"{path}: there are no rounds to write")
    columns = dict(COLUMNS) | {name: kind for name, kind in OPTIONAL.items() if name in rows[0]}
    for row in rows:
        if set(row) != set(columns):
            raise ValueError(f"a trace row lacks or adds columns: {sorted(set(row) ^ set(columns))}")
    features = Features(
        {name: List(Value(_LISTS[name])) if kind == "list" else Value(kind) for name, kind in columns.items()}
    )
    dataset = Dataset.from_list([dict(row) for row in rows], features=features)
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".parquet")
    os.close(handle)
    try:
        with _no_bars():
            dataset.to_parquet(temporary)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def read_trace(path: Path | str) -> Dataset:
    """The trace at `path`; `ValueError` names the columns that are missing."""
    from datasets import Dataset

    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no trace file {path}")
    with _no_bars():
        dataset = Dataset.from_parquet(str(path))
    missing = sorted(set(COLUMNS) - set(dataset.column_names))
    if missing:
        raise ValueError(f"{path} is not a trace: it lacks the columns {', '.join(missing)}")
    return dataset


@contextmanager
def _no_bars() -> Iterator[None]:
    # a bar for a file of this size only clutters; in a notebook it even becomes a widget
    from datasets import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    were_on = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if were_on:
            enable_progress_bars()
