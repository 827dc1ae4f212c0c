"""Prompt sets: the bundled ones by name, or any JSONL file whose lines are `{"turns": [...]}`."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspec_lab.core.files import data_dir

# bundled benchmark styles by domain; data/prompts/ has one file for each
BUNDLED: dict[str, tuple[str, ...]] = {
    "math": ("gsm8k_style", "math500_style", "aime_style"),
    "code": ("humaneval_style", "mbpp_style", "livecodebench_style"),
    "chat": ("mtbench_style", "alpaca_style", "arena_hard_style"),
}

# beginnings of file names that tell the domain; what follows must not be a letter ("aimed" is no AIME)
_DOMAIN_BY_FILE_NAME = {
    "math": re.compile(r"(gsm8k|math[-_]?500|aime)(?![a-z])"),
    "code": re.compile(r"(human[-_]?eval|mbpp|live[-_]?code[-_]?bench)(?![a-z])"),
    "chat": re.compile(r"(mt[-_]?bench|alpaca|arena[-_]?hard)(?![a-z])"),
}


@dataclass(frozen=True, slots=True)
class Prompt:
    """One conversation to be answered: the user's turns, in order."""

    prompt_id: str  # unique within its set
    domain: str  # math, code, chat, or what the record says
    benchmark: str
    turns: tuple[str, ...]

    def __post_init__(self) -> None:
        for name in ("prompt_id", "domain", "benchmark"):
            _require_text(name, getattr(self, name))
        if not self.turns:
            raise ValueError(f"turns must hold at least one text, got {self.turns!r}")
        for k, turn in enumerate(self.turns, start=1):
            _require_text(f"turn {k}", turn)


def bundled_names() -> tuple[str, ...]:
    """Names that `load_prompts` knows without a file: nine benchmark styles, three domains and `all`."""
    return (*(name for names in BUNDLED.values() for name in names), *BUNDLED, "all")


def load_prompts(path_or_name: str | Path, limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts of a bundled set or of a JSONL file.

    A bundled name wins over a file of that name in the working directory; write `./math` for the file. Sets of
    several benchmarks (`math`, `code`, `chat`, `all`) take turns between them, and `all` between domains first, so
    that any `limit` stays balanced. Of each line of a file only `turns` is required; `domain`, `benchmark` and `id`
    default to what the file name says, the file's stem, and `stem/NN` with NN the prompt's rank from 0; a whole
    number as `id` is read as text. Blank lines are skipped.
    """
    if not isinstance(path_or_name, (str, Path)) or not str(path_or_name).strip():
        raise ValueError(f"name a bundled prompt set or a JSONL file, got {path_or_name!r}")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ValueError(f"limit must be a whole number of at least 1, got {limit!r}")
    if isinstance(path_or_name, str) and path_or_name in bundled_names():
        prompts = _take_turns([_read_jsonl(path) for path in _bundled_files(path_or_name)])
    else:
        prompts = _read_jsonl(_existing_file(path_or_name))
    return prompts[:limit]


def domain_of_file(path: Path) -> str:
    """The domain that a benchmark's file name tells (`gsm8k.jsonl` is math), else `other`."""
    stem = path.stem.lower()
    return next((domain for domain, start in _DOMAIN_BY_FILE_NAME.items() if start.match(stem)), "other")


def _bundled_files(name: str) -> list[Path]:
    if name == "all":
        by_rank = zip(*BUNDLED.values(), strict=True)
        benchmarks = tuple(benchmark for rank in by_rank for benchmark in rank)
    else:
        benchmarks = BUNDLED.get(name, (name,))
    folder = data_dir() / "prompts"
    return [_existing_file(folder / f"{benchmark}.jsonl") for benchmark in benchmarks]


def _existing_file(path_or_name: str | Path) -> Path:
    path = Path(path_or_name)
    if path.is_dir():
        raise ValueError(f"{path} is a folder, not a JSONL file of prompts")
    if path.exists():
        return path
    looks_like_name = isinstance(path_or_name, str) and path.name == path_or_name and not path.suffix
    if looks_like_name:
        known = ", ".join(bundled_names())
        raise ValueError(f"no bundled prompt set and no file is called {path_or_name!r}; bundled are {known}")
    raise FileNotFoundError(f"no prompt file {path}")


def _take_turns(groups: list[list[Prompt]]) -> list[Prompt]:
    longest = max(len(group) for group in groups)
    return [group[i] for i in range(longest) for group in groups if i < len(group)]


def _read_jsonl(path: Path) -> list[Prompt]:
    prompts: list[Prompt] = []
    line_of_id: dict[str, int] = {}
    try:
        # not str.splitlines: it would also cut at U+2028 inside a turn
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    prompt = _prompt_of_line(line, path, rank=len(prompts))
                except ValueError as error:
                    raise ValueError(f"{path}, line {number}: {error}") from error
                if prompt.prompt_id in line_of_id:
                    where = f"also on line {line_of_id[prompt.prompt_id]}"
                    raise ValueError(f"{path}, line {number}: id {prompt.prompt_id!r} is {where}")
                line_of_id[prompt.prompt_id] = number
                prompts.append(prompt)
    except UnicodeDecodeError as error:
        # the file is read in blocks, so the line is not known
        raise ValueError(f"{path} is not UTF-8 text ({error.reason}, byte {error.object[error.start]:#04x})") from error
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    return prompts


def _prompt_of_line(line: str, path: Path, rank: int) -> Prompt:
    try:
        record: Any = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not valid JSON ({error}): {_shown(line.strip())}") from error
    if not isinstance(record, dict):
        raise ValueError(f'expected an object {{"turns": [...]}}, got {_shown(record)}')
    if "turns" not in record:
        raise ValueError(f'no "turns" in {_shown(record)}')
    turns = record["turns"]
    if not isinstance(turns, list) or not turns:
        raise ValueError(f'"turns" must be a non-empty list of texts, got {_shown(turns)}')
    for k, turn in enumerate(turns, start=1):
        _require_text(f"turn {k}", turn)
    labels = {
        "id": record.get("id", f"{path.stem}/{rank:02d}"),
        "domain": record.get("domain", domain_of_file(path)),
        "benchmark": record.get("benchmark", path.stem),
    }
    if isinstance(labels["id"], int) and not isinstance(labels["id"], bool):
        labels["id"] = str(labels["id"])
    for name, value in labels.items():
        _require_text(name, value)
    return Prompt(labels["id"], labels["domain"], labels["benchmark"], tuple(turns))


def _require_text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name} must be non-empty text, got {_shown(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        bad = f"{value[error.start]!r} at character {error.start}"
        raise ValueError(f"{name} holds half of a surrogate pair, {bad}") from error


def _shown(value: object, longest: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= longest else text[: longest - 3] + "..."
