"""When does a tree pay? Accepted length and time of trees of width 1, 2, 3, ... with real drafters.

A wider tree can only raise the accepted length, and its rows can only raise the time of a pass: it pays where the time
per token falls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dspec_lab.bench.timing import spread
from dspec_lab.config import DecodeConfig
from dspec_lab.core.acceptance import acceptance_stats
from dspec_lab.core.types import Generation
from dspec_lab.drafters.protocol import Drafter
from dspec_lab.evaluation.equality import find_flip, largest_gap, verdict
from dspec_lab.models.decoder import LeanDecoder
from dspec_lab.verifier.decode import generate
from dspec_lab.verifier.tree import MAX_NODES, generate_tree

WIDTHS = (1, 2, 3)


def bench_trees(
    target: LeanDecoder,
    drafters: Mapping[str, Drafter],
    prompts: Sequence[Sequence[int]],
    *,
    widths: Sequence[int] = WIDTHS,
    gamma: int = 4,
    temperatures: Sequence[float] = (0.0, 1.0),
    new_tokens: int = 48,
    repeats: int = 3,
    progress: Callable[[str], None] | None = None,
) -> list[dict[str, Any]]:
    """One row per drafter, temperature and width; all widths take turns within a repeat.

    `gain` is the time per token of width 1 over that of this width, within a repeat; `pays` is "yes" where it is above
    1 in every repeat, "no" where below 1 in every one, else "unclear". `outputs_equal_plain` is the verdict on greedy
    texts (None above temperature 0). A drafter that gives no logits has no further candidates at temperature 0: then
    `refused` says why and there are no numbers.
    """
    if repeats < 2 or new_tokens < 8:
        raise ValueError(f"need repeats >= 2 and new_tokens >= 8, got {repeats} and {new_tokens}")
    if not widths or widths[0] != 1 or min(widths) < 1 or gamma * max(widths) > MAX_NODES:
        raise ValueError(f"widths must begin with 1 and make at most {MAX_NODES} drafts, got {list(widths)} x {gamma}")
    if not prompts or not drafters:
        raise ValueError(f"need prompts and drafters, got {len(prompts)} and {len(drafters)}")
    say = progress or (lambda text: None)
    rows: list[dict[str, Any]] = []
    for temperature in temperatures:
        config = DecodeConfig(gamma=gamma, temperature=temperature, max_new_tokens=new_tokens, ignore_eos=True)
        plain = [generate(target, None, ids, config) for ids in prompts] if temperature == 0 else None
        for name, drafter in drafters.items():
            say(f"{name} at temperature {temperature:g}")
            rows += _one_drafter(target, name, drafter, prompts, config, widths, repeats, plain)
    return rows


def _one_drafter(
    target: LeanDecoder,
    name: str,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    config: DecodeConfig,
    widths: Sequence[int],
    repeats: int,
    plain: Sequence[Generation] | None,
) -> list[dict[str, Any]]:
    def run(width: int) -> list[Generation]:
        return [
            generate_tree(target, drafter, ids, config, width=width, request_id=str(i)) for i, ids in enumerate(prompts)
        ]

    rows, able = [], list[int]()
    for width in widths:
        try:
            run(width)  # the warm-up
            able.append(width)
        except ValueError as error:
            rows.append({"drafter": name, "temperature": config.temperature, "width": width, "refused": str(error)})
    runs: dict[int, list[list[Generation]]] = {width: [] for width in able}
    for _ in range(repeats):
        for width in able:
            runs[width].append(run(width))
    per_token = {width: [_ms_per_token(texts) for texts in kept] for width, kept in runs.items()}
    for width in able:
        texts = runs[width][0]
        records = [record for text in texts for record in text.rounds]
        stats = acceptance_stats(records)
        gains = [one / wide for one, wide in zip(per_token[1], per_token[width], strict=True)]
        flips = None
        if plain is not None:
            pairs = zip(prompts, plain, texts, strict=True)
            flips = [find_flip(target, ids, a.token_ids, b.token_ids) for ids, a, b in pairs]
        rows.append(
            {
                "drafter": name,
                "temperature": config.temperature,
                "width": width,
                "gamma": config.gamma,
                "rounds": len(records),
                "accepted_length": stats.accepted_length,
                "rows_per_round": stats.verified_rows / stats.rounds,
                "ms_per_round": spread([_ms_per_round(texts) for texts in runs[width]]),
                "ms_per_token": spread(per_token[width]),
                "gain": spread(gains),
                "pays": None if width == 1 else _pays(gains),
                "outputs_equal_plain": None if flips is None else verdict(texts, flips),
                "max_flip_gap": None if flips is None else largest_gap(flips),
            }
        )
    return rows


def _pays(gains: Sequence[float]) -> str:
    return "yes" if min(gains) > 1 else "no" if max(gains) < 1 else "unclear"


def _ms_per_token(texts: Sequence[Generation]) -> float:
    # the prefill's token is not decoded
    return 1e3 * sum(text.decode_s for text in texts) / sum(len(text.token_ids) - 1 for text in texts)


def _ms_per_round(texts: Sequence[Generation]) -> float:
    return 1e3 * sum(text.decode_s for text in texts) / sum(len(text.rounds) for text in texts)
