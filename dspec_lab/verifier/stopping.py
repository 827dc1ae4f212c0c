"""Where a generation ends: end tokens, stop strings, length caps, also in the middle of a block.

Rule: the first event by position wins; at the same position a stop comes before the length cap. An end token is kept
as the last token. A stop string is not part of the text, nor are tokens that lie wholly inside or behind it: the ids
are the shortest prefix that spells all of the text before it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from dspec_lab.core.types import FinishReason


@runtime_checkable
class TokenDecoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def decode(self, token_ids: Sequence[int], **options: object) -> str:
        """Text of `token_ids`."""
        ...


@dataclass(frozen=True, slots=True)
class Ending:
    """How many of the tokens so far are kept, and why decoding ends there."""

    keep: int
    reason: FinishReason
    text: str | None = None  # only for a stop string: the text before it


def spell(decoder: TokenDecoder, token_ids: Sequence[int]) -> str:
    """Text of `token_ids` as shown to users: special tokens left out, spaces as they are."""
    return decoder.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def find_ending(
    token_ids: Sequence[int],
    fresh: int,
    *,
    eos_ids: Collection[int],
    max_new_tokens: int,
    stop_strings: Sequence[str] = (),
    decoder: TokenDecoder | None = None,
) -> Ending | None:
    """The first end among the last `fresh` of `token_ids` (all tokens generated so far), or None to go on."""
    before = len(token_ids) - fresh
    endings: list[tuple[int, int, Ending]] = []  # position of the last token looked at, rank, ending
    for at in range(before, len(token_ids)):
        if token_ids[at] in eos_ids:
            endings.append((at, 0, Ending(at + 1, "stop")))
            break
    if stop_strings:
        if decoder is None:
            raise ValueError(f"stop strings {list(stop_strings)} need a tokenizer")
        found = _first_stop_string(token_ids, before, stop_strings, decoder)
        if found is not None:
            endings.append((found[0], 1, found[1]))
    if len(token_ids) >= max_new_tokens:
        endings.append((max_new_tokens - 1, 2, Ending(max_new_tokens, "length")))
    return min(endings)[2] if endings else None


def _first_stop_string(
    token_ids: Sequence[int], before: int, stop_strings: Sequence[str], decoder: TokenDecoder
) -> tuple[int, Ending] | None:
    text = spell(decoder, token_ids)
    if not any(stop in text for stop in stop_strings):
        return None
    # the first token that completes a stop string decides, so that block sizes make no difference
    for at in range(before, len(token_ids)):
        text = spell(decoder, token_ids[: at + 1])
        starts = [text.find(stop) for stop in stop_strings if stop in text]
        if starts:
            kept_text = text[: min(starts)]
            # by text, not by its length: half a character spells a replacement sign of length 1
            keep = next(n for n in range(at + 2) if spell(decoder, token_ids[:n]).startswith(kept_text))
            return at, Ending(keep, "stop", kept_text)
    return None
