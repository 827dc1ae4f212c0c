"""Table targets: tiny models whose law is written down, for exact checks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from dspec_lab.models.protocol import Features, Taps, TargetRows


class TableTarget:
    """A Markov chain of order 1 or 2 over a small vocabulary; its law is a table of probabilities, float64.

    `probs` is [V, V] (row: previous token) or [V, V, V] (the two previous tokens, older first; a first token's older
    neighbour counts as 0). Its "hidden state" is the one-hot previous token.
    """

    def __init__(
        self, probs: Tensor, *, name: str = "table", eos_ids: Sequence[int] = (), max_context: int = 512
    ) -> None:
        vocab = probs.shape[-1]
        if probs.ndim not in (2, 3) or any(size != vocab for size in probs.shape):
            raise ValueError(f"a table needs the shape [V, V] or [V, V, V], got {list(probs.shape)}")
        if bool((probs < 0).any()) or not torch.allclose(probs.double().sum(-1), torch.ones((), dtype=torch.float64)):
            raise ValueError("each row of a table must hold probabilities that sum to 1")
        self.probs = probs.double()
        self._logits = self.probs.log()
        self.name, self.eos_ids, self.max_context = name, frozenset(eos_ids), max_context
        self.vocab_size = self.hidden_size = vocab
        self.num_layers = 1
        self.dtype, self.device = torch.float64, torch.device("cpu")

    @classmethod
    def random(
        cls, vocab: int, *, order: int = 1, sharpness: float = 1.0, seed: int = 0, **options: object
    ) -> TableTarget:
        """A table drawn from softmax(sharpness * normal)."""
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn((vocab,) * (order + 1), generator=generator, dtype=torch.float64)
        return cls(torch.softmax(sharpness * logits, -1), **options)  # type: ignore[arg-type]

    def law_after(self, tokens: Sequence[int]) -> Float[Tensor, " V"]:
        """The law of the next token."""
        return self.probs[self._row(tokens)]

    def logits_after(self, tokens: Sequence[int]) -> Float[Tensor, " V"]:
        """Log-probabilities of the next token."""
        return self._logits[self._row(tokens)]

    def _row(self, tokens: Sequence[int]) -> tuple[int, ...]:
        if self.probs.ndim == 2:
            return (tokens[-1],)
        return (tokens[-2] if len(tokens) > 1 else 0, tokens[-1])

    def session(self, *, capacity: int, taps: Taps | None = None) -> TableSession:
        """A session; its cache is the list of tokens."""
        return TableSession(self, capacity, taps or Taps())

    def embedding(self) -> Tensor:
        """One-hot rows."""
        return torch.eye(self.vocab_size, dtype=torch.float64)

    def head(self) -> Tensor:
        """Log-probabilities of an order-1 table, so that head^T of a one-hot state gives the logits."""
        if self.probs.ndim != 2:
            raise ValueError("only a table of order 1 has an output head")
        return self.probs.log().T.contiguous()

    def sequence_law(self, prompt: Sequence[int], length: int) -> dict[tuple[int, ...], float]:
        """Chance of each continuation of `length` tokens, cut after an end token."""
        found: dict[tuple[int, ...], float] = {}
        for ids in itertools.product(range(self.vocab_size), repeat=length):
            chance, kept = 1.0, []
            for token in ids:
                chance *= float(self.law_after([*prompt, *kept])[token])
                kept.append(token)
                if token in self.eos_ids:
                    break
            found[tuple(kept)] = chance  # the same for all continuations behind an end token
        return found


class TableSession:
    """One request on a table target."""

    def __init__(self, table: TableTarget, capacity: int, taps: Taps) -> None:
        if taps.layers:
            raise ValueError(f"a table target has no layers to tap, got {list(taps.layers)}")
        self._table, self._capacity, self._taps = table, capacity, taps
        self._tokens: list[int] = []

    @property
    def length(self) -> int:
        """Tokens held."""
        return len(self._tokens)

    def extend(self, token_ids: Sequence[int], *, logit_rows: int | None = None) -> TargetRows:
        """Feed tokens; logits are log-probabilities."""
        if len(self._tokens) + len(token_ids) > self._capacity:
            raise ValueError(f"{len(self._tokens)} + {len(token_ids)} tokens do not fit a cache of {self._capacity}")
        rows = []
        for token in token_ids:
            self._tokens.append(token)
            rows.append(self._table.logits_after(self._tokens[-2:]))
        wanted = len(rows) if logit_rows is None else logit_rows
        logits_JV = torch.stack(rows[len(rows) - wanted :])
        features = None
        if self._taps.last_hidden:
            features = Features(last_ND=self._table.embedding()[torch.tensor(token_ids)])
        return TargetRows(logits_JV=logits_JV, features=features)

    def truncate(self, length: int) -> None:
        """Forget all tokens from `length` on."""
        if not 0 <= length <= len(self._tokens):
            raise ValueError(f"cannot roll a cache of {len(self._tokens)} tokens back to {length}")
        del self._tokens[length:]
