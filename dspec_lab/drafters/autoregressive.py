"""A separate small language model as drafter: the baseline of speculative decoding.

Ref: Leviathan et al. 2023 (arXiv:2211.17192); Chen et al. 2023 (arXiv:2302.01318).
"""

from __future__ import annotations

from dspec_lab.config import SamplingConfig
from dspec_lab.core.sampling import greedy_ids, law
from dspec_lab.core.streams import DraftDraws
from dspec_lab.core.types import Proposal
from dspec_lab.drafters.protocol import Commit
from dspec_lab.models.protocol import Taps, Target


class AutoregressiveDrafter:
    """Any target-like model with the target's tokenizer drafts token by token from its own cache.

    Greedy requests get a greedy draft (one-hot q); sampled ones a draft sampled under the request's own filters.
    """

    taps = Taps()
    max_gamma = None

    def __init__(self, model: Target, *, name: str = "autoregressive") -> None:
        self.model, self.name = model, name

    def start(self, target: Target, *, capacity: int) -> AutoregressiveSession:
        """A session with an empty cache; refuses a draft model of another vocabulary."""
        if self.model.vocab_size != target.vocab_size:
            raise ValueError(
                f"the draft model {self.model.name} has {self.model.vocab_size} tokens, the target {target.vocab_size}"
            )
        return AutoregressiveSession(self.model, min(capacity, self.model.max_context))


class AutoregressiveSession:
    """The draft model's cache. Between rounds it holds committed tokens only, all but the newest."""

    def __init__(self, model: Target, capacity: int) -> None:
        self._capacity = capacity
        self._session = model.session(capacity=capacity)
        self._tokens: list[int] = []
        self._cached: list[int] = []  # what the cache holds, drafts of the last round included

    def commit(self, commit: Commit) -> None:
        """Roll the cache back to what is both cached and committed."""
        self._tokens += commit.token_ids
        keep = 0
        limit = min(len(self._cached), len(self._tokens) - 1)
        # all before the last round's anchor is known to agree; only its drafts can differ
        keep = max(0, min(limit, len(self._tokens) - len(commit.token_ids)))
        while keep < limit and self._cached[keep] == self._tokens[keep]:
            keep += 1
        self._session.truncate(keep)
        del self._cached[keep:]

    def propose(self, gamma: int, sampling: SamplingConfig, draws: DraftDraws) -> Proposal:
        """Draft `gamma` tokens, fewer where the draft model's context ends."""
        import torch

        gamma = min(gamma, self._capacity - len(self._tokens))
        ids: list[int] = []
        rows, raw = [], []
        for slot in range(gamma):
            feed = [*self._tokens, *ids][len(self._cached) :]
            logits_1V = self._session.extend(feed, logit_rows=1).logits_JV
            self._cached += feed
            raw.append(logits_1V[0])
            if sampling.greedy:
                ids.append(greedy_ids(logits_1V, what="draft")[0])
            else:
                probs_V = law(logits_1V, sampling, what="draft")[0]
                rows.append(probs_V)
                ids.append(draws.categorical(slot, probs_V))
        if not ids:
            return Proposal(())
        return Proposal(
            tuple(ids),
            draft_probs_GV=torch.stack(rows) if rows else None,
            draft_logits_GV=torch.stack(raw),
        )
