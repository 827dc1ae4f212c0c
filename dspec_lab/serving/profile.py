"""The cost table of a real target: its pass timed over rows and contexts, and the terms around it fitted.

Row counts take turns within a repeat, so that a busy moment of the machine does not fall on one of them.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dspec_lab.config import DecodeConfig
from dspec_lab.drafters.protocol import Drafter
from dspec_lab.drafters.together import drafts_jointly
from dspec_lab.models.decoder import DecoderSession, LeanDecoder
from dspec_lab.scheduler.cost_table import CostSample, CostTable, DraftCost, table_from_samples
from dspec_lab.serving.engine import LoadRun, run_load
from dspec_lab.serving.workload import ClosedLoop
from dspec_lab.verifier.ragged import extend_ragged

# dense where kernels change their shape, and one above each power of two, where a stair would show
ROWS = (1, 2, 3, 4, 6, 8, 9, 12, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128, 129, 192, 256)
CONTEXTS = (64, 256)
ROWS_PER_REQUEST = 8
# a pass is timed after others of its size, as rounds of a steady load follow each other; timed right after one of 256
# rows, a pass over one row took 37 ms in one run, so timed 26 ms in the next (two runs, so noise may be part of it)
PASSES_BEFORE = 2
MOST_ALONE = 64  # requests of one row each
BATCH_SIZES = (1, 2, 4, 8, 16)  # at which drafting is timed
FEWEST_ROUNDS = 3  # with so many drafting requests that make it a probe
Progress = Callable[[str], None]


def time_target(
    target: LeanDecoder,
    *,
    rows: Sequence[int] = ROWS,
    contexts: Sequence[int] = CONTEXTS,
    repeats: int = 5,
    progress: Progress | None = None,
) -> list[CostSample]:
    """Seconds of ragged passes over each number of rows at each context, `repeats` times after a warm-up.

    Each time is that of the last of three passes in a row.

    `rows` rows are shared by ceil(rows / 8) requests, as in a batch of blocks of 7 drafts; counts of 2 to 64 are also
    timed as that many requests of one row, which read as many caches (at the shortest context). Every pass is rolled
    back.
    """
    rows, contexts = sorted(set(rows)), sorted(set(contexts))
    if not rows or rows[0] < 1:
        raise ValueError(f"row counts must be at least 1, got {rows}")
    if not contexts or contexts[0] < 1:
        raise ValueError(f"contexts must hold at least 1 token, got {contexts}")
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    if contexts[-1] + ROWS_PER_REQUEST > target.max_context:
        raise ValueError(f"a context of {contexts[-1]} and a block do not fit {target.max_context} tokens")
    samples = []
    shared = [(count, -(-count // ROWS_PER_REQUEST)) for count in rows]
    alone = [(count, count) for count in rows if 1 < count <= MOST_ALONE]
    for context in contexts:
        passes = sorted(shared + (alone if context == contexts[0] else []))
        most = max(requests for _, requests in passes)
        if progress is not None:
            progress(f"context {context}: {most} requests")
        sessions: list[DecoderSession] = []
        ids = [(7 * place) % target.vocab_size for place in range(context)]
        for _ in range(most):
            session = target.session(capacity=context + ROWS_PER_REQUEST)
            session.extend(ids, logit_rows=1)
            sessions.append(session)
        for repeat in range(repeats + 1):
            for count, requests in passes:
                used = sessions[:requests]
                shares = np.diff(np.linspace(0, count, len(used) + 1).round().astype(int)).tolist()
                feeds = [ids[:1] * share for share in shares]
                for _ in range(PASSES_BEFORE + 1):
                    start = time.perf_counter()
                    extend_ragged(used, feeds)
                    seconds = time.perf_counter() - start
                    for session in used:
                        session.truncate(context)
                if repeat:
                    samples.append(
                        CostSample(rows=count, context_tokens=context, requests=len(used), seconds=seconds)
                    )  # fmt: skip
    return samples


def fit_drafter(
    target: LeanDecoder,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    config: DecodeConfig,
    *,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    progress: Progress | None = None,
) -> tuple[DraftCost, float, float, list[dict[str, Any]]]:
    """(draft cost, settling per request, fixed time of a round, raw rounds) of real batches with this drafter.

    Drafting, as the batch does it (in joint passes where the drafter can): a time for each number of drafting requests
    and one per token, by least squares over rounds. What a round takes beside drafting and the pass is split into a
    fixed part and one by request.
    """
    raw: list[dict[str, Any]] = []
    for size in batch_sizes:
        # two draft lengths, or the terms by request and by token could not be told apart
        for gamma in sorted({config.gamma, max(1, config.gamma // 2)}):
            if progress is not None:
                progress(f"{drafter.name}: {size} requests, draft length {gamma}")
            settings = replace(config, gamma=gamma)
            run = run_load(target, prompts, settings, ClosedLoop(concurrency=size), drafter=drafter, total=size)
            raw += _rounds(run)
    requests = np.array([row["requests"] for row in raw], dtype=float)
    settle = _fit(np.stack([np.ones_like(requests), requests], 1), np.array([row["settle_s"] for row in raw]))
    joint = drafts_jointly(drafter.start(target, capacity=1))
    return fit_draft_cost(raw, drafter.name, joint=joint), settle[1], settle[0], raw


def fit_draft_cost(raw: Sequence[Mapping[str, Any]], name: str, *, joint: bool) -> DraftCost:
    """Drafting's part of `fit_drafter`, from rounds with `drafting` requests, `drafted` tokens and `draft_s`."""
    # ends of texts leave rounds of every number of requests; a number that was hardly seen is no probe
    seen = Counter(row["drafting"] for row in raw if row["drafting"])
    probes = sorted(count for count, rounds in seen.items() if rounds >= FEWEST_ROUNDS)
    rows = [row for row in raw if row["drafting"] in probes]
    if not rows:
        raise ValueError(f"{name} drafted in {sum(seen.values())} rounds: too few to time it")
    drafting = np.array([row["drafting"] for row in rows])
    tokens = np.array([row["drafted"] for row in rows], dtype=float)
    seconds = np.array([row["draft_s"] for row in rows])
    design = np.concatenate([(drafting[:, None] == probes).astype(float), tokens[:, None]], 1)
    per_token_s = _fit(design, seconds)[-1]
    # what is left by number of requests: medians, so that a busy moment of the machine does not stay in the table
    left = seconds - per_token_s * tokens
    request_s = tuple(max(0.0, float(np.median(left[drafting == count]))) for count in probes)
    return DraftCost(
        drafter=name, joint=joint, request_probes=tuple(probes), request_s=request_s, per_token_s=per_token_s
    )


