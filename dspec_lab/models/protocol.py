"""What the verifier asks of a target model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Features:
    """Hidden states of consecutive target rows, for drafters. Row i belongs to the token fed at that row."""

    tapped_NF: Tensor | None = None  # outputs of the tapped layers, concatenated in rising layer order
    last_ND: Tensor | None = None  # after the target's final norm


@dataclass(frozen=True, slots=True)
class TargetRows:
    """Result of feeding tokens to a session."""

    logits_JV: Tensor  # the last `logit_rows` rows; any float dtype
    features: Features | None  # all rows fed, where the session was opened with taps

    def tapped_NF(self) -> Tensor:
        """The tapped layers' outputs; `ValueError` where the session was opened without such taps."""
        if self.features is None or self.features.tapped_NF is None:
            raise ValueError("the pass gave no tapped layers: open the session with Taps(layers=...)")
        return self.features.tapped_NF

    def last_ND(self) -> Tensor:
        """Hidden states after the final norm; `ValueError` where the session was opened without that tap."""
        if self.features is None or self.features.last_ND is None:
            raise ValueError("the pass gave no last hidden states: open the session with Taps(last_hidden=True)")
        return self.features.last_ND


@dataclass(frozen=True, kw_only=True, slots=True)
class Taps:
    """Which hidden states a drafter needs.

    A layer id i >= 0 is the output of 0-based decoder layer i; -1 is the embedding output. The last layer's id is
    refused: `last_hidden` gives its output after the final norm.
    """

    layers: tuple[int, ...] = ()
    last_hidden: bool = False

    def __bool__(self) -> bool:
        return bool(self.layers) or self.last_hidden

    def check(self, num_layers: int) -> None:
        """Raise `ValueError` for ids that are out of range, not rising, or the last layer's."""
        if any(later <= earlier for earlier, later in zip(self.layers, self.layers[1:], strict=False)):
            raise ValueError(f"target layer ids must rise strictly, got {list(self.layers)}")
        for layer in self.layers:
            if not -1 <= layer < num_layers - 1:
                raise ValueError(
                    f"target layer id {layer} is out of range: -1 (embedding) to {num_layers - 2} are allowed for a "
                    f"target of {num_layers} layers (the last layer is read after the final norm instead)"
                )


@runtime_checkable
class TargetSession(Protocol):
    """One request's key/value cache, which can be rolled back exactly."""

    @property
    def length(self) -> int:
        """Tokens whose keys and values the cache holds."""
        ...

    def extend(self, token_ids: Sequence[int], *, logit_rows: int | None = None) -> TargetRows:
        """Feed tokens after the cached ones; row j of the logits is the law after the j-th fed token.

        `logit_rows` limits the logits to the last rows (None: all). Raises `ValueError` when the context is full.
        """
        ...

    def truncate(self, length: int) -> None:
        """Forget all tokens from `length` on. Afterwards the session acts as if they had never been fed."""
        ...


@runtime_checkable
class Target(Protocol):
    """A model that can be asked for its law, token by token."""

    name: str
    vocab_size: int
    num_layers: int
    hidden_size: int
    max_context: int
    eos_ids: frozenset[int]
    dtype: torch.dtype
    device: torch.device

    def session(self, *, capacity: int, taps: Taps | None = None) -> TargetSession:
        """A fresh cache with room for `capacity` tokens."""
        ...

    def embedding(self) -> Tensor:
        """Token embedding table [V, D]: the tensor itself, not a copy (drafters share it)."""
        ...

    def head(self) -> Tensor:
        """Output head [V, D]: the tensor itself, not a copy."""
        ...
