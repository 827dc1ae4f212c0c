"""A trace as flat columns: which rounds pass a filter, and what each drafted token was and became."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from dspec_lab.verifier.trace import read_trace

Outcome = Literal["accepted", "rejected", "discarded", "extra"]
# which rounds a filter shows
Show = Literal["all", "rejected", "whole block kept", "nothing kept", "cut by the threshold"]
SHOWS: tuple[Show, ...] = get_args(Show)

_LISTS = ("draft_ids", "confidence", "accept_prob", "target_entropy_bits", "draft_entropy_bits")
_SCALARS = ("request_id", "prompt_id", "domain", "drafter", "temperature", "round", "context_tokens", "gamma")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenView:
    """One token of a round. Numbers are None where the trace has none; `cut` says that a threshold would cut it."""

    token_id: int
    outcome: Outcome
    position: int | None  # None for the target's own token
    confidence: float | None = None
    survival: float | None = None
    accept_prob: float | None = None
    target_entropy_bits: float | None = None
    draft_entropy_bits: float | None = None
    cut: bool = False


class TraceTable:
    """Columns of a trace. Lists are kept flat with one start per round, so that 10^5 rounds stay quick."""

    def __init__(self, columns: Mapping[str, Any], flat: Mapping[str, np.ndarray], lengths: Mapping[str, np.ndarray]):
        self.columns = {name: np.asarray(values) for name, values in columns.items()}
        self._flat = dict(flat)
        self._start = {name: np.concatenate([[0], np.cumsum(counts)]) for name, counts in lengths.items()}
        if not len(self):
            raise ValueError("the trace has no round")

    @classmethod
    def read(cls, path: Path | str) -> TraceTable:
        """The table of a trace file."""
        table = read_trace(path).data.table
        columns = {name: table.column(name).to_numpy() for name in (*_SCALARS, "num_accepted")}
        if "next_token" in table.column_names:
            columns["next_token"] = table.column("next_token").to_numpy()
        flat, lengths = {}, {}
        for name in _LISTS:
            column = table.column(name).combine_chunks()
            flat[name] = column.flatten().to_numpy(zero_copy_only=False)
            lengths[name] = column.value_lengths().to_numpy(zero_copy_only=False)
        return cls(columns, flat, lengths)

    @classmethod
    def of_rows(cls, rows: Sequence[Mapping[str, Any]]) -> TraceTable:
        """The table of trace rows in memory."""
        names = (*_SCALARS, "num_accepted", *(["next_token"] if rows and "next_token" in rows[0] else []))
        columns = {name: np.array([row[name] for row in rows]) for name in names}
        flat = {name: np.array([x for row in rows for x in row[name]]) for name in _LISTS}
        return cls(columns, flat, {name: np.array([len(row[name]) for row in rows]) for name in _LISTS})

    def __len__(self) -> int:
        return len(self.columns["gamma"])

    @property
    def domains(self) -> tuple[str, ...]:
        """Domains that occur, sorted."""
        return tuple(sorted(set(self.columns["domain"].tolist())))

    @property
    def requests(self) -> tuple[str, ...]:
        """Requests in order of their first round."""
        return tuple(dict.fromkeys(self.columns["request_id"].tolist()))

    def list_of(self, name: str, row: int) -> np.ndarray:
        """One round's values of a list column; empty where the trace has none."""
        start = self._start[name]
        return self._flat[name][start[row] : start[row + 1]]

    def flat(self, name: str) -> tuple[np.ndarray, list[int]]:
        """All values of a list column in one row, and where each round's begin (one more entry at the end)."""
        return self._flat[name], self._start[name].tolist()

    def token_ids(self) -> tuple[int, ...]:
        """Every token id that occurs, sorted."""
        found = set(self._flat["draft_ids"].tolist())
        if "next_token" in self.columns:
            found |= set(self.columns["next_token"].tolist()) - {-1}
        return tuple(sorted(found))

    def kept_lengths(self, threshold: float) -> np.ndarray:
        """Drafts of each round before the first whose survival is below `threshold`; all where there is none."""
        gamma = self.columns["gamma"]
        if threshold <= 0 or not len(self._flat["confidence"]):
            return gamma
        widest = max(1, int(gamma.max()))
        counts = np.diff(self._start["confidence"])
        padded = np.ones((len(self), widest))
        padded[np.arange(widest)[None] < counts[:, None]] = self._flat["confidence"]
        return np.minimum(gamma, (np.cumprod(padded, axis=1) >= threshold).sum(1))

    def select(
        self, *, domain: str = "all", request: str = "all", show: Show = "all", threshold: float = 0.0
    ) -> np.ndarray:
        """Numbers of the rounds that pass all filters, in order."""
        if show not in SHOWS:
            raise ValueError(f"show must be one of {', '.join(SHOWS)}, got {show!r}")
        keep = np.ones(len(self), dtype=bool)
        for name, wanted, known in (("domain", domain, self.domains), ("request_id", request, self.requests)):
            if wanted != "all":
                if wanted not in known:
                    raise ValueError(f"the trace has no {name} {wanted!r}")
                keep &= self.columns[name] == wanted
        gamma, kept = self.columns["gamma"], self.columns["num_accepted"]
        if show == "rejected":
            keep &= kept < gamma
        elif show == "whole block kept":
            keep &= (kept == gamma) & (gamma > 0)
        elif show == "nothing kept":
            keep &= kept == 0
        elif show == "cut by the threshold":
            keep &= self.kept_lengths(threshold) < gamma
        return np.flatnonzero(keep)

    def tokens(self, row: int, *, threshold: float = 0.0) -> list[TokenView]:
        """The drafts of a round and, where the trace has it, the target's own token."""
        ids = self.list_of("draft_ids", row).tolist()
        num_accepted = int(self.columns["num_accepted"][row])
        lists = {name: self.list_of(name, row).tolist() or [None] * len(ids) for name in _LISTS[1:]}
        views, chance = [], 1.0
        for k, token in enumerate(ids):
            confidence = lists["confidence"][k]
            survival = None
            if confidence is not None:
                chance *= confidence
                survival = chance
            outcome: Outcome = "accepted" if k < num_accepted else "rejected" if k == num_accepted else "discarded"
            views.append(
                TokenView(
                    token_id=int(token), outcome=outcome, position=k + 1, confidence=confidence, survival=survival,
                    accept_prob=lists["accept_prob"][k], target_entropy_bits=lists["target_entropy_bits"][k],
                    draft_entropy_bits=lists["draft_entropy_bits"][k],
                    cut=survival is not None and survival < threshold,
                )
            )  # fmt: skip
        own = int(self.columns["next_token"][row]) if "next_token" in self.columns else -1
        if own >= 0:
            views.append(TokenView(token_id=own, outcome="extra", position=None))
        return views


def token_texts(tokenizer: Any, token_ids: Sequence[int]) -> dict[int, str]:
    """Each token's own text, blanks and line ends made visible; half a character is shown as U+FFFD."""
    texts = {}
    for token in token_ids:
        text = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        texts[token] = text.replace(" ", "·").replace("\n", "↵").replace("\t", "⇥").replace("\r", "␍")
    return texts
