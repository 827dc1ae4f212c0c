"""Generation for one request: plain decoding, or rounds of draft + verify with the same output law."""

from __future__ import annotations

import time
from collections.abc import Sequence

from dspec_lab.config import DecodeConfig
from dspec_lab.core.streams import Chooser, RandomStreams
from dspec_lab.core.types import Generation
from dspec_lab.drafters.protocol import Drafter
from dspec_lab.models.protocol import Target
from dspec_lab.verifier.request import Decide, OnTokens, Request
from dspec_lab.verifier.stopping import TokenDecoder


def generate(
    target: Target,
    drafter: Drafter | None,
    prompt_ids: Sequence[int],
    config: DecodeConfig,
    *,
    request_id: str = "0",
    tokenizer: TokenDecoder | None = None,
    on_tokens: OnTokens | None = None,
    trace: bool = False,
    chooser: Chooser | None = None,
    decide_with: Decide | None = None,
) -> Generation:
    """Generate after `prompt_ids`; the output law is the target's, whatever the drafter (None: plain decoding).

    With `trace` each round also records 1 - TV and the entropies (slower; never time a traced run). `chooser` replaces
    the random streams (the audit enumerates with it) and `decide_with` the verdict (the audit plants faults with it).
    A `tokenizer` is needed for stop strings and for `text`.
    Raises `ValueError` for an empty prompt, ids outside the vocabulary, a context that does not fit, or a gamma the
    drafter was not trained for; `NonFiniteLogitsError` if the target or drafter gives a row without a law.
    """
    request = Request(
        target, drafter, prompt_ids, config, chooser or RandomStreams(config.seed, request_id),
        decide_with=decide_with, tokenizer=tokenizer, on_tokens=on_tokens, trace=trace,
    )  # fmt: skip
    request.begin()
    while not request.ended:
        feed = request.next_rows()
        start = time.perf_counter()
        rows = request.session.extend(feed)
        request.take(rows, time.perf_counter() - start)
    return request.result


def encode_chat(tokenizer: object, turns: Sequence[str], replies: Sequence[str] = ()) -> list[int]:
    """Token ids of a chat up to and including turn `len(replies)`, the generation prompt included.

    `tokenizer` is a transformers tokenizer with a chat template.
    """
    if len(replies) >= len(turns):
        raise ValueError(f"{len(replies)} replies leave no turn to answer among {len(turns)}")
    messages = []
    for index, turn in enumerate(turns[: len(replies) + 1]):
        if not turn.strip():
            raise ValueError(f"turn {index} of the prompt is empty")
        messages.append({"role": "user", "content": turn})
        if index < len(replies):
            messages.append({"role": "assistant", "content": replies[index]})
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)  # type: ignore[attr-defined]
    return [int(token) for token in ids]
