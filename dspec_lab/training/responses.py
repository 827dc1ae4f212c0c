"""The target's answers as token ids, in Parquet: what drafters are trained on."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

COLUMNS = ("domain", "source", "temperature", "prompt_ids", "response_ids")


@dataclass(frozen=True, slots=True)
class Response:
    """One answer. `prompt_ids` end where the assistant begins to speak; an end token is the last of `response_ids`."""

    domain: str
    source: str  # where the prompt comes from
    temperature: float  # 0 is greedy
    prompt_ids: np.ndarray  # int32
    response_ids: np.ndarray  # int32; without an end token where the answer was cut at its longest


def read_responses(path: Path | str) -> list[Response]:
    """The rows of a Parquet file; missing columns and empty files raise `ValueError` that names the file."""
    import pyarrow
    import pyarrow.parquet

    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file of responses {path}")
    try:
        table = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is not a Parquet file: {error}") from error
    missing = [name for name in COLUMNS if name not in table.column_names]
    if missing:
        raise ValueError(f"{path} has no column {', '.join(missing)}; responses need {', '.join(COLUMNS)}")
    if table.num_rows == 0:
        raise ValueError(f"{path} holds no responses")
    prompts, answers = (_id_rows(table.column(name), path, name) for name in ("prompt_ids", "response_ids"))
    plain = (table.column(name).to_pylist() for name in ("domain", "source", "temperature"))
    return [Response(*row) for row in zip(*plain, prompts, answers, strict=True)]


def write_responses(path: Path | str, responses: Sequence[Response], vocab_size: int) -> Path:
    """The path of a Parquet file that now holds `responses`; the file appears whole or not at all."""
    import pyarrow as pa
    import pyarrow.parquet

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    ids = pa.list_(pa.uint16() if vocab_size <= 2**16 else pa.uint32())
    table = pa.table(
        {
            "domain": pa.array([row.domain for row in responses], pa.string()),
            "source": pa.array([row.source for row in responses], pa.string()),
            "temperature": pa.array([row.temperature for row in responses], pa.float32()),
            "prompt_ids": pa.array([row.prompt_ids for row in responses], ids),
            "response_ids": pa.array([row.response_ids for row in responses], ids),
        }
    )
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    try:
        pa.parquet.write_table(table, temporary, compression="zstd")
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def count_tokens(responses: Iterable[Response]) -> dict[str, int]:
    """Response tokens by domain."""
    counts: dict[str, int] = {}
    for row in responses:
        counts[row.domain] = counts.get(row.domain, 0) + len(row.response_ids)
    return dict(sorted(counts.items()))


def _id_rows(column: object, path: Path, name: str) -> list[np.ndarray]:
    column = column.combine_chunks()  # type: ignore[attr-defined]
    if column.null_count:
        raise ValueError(f"{path}: column {name} has {column.null_count} empty entries")
    flat = column.values.to_numpy(zero_copy_only=False).astype(np.int32)
    offsets = column.offsets.to_numpy()
    return [flat[start:end] for start, end in zip(offsets[:-1], offsets[1:], strict=True)]
