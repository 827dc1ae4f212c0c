"""All layers of a pass in one native call, against the ops called one by one: milliseconds by turns.

`python -m dspec_lab.bench.one_call [FILE]` times passes of the default target and greedy drafting of DSpark both ways.
The bits are the same (`tests/parity/test_layer_stack.py`); what differs is the share of the interpreter.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from dspec_lab.bench.record import run_record, wanted_threads
from dspec_lab.config import SamplingConfig
from dspec_lab.core.files import json_text, write_text
from dspec_lab.core.streams import DraftDraws, RandomStreams
from dspec_lab.drafters.protocol import Commit, DraftAsk, Drafter
from dspec_lab.drafters.together import propose_together
from dspec_lab.models.decoder import LeanDecoder
from dspec_lab.verifier.ragged import extend_ragged

CONTEXT = 100  # tokens that each request holds
SHAPES = ((1, 1), (1, 4), (1, 8), (4, 4), (16, 1), (16, 3), (32, 1))  # requests, rows each
DRAFTS = ((1, 3), (4, 3), (16, 2))  # requests, drafts each


@contextlib.contextmanager
def op_by_op() -> Iterator[None]:
    """Within this context passes and drafts call the ops one by one."""
    rows = "dspec_lab.drafters.block_rows."
    with (
        mock.patch.object(LeanDecoder, "_stack", lambda self: None),
        mock.patch(rows + "_stack", lambda model, count: None),
        mock.patch("dspec_lab.drafters.dspark.greedy_walk", lambda *args: None),
        mock.patch("dspec_lab.drafters.together.greedy_walk", lambda *args: None),
    ):
        yield


def bench_one_call(target: LeanDecoder, drafter: Drafter, *, repeats: int = 25) -> dict[str, Any]:
    """Median milliseconds of passes and of drafting by (requests, rows or drafts each), both ways by turns."""
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    return {
        "context": CONTEXT,
        "repeats": repeats,
        "passes": [_compared(_pass_of(target, drafter, *shape), shape, repeats) for shape in SHAPES],
        "drafts": [_compared(_draft_of(target, drafter, *shape), shape, repeats) for shape in DRAFTS],
    }


def _compared(run: Callable[[], None], shape: tuple[int, int], repeats: int) -> dict[str, Any]:
    once, each = list[float](), list[float]()
    for repeat in range(repeats + 1):
        for times, way in ((once, contextlib.nullcontext()), (each, op_by_op())):
            with way:
                start = time.perf_counter()
                run()
                took = 1e3 * (time.perf_counter() - start)
            if repeat:
                times.append(took)
    middle, apart = statistics.median(once), statistics.median(each)
    return {
        "requests": shape[0], "each": shape[1], "one_call_ms": middle, "op_by_op_ms": apart, "ratio": middle / apart,
        "one_call_least_ms": min(once), "op_by_op_least_ms": min(each),
    }  # fmt: skip


def _pass_of(target: LeanDecoder, drafter: Drafter, requests: int, rows: int) -> Callable[[], None]:
    sessions = [target.session(capacity=CONTEXT + rows, taps=drafter.taps) for _ in range(requests)]
    for session in sessions:
        session.extend(list(range(100, 100 + CONTEXT)), logit_rows=1)

    def run() -> None:
        extend_ragged(sessions, [list(range(rows))] * requests)
        for session in sessions:
            session.truncate(CONTEXT)

    return run


def _draft_of(target: LeanDecoder, drafter: Drafter, requests: int, gamma: int) -> Callable[[], None]:
    held = []
    for _ in range(requests):
        prompt = tuple(range(100, 100 + CONTEXT))
        features = target.session(capacity=CONTEXT, taps=drafter.taps).extend(prompt, logit_rows=1).features
        session = drafter.start(target, capacity=10**4)
        session.commit(Commit((*prompt, 7), features))
        held.append((session, features))
    draws = DraftDraws(RandomStreams(0, "bench"), 0)
    asks = [DraftAsk(session=s, gamma=gamma, sampling=SamplingConfig(temperature=0.0), draws=draws) for s, _ in held]

    def run() -> None:
        # as in a round that kept one token
        for session, features in held:
            row = type(features)(tapped_NF=features.tapped_NF[:1], last_ND=None)
            session.commit(Commit((8,), row))
        propose_together(asks)

    return run


def main(file: str | None = None) -> int:
    """Time both ways, print the record, and write it where a file is named."""
    from dspec_lab.evaluation.drafters import build_drafters
    from dspec_lab.models.load import load_target

    torch.set_num_threads(wanted_threads())
    target = load_target("smollm2", torch.bfloat16, "cpu")
    if not isinstance(target, LeanDecoder) or target._stack() is None:
        print("the compiled row ops are not here, so there is one way only", file=sys.stderr)
        return 1
    ((_, drafter),) = build_drafters(["dspark"], target).items()
    result = bench_one_call(target, drafter)
    settings = {"drafter": drafter.name, "row_ops": target.ops.name}
    text = json_text({**result, "run": run_record(settings, 0, dtype="bf16", model=target.name)})
    if file is not None:
        write_text(Path(file), text)
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