def profile_target(
    target: LeanDecoder,
    *,
    rows: Sequence[int] = ROWS,
    contexts: Sequence[int] = CONTEXTS,
    repeats: int = 5,
    drafter: Drafter | None = None,
    prompts: Sequence[Sequence[int]] = (),
    config: DecodeConfig | None = None,
    run: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> CostTable:
    """The measured table; with a drafter and prompts also its draft, settle and fixed terms."""
    samples = time_target(target, rows=rows, contexts=contexts, repeats=repeats, progress=progress)
    kept = dict(run or {})
    table = table_from_samples(samples, name=target.name, run=kept)
    if drafter is None:
        return table
    settings = config or DecodeConfig(max_new_tokens=24)
    cost, per_request_s, fixed_s, raw = fit_drafter(target, drafter, prompts, settings, progress=progress)
    context = statistics.fmean(map(len, prompts)) + settings.max_new_tokens / 2
    pace = pace_of(raw, table, context)
    return replace(
        table,
        run={**kept, "rounds": raw, "pace": pace},
        draft=replace(
            cost, request_s=tuple(seconds / pace for seconds in cost.request_s), per_token_s=cost.per_token_s / pace
        ),
        settle_per_request_s=per_request_s / pace,
        fixed_s=fixed_s / pace,
    )


def pace_of(raw: Sequence[Mapping[str, Any]], table: CostTable, context_tokens: float) -> float:
    """How much longer the rounds' passes of the target took than the table says, as a factor; their median.

    The rounds were timed minutes after the passes, and a shared machine is not as fast in all minutes. What else the
    rounds took is divided by this, so that the table's times belong to one pace.
    """
    ratios = [
        row["verify_s"]
        / float(table.round_s_N(row["requests"], row["rows"] - row["requests"], context_tokens=context_tokens)[-1])
        for row in raw
        if row["rows"] <= table.last_row
    ]
    return statistics.median(ratios) if ratios else 1.0


def _rounds(run: LoadRun) -> list[dict[str, Any]]:
    return [
        {
            "requests": record.requests,
            "rows": record.rows,
            "drafting": record.drafting,
            "drafted": record.drafted,
            "draft_s": record.draft_s,
            "verify_s": record.verify_s,
            "settle_s": record.settle_s,
        }
        for record in run.rounds
    ]


def _fit(design: np.ndarray, seconds: np.ndarray) -> list[float]:
    """Non-negative least squares; the median where there is nothing to tell terms apart."""
    from scipy.optimize import nnls

    if np.linalg.matrix_rank(design) < 2:
        return [statistics.median(seconds.tolist()), *([0.0] * (design.shape[1] - 1))]
    return [float(value) for value in nnls(design, seconds)[0]]
