"""Prompt lookup: draft what followed the last tokens when they occurred before. No model."""

from __future__ import annotations

from dspec_lab.config import SamplingConfig
from dspec_lab.core.streams import DraftDraws
from dspec_lab.core.types import Proposal
from dspec_lab.drafters.protocol import Commit
from dspec_lab.models.protocol import Taps, Target


class PromptLookupDrafter:
    """Copies the continuation of the most recent earlier occurrence of the longest matching n-gram.

    The draft is deterministic, so q is one-hot on it. Proposes nothing where no n-gram of at least `min_ngram` tokens
    recurs. Ref: Saxena 2023, prompt lookup decoding; the match takes the latest occurrence, not the first.
    """

    name = "prompt_lookup"
    taps = Taps()
    max_gamma = None

    def __init__(self, *, max_ngram: int = 3, min_ngram: int = 1) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"need 1 <= min_ngram <= max_ngram, got {min_ngram} and {max_ngram}")
        self.max_ngram, self.min_ngram = max_ngram, min_ngram

    def start(self, target: Target, *, capacity: int) -> PromptLookupSession:
        """A session that has seen no token."""
        return PromptLookupSession(self.max_ngram, self.min_ngram)


class PromptLookupSession:
    """The request's tokens and, per n-gram length, where each n-gram last ended before the newest token."""

    def __init__(self, max_ngram: int, min_ngram: int) -> None:
        self._tokens: list[int] = []
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._ends: dict[int, dict[tuple[int, ...], int]] = {size: {} for size in self._sizes}

    def commit(self, commit: Commit) -> None:
        """Index the n-grams that now have a successor."""
        for token in commit.token_ids:
            end = len(self._tokens)
            for size, ends in self._ends.items():
                if end >= size:
                    ends[tuple(self._tokens[end - size : end])] = end
            self._tokens.append(token)

    def propose(self, gamma: int, sampling: SamplingConfig, draws: DraftDraws) -> Proposal:
        """The tokens after the latest earlier occurrence of the longest matching n-gram."""
        for size in self._sizes:
            if len(self._tokens) <= size:
                continue
            at = self._ends[size].get(tuple(self._tokens[-size:]))
            if at is not None:
                return Proposal(tuple(self._copy(at, gamma)))
        return Proposal(())

    def _copy(self, at: int, gamma: int) -> list[int]:
        # a match that runs into the end repeats: the draft itself is its own continuation
        copied: list[int] = []
        for offset in range(gamma):
            source = at + offset
            copied.append(self._tokens[source] if source < len(self._tokens) else copied[source - len(self._tokens)])
        return copied
