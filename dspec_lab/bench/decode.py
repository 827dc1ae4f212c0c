"""Timing of the decoding loops on one model: ours, transformers' `generate`, and the loop's own overhead.

All variants take turns within a repeat, so that a change of the machine's load meets them alike; a ratio is taken
within a repeat, and the median over repeats is reported with its spread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dspec_lab.bench.timing import spread
from dspec_lab.config import DecodeConfig
from dspec_lab.drafters.protocol import Drafter
from dspec_lab.models.decoder import LeanDecoder
from dspec_lab.verifier.decode import generate


def bench_decode(
    target: LeanDecoder,
    drafters: Mapping[str, Drafter],
    prompts: Sequence[list[int]],
    *,
    hub_model: Any | None = None,
    new_tokens: int = 64,
    gamma: int = 7,
    repeats: int = 5,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Time per token of plain decoding, each drafter and, where `hub_model` is given, transformers' `generate`.

    Greedy, end tokens ignored, so that all make the same number of tokens. Times cover decoding after the prefill for
    our loops and the whole call less a one-token call for `generate`. `overhead_share` is the share of a round spent
    outside drafter and target, at temperature 0 and 1.
    """
    if repeats < 2 or new_tokens < 8:
        raise ValueError(f"need repeats >= 2 and new_tokens >= 8, got {repeats} and {new_tokens}")
    say = progress or (lambda text: None)
    greedy = DecodeConfig(gamma=gamma, max_new_tokens=new_tokens, ignore_eos=True)
    variants: dict[str, Callable[[list[int]], float]] = {"plain": lambda ids: _ours(target, None, ids, greedy)}
    for name, drafter in drafters.items():
        variants[name] = lambda ids, drafter=drafter: _ours(target, drafter, ids, greedy)
    if hub_model is not None:
        variants["generate"] = lambda ids: _generate(hub_model, ids, new_tokens)
        variants[f"generate_prompt_lookup_{gamma}"] = lambda ids: _generate(
            hub_model, ids, new_tokens, prompt_lookup_num_tokens=gamma
        )
    for name, call in variants.items():
        say(f"warm-up: {name}")
        call(prompts[0])
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for repeat in range(repeats):
        say(f"repeat {repeat + 1} of {repeats}")
        for name in variants:
            seconds[name].append(0.0)
        for ids in prompts:
            for name, call in variants.items():
                seconds[name][-1] += call(ids)
    count = len(prompts) * (new_tokens - 1)
    result: dict[str, Any] = {
        "prompts": len(prompts),
        "new_tokens": new_tokens,
        "gamma": gamma,
        "repeats": repeats,
        "ms_per_token": {name: spread([1e3 * s / count for s in times]) for name, times in seconds.items()},
        "speedup_over_plain": {
            name: spread([p / s for p, s in zip(seconds["plain"], times, strict=True)])
            for name, times in seconds.items()
        },
    }
    if hub_model is not None:
        result["plain_over_generate"] = spread(
            [g / p for g, p in zip(seconds["generate"], seconds["plain"], strict=True)]
        )
        result["generate_prompt_lookup_over_generate"] = spread(
            [g / p for g, p in zip(seconds["generate"], seconds[f"generate_prompt_lookup_{gamma}"], strict=True)]
        )
    say("loop overhead")
    result["overhead_share"] = {
        name: {
            f"T={temperature:g}": _overhead(target, drafter, prompts, replace(greedy, temperature=temperature))
            for temperature in (0.0, 1.0)
        }
        for name, drafter in drafters.items()
    }
    result["forward_ms_by_rows"] = forward_times(target, prompts[0], repeats=repeats)
    return result


def forward_times(
    target: LeanDecoder, prompt_ids: list[int], *, rows: Sequence[int] = (1, 2, 4, 8, 16, 32), repeats: int = 5
) -> dict[str, dict[str, float]]:
    """Milliseconds of one pass over 1, 2, ... rows after the prompt, logits of all rows included."""
    session = target.session(capacity=len(prompt_ids) + max(rows))
    session.extend(prompt_ids, logit_rows=0)
    times: dict[str, list[float]] = {str(count): [] for count in rows}
    for _ in range(repeats + 1):
        for count in rows:
            session.truncate(len(prompt_ids))
            start = time.perf_counter()
            session.extend((prompt_ids * count)[:count])
            times[str(count)].append(1e3 * (time.perf_counter() - start))
    return {count: spread(values[1:]) for count, values in times.items()}


def _ours(target: LeanDecoder, drafter: Drafter | None, ids: list[int], config: DecodeConfig) -> float:
    run = generate(target, drafter, ids, config)
    if len(run.token_ids) != config.max_new_tokens:
        raise RuntimeError(f"{len(run.token_ids)} tokens came, {config.max_new_tokens} were asked for")
    return run.decode_s


def _generate(model: Any, ids: list[int], new_tokens: int, **options: Any) -> float:
    input_ids = torch.tensor([ids])
    common = {
        "do_sample": False, "attention_mask": torch.ones_like(input_ids), "eos_token_id": None, "pad_token_id": 0,
        **options,
    }  # fmt: skip
    spans = []
    for count in (1, new_tokens):
        start = time.perf_counter()
        out = model.generate(input_ids, max_new_tokens=count, min_new_tokens=count, **common)
        spans.append(time.perf_counter() - start)
        if out.shape[1] - len(ids) != count:
            raise RuntimeError(f"generate made {out.shape[1] - len(ids)} tokens, {count} were asked for")
    return spans[1] - spans[0]


def _overhead(
    target: LeanDecoder, drafter: Drafter, prompts: Sequence[list[int]], config: DecodeConfig
) -> dict[str, float]:
    shares, overheads = [], []
    for ids in prompts:
        run = generate(target, drafter, ids, config)
        # what the rounds did not spend in drafter or target, the bookkeeping between rounds included
        model_s = sum(record.draft_s + record.verify_s for record in run.rounds)
        shares.append(1 - model_s / run.decode_s)
        overheads.append(1e3 * (run.decode_s - model_s) / len(run.rounds))
    return {"share": statistics.median(shares), "ms_per_round": statistics.median(overheads)}


def load_hub_model(folder: Path, dtype: torch.dtype) -> Any:
    """The same weights as a transformers model, for comparison."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, use_safetensors=True).eval()
