"""Prompts from files and data sets: any JSONL of `turns`, any text column of a Hugging Face data set."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from dspec_lab.training.prompts.record import TrainPrompt


def jsonl_prompts(path: Path | str, *, domain: str = "other", limit: int | None = None) -> list[TrainPrompt]:
    """The first `limit` lines `{"turns": [...]}` of a file; a line may carry its own `domain`.

    A bad line raises `ValueError` with its number.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no prompt file {path}")
    prompts = []
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                if not isinstance(record, dict) or not isinstance(record.get("turns"), list):
                    raise ValueError('expected an object {"turns": [...]}')
                prompts.append(TrainPrompt(str(record.get("domain", domain)), path.stem, tuple(record["turns"])))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
            if limit is not None and len(prompts) == limit:
                break
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    return prompts


def dataset_prompts(
    name: str,
    column: str,
    *,
    split: str = "train",
    config: str | None = None,
    domain: str = "other",
    limit: int | None = None,
) -> list[TrainPrompt]:
    """Prompts from a column of a Hugging Face data set (a hub name, or a folder or file `load_dataset` can read).

    The column holds texts, lists of texts (turns), or conversations as lists of {role or from, content or value}; of
    these the user's turns are taken. Rows without text are skipped. Mind the data set's licence.
    """
    from datasets import load_dataset

    place = Path(name)
    if place.is_file():
        kinds = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
        if place.suffix not in kinds:
            raise ValueError(f"{name}: a data set file must be one of {', '.join(kinds)}")
        rows: Any = load_dataset(kinds[place.suffix], data_files=str(place), split="train")
    else:
        rows = load_dataset(name, config, split=split)
    if column not in rows.column_names:
        raise ValueError(f"the data set {name} has no column {column!r}; it has {', '.join(rows.column_names)}")
    found = islice(_from_rows(rows[column], domain, name), limit)
    prompts = list(found)
    if not prompts:
        raise ValueError(f"column {column!r} of the data set {name} holds no user text")
    return prompts


def _from_rows(values: Iterable[Any], domain: str, source: str) -> Iterator[TrainPrompt]:
    for value in values:
        turns = user_turns(value)
        if turns:
            yield TrainPrompt(domain, source, turns)


def user_turns(value: Any) -> tuple[str, ...]:
    """The user's texts in a cell: a text, a list of texts, or a conversation. Empty where there are none."""
    if isinstance(value, str):
        return (value.strip(),) if value.strip() else ()
    if not isinstance(value, list):
        return ()
    if all(isinstance(item, str) for item in value):
        return tuple(item.strip() for item in value if item.strip())
    turns = []
    for item in value:
        if not isinstance(item, dict):
            raise ValueError(f"a conversation must hold texts or messages, got {item!r}")
        role = item.get("role", item.get("from"))
        text = item.get("content", item.get("value"))
        if role in ("user", "human") and isinstance(text, str) and text.strip():
            turns.append(text.strip())
    return tuple(turns)
