"""What the decoding loop asks of a drafter.

A request runs so: the target reads the prompt and gives the first new token, the anchor. The drafter is started with
the request's limits and told of prompt, anchor and features by `commit`. Then, each round: `propose` drafts up to
gamma tokens after the anchor, the target verifies them, and `commit` brings the tokens that were kept. Between calls
a session's context holds committed tokens only: whatever `propose` put into a draft cache has left it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from dspec_lab.config import SamplingConfig
from dspec_lab.core.streams import DraftDraws
from dspec_lab.core.types import Proposal
from dspec_lab.models.protocol import Features, Taps, Target


@dataclass(frozen=True, slots=True)
class Commit:
    """Tokens that became final, and the target's features of the rows that produced them.

    The first commit of a request has `token_ids` = prompt + first new token and a feature row for each prompt token.
    A later one has the kept drafts and the extra token, with a row for the old anchor and each kept draft. So there
    are always as many feature rows in all as known tokens less one: the newest token (the next anchor) has no
    features yet. `features` is None where the drafter's taps are empty.
    """

    token_ids: tuple[int, ...]
    features: Features | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftAsk:
    """What one session is asked for in a round: the arguments of its `propose`."""

    session: DraftSession
    gamma: int
    sampling: SamplingConfig
    draws: DraftDraws


@runtime_checkable
class DraftSession(Protocol):
    """One request's drafting state."""

    def commit(self, commit: Commit) -> None:
        """Take over committed tokens. Called once before the first `propose` and after every round, gamma 0 too."""
        ...

    def propose(self, gamma: int, sampling: SamplingConfig, draws: DraftDraws) -> Proposal:
        """Draft at most `gamma` tokens after the newest committed token; fewer, or none, is allowed.

        A sampled draft passes its logits through `core.sampling.law(logits, sampling)`, draws token k with
        `draws.categorical(k, row)` and hands these rows over as `draft_probs_GV` in the target's vocabulary.
        A drafter that does not sample (greedy, n-gram) leaves `draft_probs_GV` None.
        """
        ...


@runtime_checkable
class SessionView(DraftSession, Protocol):
    """A session that shows another one's proposals changed; the tokens are drafted by `inner`."""

    inner: DraftSession

    def seen(self, proposal: Proposal) -> Proposal:
        """What the view makes of a proposal of `inner`."""
        ...


@runtime_checkable
class Drafter(Protocol):
    """A way of drafting, shared by all requests; holds weights but no request's state."""

    name: str
    taps: Taps  # what it needs of the target
    max_gamma: int | None  # largest block it was trained for; None has no limit

    def start(self, target: Target, *, capacity: int) -> DraftSession:
        """A fresh session for a request of at most `capacity` tokens, prompt included."""
        ...
