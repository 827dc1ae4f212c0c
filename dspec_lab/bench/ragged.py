"""One ragged round of many requests against as many single rounds, and the gain that the target's cost curve allows.

A pass over B rows costs cost(B), measured on one request in the same run. Requests with b_1, b_2, ... rows need
sum cost(b_i) one by one and at least cost(sum b_i) together, so the ratio of the two is the bound; what a ragged pass
loses to joining caches and to markers shows as its share of that bound. All times of a repeat lie close together, and
ratios are taken within a repeat.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from dspec_lab.bench.timing import spread
from dspec_lab.config import DecodeConfig, SamplingConfig
from dspec_lab.core.streams import DraftDraws, RandomStreams
from dspec_lab.core.types import Proposal
from dspec_lab.drafters.protocol import Commit
from dspec_lab.models.decoder import DecoderSession, LeanDecoder
from dspec_lab.models.protocol import Taps, Target
from dspec_lab.verifier.ragged import BatchRequest, RaggedBatch, extend_ragged
from dspec_lab.verifier.request import Request

DRAFTS = (7, 3, 5, 1)  # drafted tokens of the requests, in turn
REQUESTS = (1, 4, 16)


class RepeatDrafter:
    """Drafts the newest token again and again: no model, no time, and always as many drafts as were asked for."""

    name = "repeat"
    taps = Taps()
    max_gamma = None

    def start(self, target: Target, *, capacity: int) -> _RepeatSession:
        """A session that has seen no token."""
        return _RepeatSession()


class _RepeatSession:
    def __init__(self) -> None:
        self._newest = 0

    def commit(self, commit: Commit) -> None:
        self._newest = commit.token_ids[-1]

    def propose(self, gamma: int, sampling: SamplingConfig, draws: DraftDraws) -> Proposal:
        return Proposal((self._newest,) * gamma)


def bench_ragged(
    target: LeanDecoder,
    prompts: Sequence[Sequence[int]],
    *,
    requests: Sequence[int] = REQUESTS,
    drafts: Sequence[int] = DRAFTS,
    temperature: float = 0.0,
    repeats: int = 7,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Times by number of requests: passes alone and whole rounds (verdicts and rollback too, drafting left out).

    `share_of_bound` is the ratio of single to ragged passes over the ratio that the cost curve allows. The text of
    each request must be the same either way: `outputs_equal` says so (on the native row ops always, elsewhere but
    for near ties). Times in ms; the median over repeats with least and most.
    """
    if repeats < 2:
        raise ValueError(f"need repeats >= 2, got {repeats}")
    for name, values in (("requests", requests), ("drafts", drafts)):
        if not values or min(values) < 1:
            raise ValueError(f"{name} must be whole numbers of at least 1, got {list(values)}")
    if not prompts:
        raise ValueError("no prompt was given")
    say = progress or (lambda text: None)
    found: dict[str, Any] = {}
    for count in requests:
        say(f"{count} requests")
        chosen = [tuple(prompts[i % len(prompts)]) for i in range(count)]
        lengths = [drafts[i % len(drafts)] for i in range(count)]
        found[str(count)] = _passes(target, chosen, lengths, repeats) | {
            "round": _rounds(target, chosen, lengths, temperature, repeats)
        }
    return {"drafts": list(drafts), "temperature": temperature, "repeats": repeats, "by_requests": found}


def _passes(
    target: LeanDecoder, prompts: Sequence[tuple[int, ...]], lengths: Sequence[int], repeats: int
) -> dict[str, Any]:
    rows = [1 + length for length in lengths]
    feeds = [(prompt * size)[:size] for prompt, size in zip(prompts, rows, strict=True)]
    sessions = [_session(target, prompt, size) for prompt, size in zip(prompts, rows, strict=True)]
    middle = sorted(prompts, key=len)[len(prompts) // 2]
    probe = _session(target, middle, sum(rows))
    sizes = sorted({*rows, sum(rows)})
    curve: dict[int, list[float]] = {size: [] for size in sizes}
    single, ragged = list[float](), list[float]()
    for _ in range(repeats + 1):
        # what ran before has filled the caches with its rows: the shortest pass must not pay for that
        _extend_ms([probe], [middle[:1]], alone=True)
        for size in sizes:
            curve[size].append(_extend_ms([probe], [(middle * size)[:size]], alone=True))
        single.append(
            sum(_extend_ms([session], [feed], alone=True) for session, feed in zip(sessions, feeds, strict=True))
        )
        ragged.append(_extend_ms(sessions, feeds, alone=False))
    # the first of each was the warm-up
    single, ragged = single[1:], ragged[1:]
    curve = {size: times[1:] for size, times in curve.items()}
    bounds = [sum(curve[size][i] for size in rows) / curve[sum(rows)][i] for i in range(repeats)]
    ratios = [alone / together for alone, together in zip(single, ragged, strict=True)]
    return {
        "rows": rows,
        "context_tokens": [len(prompt) for prompt in prompts],
        "cost_ms_by_rows": {str(size): spread(times) for size, times in curve.items()},
        "single_ms": spread(single),
        "ragged_ms": spread(ragged),
        "ratio": spread(ratios),
        "bound": spread(bounds),
        # of medians: a ratio of ratios within one repeat doubles its noise
        "share_of_bound": statistics.median(ratios) / statistics.median(bounds),
    }


def _session(target: LeanDecoder, prompt: Sequence[int], room: int) -> DecoderSession:
    session = target.session(capacity=len(prompt) + room)
    session.extend(prompt, logit_rows=0)
    return session


def _extend_ms(sessions: Sequence[DecoderSession], feeds: Sequence[Sequence[int]], *, alone: bool) -> float:
    held = [session.length for session in sessions]
    start = time.perf_counter()
    if alone:
        sessions[0].extend(feeds[0])
    else:
        extend_ragged(sessions, feeds)
    spent = time.perf_counter() - start
    for session, length in zip(sessions, held, strict=True):
        session.truncate(length)
    return 1e3 * spent


def _rounds(
    target: LeanDecoder,
    prompts: Sequence[tuple[int, ...]],
    lengths: Sequence[int],
    temperature: float,
    repeats: int,
) -> dict[str, Any]:
    room = (repeats + 2) * (max(lengths) + 1) + 1  # no request ends in between
    configs = [
        DecodeConfig(gamma=length, max_new_tokens=room, temperature=temperature, ignore_eos=True) for length in lengths
    ]
    drafter, batch, alone = RepeatDrafter(), RaggedBatch(target), list[Request]()
    for i, (prompt, config) in enumerate(zip(prompts, configs, strict=True)):
        batch.join(BatchRequest(request_id=str(i), prompt_ids=prompt, config=config, drafter=drafter))
        alone.append(Request(target, drafter, prompt, config, RandomStreams(config.seed, str(i))))
        alone[-1].begin()
    single, ragged = list[float](), list[float]()
    for _ in range(repeats + 1):
        spent = 0.0
        for request in alone:
            start = time.perf_counter()
            request.take(request.session.extend(request.next_rows()))
            spent += time.perf_counter() - start
        single.append(1e3 * spent)
        start = time.perf_counter()
        batch.step()
        ragged.append(1e3 * (time.perf_counter() - start))
    equal = [batch.leave(str(i)).token_ids == request.result.token_ids for i, request in enumerate(alone)]
    single, ragged = single[1:], ragged[1:]
    return {
        "single_ms": spread(single),
        "ragged_ms": spread(ragged),
        "ratio": spread([one / other for one, other in zip(single, ragged, strict=True)]),
        "outputs_equal": all(equal),
    }
