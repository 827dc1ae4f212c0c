"""Drafting for the requests of a round in one pass against one request after another, on the same contexts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from dspec_lab.bench.timing import spread
from dspec_lab.config import DecodeConfig
from dspec_lab.core.streams import RandomStreams
from dspec_lab.drafters.protocol import Drafter
from dspec_lab.drafters.together import drafts_jointly, propose_together
from dspec_lab.models.decoder import LeanDecoder
from dspec_lab.verifier.ragged import extend_ragged
from dspec_lab.verifier.request import Request

GAMMA = 7


def bench_drafting(
    target: LeanDecoder,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    requests: Sequence[int],
    temperature: float = 0.0,
    repeats: int = 7,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Drafting time of a round by number of requests: taking in what was verified, the block, the choice of tokens.

    Every request is there twice and drafts `GAMMA` tokens a round, once alone and once with the others, in turns who
    goes first. `drafts_equal`: both drafted the same tokens in every round (on the native row ops always, elsewhere but
    for near ties). Times in ms for all requests together; the median over rounds with least and most.
    """
    if repeats < 2:
        raise ValueError(f"need repeats >= 2, got {repeats}")
    if not requests or min(requests) < 1:
        raise ValueError(f"requests must be whole numbers of at least 1, got {list(requests)}")
    if not drafts_jointly(drafter.start(target, capacity=1)):
        raise ValueError(f"{drafter.name} drafts for one request at a time; a joint pass needs dspark or dflash")
    gamma = min(GAMMA, drafter.max_gamma or GAMMA)
    found: dict[str, Any] = {}
    for count in requests:
        if progress is not None:
            progress(f"drafting with {drafter.name}: {count} requests")
        chosen = [tuple(prompts[i % len(prompts)]) for i in range(count)]
        found[str(count)] = _rounds(target, drafter, chosen, gamma, temperature, repeats)
    return {"drafter": drafter.name, "gamma": gamma, "temperature": temperature, "by_requests": found}


def _rounds(
    target: LeanDecoder,
    drafter: Drafter,
    prompts: Sequence[tuple[int, ...]],
    gamma: int,
    temperature: float,
    repeats: int,
) -> dict[str, Any]:
    room = (repeats + 2) * (gamma + 1) + 1  # no request ends in between
    config = DecodeConfig(gamma=gamma, max_new_tokens=room, temperature=temperature, ignore_eos=True)
    alone, joint = (
        [Request(target, drafter, prompt, config, RandomStreams(0, str(i))) for i, prompt in enumerate(prompts)]
        for _ in range(2)
    )
    for request in (*alone, *joint):
        request.begin()
    single_ms, joint_ms, equal = list[float](), list[float](), True
    for turn in range(repeats + 1):
        for together in (turn % 2 == 0, turn % 2 == 1):
            start = time.perf_counter()
            if together:
                asks = [request.ask() for request in joint]
                answers = propose_together([ask for ask in asks if ask is not None])
                for request, ask, answer in zip(joint, asks, answers, strict=True):
                    request.rows_of(ask, answer.proposal, answer.seconds)
            else:
                for request in alone:
                    request.next_rows()
            (joint_ms if together else single_ms).append(1e3 * (time.perf_counter() - start))
        equal &= all(a.proposal.token_ids == b.proposal.token_ids for a, b in zip(alone, joint, strict=True))
        for group in (alone, joint):
            feeds = [(request.result.token_ids[-1], *request.proposal.token_ids) for request in group]
            for request, rows in zip(group, extend_ragged([r.session for r in group], feeds), strict=True):  # type: ignore[misc]
                request.take(rows)
    # the first of each was the warm-up
    single_ms, joint_ms = single_ms[1:], joint_ms[1:]
    return {
        "single_ms": spread(single_ms),
        "joint_ms": spread(joint_ms),
        "ratio": spread([one / other for one, other in zip(single_ms, joint_ms, strict=True)]),
        "drafts_equal": equal,
    }
