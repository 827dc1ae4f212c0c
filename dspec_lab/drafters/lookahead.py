"""Lookahead decoding: Jacobi iteration of the target on guessed tokens, and a pool of the n-grams it leaves behind.

No model of its own, but target passes of its own: each proposal costs one pass over the new tokens and the guesses.
The published method puts guesses and proposals into one pass with a special mask; here the verifier's pass stays
what it is for every drafter, so a round costs two passes and its first proposal is the target's own greedy choice.

Ref: Fu et al. 2024 (arXiv:2402.02057).
"""

from __future__ import annotations

from collections import OrderedDict, deque

from dspec_lab.config import SamplingConfig
from dspec_lab.core.sampling import greedy_ids
from dspec_lab.core.streams import DraftDraws
from dspec_lab.core.types import Proposal
from dspec_lab.drafters.protocol import Commit
from dspec_lab.models.protocol import Taps, Target


class LookaheadDrafter:
    """The draft depends on committed tokens alone and is not sampled, so q is one-hot on it, at any temperature.

    `window` tokens are guessed ahead and refined by every pass; n-grams of `ngram` tokens are collected along the
    diagonal of successive passes, each token made from the one before it one pass earlier.
    """

    taps = Taps()
    max_gamma = None

    def __init__(
        self, *, window: int = 8, ngram: int = 4, pool_tokens: int = 4096, per_token: int = 4, name: str = "lookahead"
    ) -> None:
        if window < 1 or ngram < 2 or pool_tokens < 1 or per_token < 1:
            raise ValueError(
                f"need window >= 1, ngram >= 2, pool_tokens >= 1 and per_token >= 1, got {window}, {ngram}, "
                f"{pool_tokens} and {per_token}"
            )
        self.name = name
        self.window, self.ngram = window, ngram
        self.pool_tokens, self.per_token = pool_tokens, per_token

    def start(self, target: Target, *, capacity: int) -> LookaheadSession:
        """A session with its own target cache, of at most `capacity` tokens and the window."""
        return LookaheadSession(self, target, capacity)


class NgramPool:
    """Continuations by first token, newest first; bounded, the token longest unused is dropped first."""

    def __init__(self, max_tokens: int, per_token: int) -> None:
        self._max_tokens = max_tokens
        self._per_token = per_token
        self._found: OrderedDict[int, list[tuple[int, ...]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._found)

    def add(self, ngram: tuple[int, ...]) -> None:
        """Remember that `ngram[1:]` came after `ngram[0]`."""
        first, rest = ngram[0], ngram[1:]
        kept = [other for other in self._found.pop(first, []) if other != rest]
        self._found[first] = [rest, *kept][: self._per_token]
        if len(self._found) > self._max_tokens:
            self._found.popitem(last=False)

    def newest(self, token: int) -> tuple[int, ...]:
        """The newest continuation of `token`, empty if there is none."""
        found = self._found.get(token)
        if not found:
            return ()
        self._found.move_to_end(token)
        return found[0]


class LookaheadSession:
    """One request: its tokens, the guesses by position, and the pool."""

    def __init__(self, drafter: LookaheadDrafter, target: Target, capacity: int) -> None:
        room = min(capacity + drafter.window, target.max_context)
        self._room = room
        self._target = target.session(capacity=room)
        self._window, self._ngram = drafter.window, drafter.ngram
        self._tokens: list[int] = []
        # what each of the last passes fed by position, and whether it was the pass before's choice for that place
        self._passes: deque[dict[int, tuple[int, bool]]] = deque(maxlen=drafter.ngram - 1)
        self._pool = NgramPool(drafter.pool_tokens, drafter.per_token)
        self._guessed: dict[int, int] = {}
        self._indexed = 0

    def commit(self, commit: Commit) -> None:
        """Take over the tokens; their n-grams join the pool."""
        self._tokens += commit.token_ids
        last = len(self._tokens) - self._ngram
        for at in range(self._indexed, last + 1):
            self._pool.add(tuple(self._tokens[at : at + self._ngram]))
        self._indexed = max(self._indexed, last + 1)

    def propose(self, gamma: int, sampling: SamplingConfig, draws: DraftDraws) -> Proposal:
        """One Jacobi pass, then a draft from its first choice on: n-grams of the pool, else the refined guesses."""
        if not self._tokens:
            raise ValueError("lookahead was asked to propose before the prompt was committed")
        if gamma < 1:
            return Proposal(())
        refined = self._jacobi_pass()
        draft = [refined[0]]
        while len(draft) < gamma:
            more = self._pool.newest(draft[-1]) or tuple(refined[len(draft) : len(draft) + 1])
            if not more:
                break
            draft += more
        return Proposal(tuple(draft[:gamma]))

    def _jacobi_pass(self) -> list[int]:
        """The target's choice after the anchor and after each guess; the guesses of the next pass."""
        anchor_at = len(self._tokens) - 1
        room = min(self._window, self._room - len(self._tokens))
        fed = [(self._tokens[-1], False), *self._guesses(anchor_at, room)]
        feed = self._tokens[self._target.length : -1] + [token for token, _ in fed]
        refined = greedy_ids(self._target.extend(feed, logit_rows=len(fed)).logits_JV)
        self._target.truncate(len(self._tokens))
        self._passes.append({anchor_at + i: entry for i, entry in enumerate(fed)})
        self._collect(anchor_at, refined)
        self._guessed = {anchor_at + 1 + i: token for i, token in enumerate(refined)}
        return refined

    def _guesses(self, anchor_at: int, count: int) -> list[tuple[int, bool]]:
        """Tokens for the `count` places after the anchor: the last pass's choices, else earlier text (marked false)."""
        guesses = []
        for i in range(count):
            chosen = self._guessed.get(anchor_at + 1 + i)
            if chosen is None:
                # what lies as far back as the window is long starts an empty place
                guesses.append((self._tokens[(anchor_at - self._window + i) % len(self._tokens)], False))
            else:
                guesses.append((chosen, True))
        return guesses

    def _collect(self, anchor_at: int, refined: list[int]) -> None:
        """Pool the n-grams that end in this pass: each token the target's choice after the one before it."""
        if len(self._passes) < self._ngram - 1:
            return
        for i, newest in enumerate(refined):
            last_at = anchor_at + 1 + i
            before = [held.get(last_at - len(self._passes) + age) for age, held in enumerate(self._passes)]
            # a token that the pass before it did not choose can only stand first
            if all(entry is not None and (age == 0 or entry[1]) for age, entry in enumerate(before)):
                self._pool.add((*(entry[0] for entry in before if entry is not None), newest))
