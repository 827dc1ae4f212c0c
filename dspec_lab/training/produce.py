"""From prompts to files of responses: batched, resumable, by several processes side by side."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from dspec_lab.core.files import read_json, write_json
from dspec_lab.models.decoder import LeanDecoder
from dspec_lab.training.data import generation_prompt
from dspec_lab.training.feature_store import FeatureStore, sequence_key
from dspec_lab.training.prompts.record import TrainPrompt
from dspec_lab.training.responses import Response, read_responses, write_responses
from dspec_lab.training.sampler import BatchSampler, Request
from dspec_lab.verifier.decode import encode_chat

PLAN, PART = "plan.json", "part-{worker:02d}-{number:05d}.parquet"
ROWS_PER_PART = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseConfig:
    """How answers are sampled."""

    temperatures: tuple[float, ...] = (0.0, 0.0, 0.7, 1.0)  # prompts take them by turns: half greedy
    max_new_tokens: int = 256  # longer answers are cut there
    max_prompt: int = 512  # conversations with longer prompts are left out
    num_slots: int = 64  # answers side by side
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "temperatures", tuple(float(value) for value in self.temperatures))
        if not self.temperatures or min(self.temperatures) < 0:
            raise ValueError(f"temperatures must be 0 or more, at least one, got {self.temperatures}")
        for name in ("max_new_tokens", "max_prompt", "num_slots"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")


@dataclass(slots=True)
class Produced:
    """What one call has done."""

    answers: int = 0
    tokens: int = 0
    too_long: int = 0  # conversations left out
    seconds: float = 0.0


def produce(
    prompts: Sequence[TrainPrompt],
    target: LeanDecoder,
    tokenizer: object,
    config: ResponseConfig,
    out: Path | str,
    *,
    worker: int = 0,
    num_workers: int = 1,
    store: FeatureStore | None = None,
    on_progress: Callable[[int, int, int], None] | None = None,
) -> Produced:
    """Answer this worker's share of `prompts` into parts beside `out`; what is there already is not done again.

    A folder of parts belongs to one plan (prompts, settings, target); another one raises `ValueError`. `join_parts`
    makes the file when all workers are done. The target's features go into `store`, if given, so that training need
    not read the target again. `on_progress` gets (answers done, answers in all, new tokens).
    """
    folder = parts_folder(out)
    _check_plan(folder, prompts, target, config)
    done = {tuple(key) for path in folder.glob(f"part-{worker:02d}-*.json") for key in read_json(path)}
    # parts without keys keep their numbers too, so that no part is ever written twice
    number = 1 + max((int(path.stem[-5:]) for path in folder.glob(f"part-{worker:02d}-*.parquet")), default=-1)
    ending = generation_prompt(tokenizer)
    result, started = Produced(), time.perf_counter()
    mine = [index for index in range(len(prompts)) if index % num_workers == worker]
    total = sum(len(prompts[index].turns) for index in mine)
    turn = 0
    replies: dict[int, list[str]] = {index: [] for index in mine}
    sampler = BatchSampler(
        target,
        num_slots=config.num_slots,
        max_prompt=config.max_prompt,
        max_new_tokens=config.max_new_tokens,
        seed=config.seed,
        reader=None if store is None else store.reader,
    )
    # turn by turn: a later turn's prompt holds the answers before it
    while mine:
        if turn > 0:
            replies = _earlier_replies(folder, worker, tokenizer, mine, turn)
        requests, keys = [], []
        for index in list(mine):
            if (index, turn) in done:
                continue
            ids = encode_chat(tokenizer, prompts[index].turns, replies[index][:turn])
            if len(ids) > config.max_prompt:
                result.too_long += 1
                mine.remove(index)
                continue
            if tuple(ids[-len(ending) :]) != ending:
                raise ValueError(f"prompt {index} does not end in the chat template's generation prompt, {ending}")
            temperature = config.temperatures[index % len(config.temperatures)]
            requests.append(Request(request_id=f"{index}/{turn}", prompt_ids=tuple(ids), temperature=temperature))
            keys.append((index, turn))

        def report(new_tokens: int) -> None:
            result.tokens += new_tokens
            result.seconds = time.perf_counter() - started
            if on_progress is not None:
                on_progress(len(done) + result.answers, total, result.tokens)

        rows: list[tuple[tuple[int, int], Response]] = []
        for which, answer in sampler.run(requests, report):
            prompt = prompts[keys[which][0]]
            ids_N = (np.array(requests[which].prompt_ids, dtype=np.int32), np.array(answer, dtype=np.int32))
            rows.append((keys[which], Response(prompt.domain, prompt.source, requests[which].temperature, *ids_N)))
            result.answers += 1
            if store is not None:
                store.add(sequence_key(np.concatenate(ids_N), len(ids_N[0])), sampler.take_features(which))
            if len(rows) == ROWS_PER_PART:
                _write_part(folder, worker, number, rows, target.vocab_size)
                rows, number = [], number + 1
        if rows:
            _write_part(folder, worker, number, rows, target.vocab_size)
            number += 1
        turn += 1
        mine = [index for index in mine if len(prompts[index].turns) > turn]
    if store is not None:
        store.flush()
    return result


def join_parts(out: Path | str, vocab_size: int) -> list[Response]:
    """All answers of the parts beside `out`, in the order of their prompts, now in the file `out`."""
    rows = sorted(_part_rows(parts_folder(out)), key=lambda row: row[0])
    if not rows:
        raise ValueError(f"{parts_folder(out)} holds no answers")
    responses = [response for _, response in rows]
    write_responses(out, responses, vocab_size)
    return responses


def parts_folder(out: Path | str) -> Path:
    """Where the parts of a file of responses lie until it is made, and after."""
    return Path(out).with_name(Path(out).name + ".parts")


def _check_plan(folder: Path, prompts: Sequence[TrainPrompt], target: LeanDecoder, config: ResponseConfig) -> None:
    text = json.dumps([[p.domain, p.source, *p.turns] for p in prompts], ensure_ascii=False)
    plan = {
        "prompts": hashlib.blake2b(text.encode(), digest_size=8).hexdigest(),
        "count": len(prompts),
        "target": target.name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "settings": json.loads(json.dumps(asdict(config))),
    }
    if not prompts:
        raise ValueError("there are no prompts to answer")
    path = folder / PLAN
    # older plans were fp32 and did not say so
    old = {"dtype": "float32", **read_json(path)} if path.is_file() else plan
    if old != plan:
        changed = [name for name in plan if old.get(name) != plan[name]]
        raise ValueError(
            f"{folder} holds parts of another plan (other {', '.join(changed)}); remove it or name another file"
        )
    if not path.is_file():
        write_json(path, plan)


def _write_part(
    folder: Path, worker: int, number: int, rows: Sequence[tuple[tuple[int, int], Response]], vocab_size: int
) -> None:
    path = folder / PART.format(worker=worker, number=number)
    write_responses(path, [response for _, response in rows], vocab_size)
    # the keys come last: a part without them does not count
    write_json(path.with_suffix(".json"), [list(key) for key, _ in rows])


def _part_rows(folder: Path, worker: int | None = None) -> Iterator[tuple[tuple[int, int], Response]]:
    pattern = "part-*.json" if worker is None else f"part-{worker:02d}-*.json"
    for path in sorted(folder.glob(pattern)):
        keys = read_json(path)
        yield from zip([tuple(key) for key in keys], read_responses(path.with_suffix(".parquet")), strict=True)


def _earlier_replies(
    folder: Path, worker: int, tokenizer: object, mine: Sequence[int], turn: int
) -> dict[int, list[str]]:
    replies: dict[int, list[str]] = {index: [""] * turn for index in mine}
    for (index, which), response in _part_rows(folder, worker):
        if index in replies and which < turn:
            text = tokenizer.decode(response.response_ids.tolist(), skip_special_tokens=True)  # type: ignore[attr-defined]
            replies[index][which] = text
    return replies
