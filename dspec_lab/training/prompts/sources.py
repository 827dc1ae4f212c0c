"""Prompts by the name of their source: own generators, the target itself, files, data sets."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from dspec_lab.core.files import write_text
from dspec_lab.models.decoder import LeanDecoder
from dspec_lab.training.prompts.chat_requests import chat_requests
from dspec_lab.training.prompts.code_requests import code_requests
from dspec_lab.training.prompts.contest_problems import contest_problems
from dspec_lab.training.prompts.files import dataset_prompts, jsonl_prompts
from dspec_lab.training.prompts.math_problems import math_problems
from dspec_lab.training.prompts.program_tasks import program_tasks
from dspec_lab.training.prompts.record import DOMAINS, TrainPrompt, without_repeats
from dspec_lab.training.prompts.self_synthesis import OPENINGS, synthesise

OWN: dict[str, Callable[[int, int], list[TrainPrompt]]] = {
    "math": math_problems,
    "code": code_requests,
    "chat": chat_requests,
    "contest": contest_problems,
    "tasks": program_tasks,
}
SELF = {"self" if domain == "self" else f"self-{domain}": domain for domain in OPENINGS}


def check_source(name: str) -> None:
    """Raise `ValueError` or `FileNotFoundError` for a source that cannot be; costs nothing."""
    kind, _, rest = name.partition(":")
    if name in OWN or name in SELF:
        return
    if kind == "hf":
        if len(rest.split(":")) not in (2, 3):
            raise ValueError(f"a data set source is hf:NAME:COLUMN or hf:NAME:COLUMN:SPLIT, got {name!r}")
        return
    path, _ = _file_and_domain(name)
    if path.suffix != ".jsonl":
        known = ", ".join([*OWN, *SELF, "FILE.jsonl", "hf:NAME:COLUMN"])
        raise ValueError(f"unknown prompt source {name!r}; known are {known}")
    if not path.is_file():
        raise FileNotFoundError(f"there is no prompt file {path}")


def needs_target(names: Sequence[str]) -> bool:
    """Whether the target has to write some of the prompts."""
    return any(name in SELF for name in names)


def gather(
    names: Sequence[str],
    count: int,
    seed: int,
    target: LeanDecoder | None = None,
    tokenizer: object | None = None,
    on_source: Callable[[str, int], None] | None = None,
) -> list[TrainPrompt]:
    """At most `count` prompts of each source, each conversation once. `on_source` hears (source, prompts)."""
    prompts: list[TrainPrompt] = []
    for name in names:
        check_source(name)
        if name in OWN:
            found = OWN[name](count, seed)
        elif name in SELF:
            if target is None:
                raise ValueError(f"the source {name!r} needs the target")
            found = synthesise(target, tokenizer, count, seed=seed, domain=SELF[name])
        elif name.startswith("hf:"):
            parts = name.split(":")[1:]
            found = dataset_prompts(parts[0], parts[1], split=parts[2] if len(parts) > 2 else "train", limit=count)
        else:
            path, domain = _file_and_domain(name)
            found = jsonl_prompts(path, domain=domain, limit=count)
        if on_source is not None:
            on_source(name, len(found))
        prompts += found
    return without_repeats(prompts)


def write_prompts(path: Path, prompts: Sequence[TrainPrompt]) -> Path:
    """A JSONL file that `read_prompts` and `jsonl_prompts` read."""
    lines = [{"turns": list(p.turns), "domain": p.domain, "source": p.source} for p in prompts]
    return write_text(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def read_prompts(path: Path) -> list[TrainPrompt]:
    """The prompts of `write_prompts`."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    return [TrainPrompt(r["domain"], r["source"], tuple(r["turns"])) for r in records]


def _file_and_domain(name: str) -> tuple[Path, str]:
    """FILE.jsonl, or DOMAIN=FILE.jsonl."""
    domain, equals, path = name.partition("=")
    if equals and domain in DOMAINS:
        return Path(path), domain
    return Path(name), "other"
