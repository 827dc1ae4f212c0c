"""How the simulator's drafts fare: conditional chances per draft position, parametric per domain or out of a trace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Integer

SHARE_TOLERANCE = 1e-6


@runtime_checkable
class AcceptanceState(Protocol):
    """Running requests in numbered places."""

    def begin(self, places: Integer[np.ndarray, " P"]) -> None:
        """Put new requests at `places`."""
        ...

    def draw(
        self, places: Integer[np.ndarray, " B"], tokens_B: Integer[np.ndarray, " B"]
    ) -> tuple[Float[np.ndarray, "B G"], Float[np.ndarray, "B G"]]:
        """(confidences, true conditional chances) of the drafts of one round, `tokens_B` new tokens into each text."""
        ...


@runtime_checkable
class Acceptance(Protocol):
    """A law of drafting."""

    @property
    def gamma(self) -> int:
        """Drafts of a block."""
        ...

    def start(self, places: int, rng: np.random.Generator) -> AcceptanceState:
        """Fresh state for so many places."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Domain:
    """Conditional chance of draft k: sigmoid(logit_G[k] + request + round + position), each normal with its own spread.

    The round part is a first-order chain with correlation `persistence` from round to round, so that a hard passage
    lasts. `confidence_bias` and `confidence_noise` (logits) make the confidences wrong; 0 and 0 is calibrated.
    """

    name: str
    logit_G: tuple[float, ...]
    share: float = 1.0  # of requests
    request_sd: float = 0.0
    round_sd: float = 0.0
    position_sd: float = 0.0
    persistence: float = 0.8
    confidence_bias: float = 0.0
    confidence_noise: float = 0.0

    def __post_init__(self) -> None:
        if not self.logit_G:
            raise ValueError(f"domain {self.name!r} has no draft position")
        for name in ("share", "request_sd", "round_sd", "position_sd", "confidence_noise"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} of domain {self.name!r} must be 0 or more, got {getattr(self, name)}")
        if not 0 <= self.persistence <= 1:
            raise ValueError(f"persistence of domain {self.name!r} must lie in 0..1, got {self.persistence}")


@dataclass(frozen=True, slots=True)
class ParametricAcceptance:
    """A mixture of domains; a request belongs to one of them."""

    domains: tuple[Domain, ...]

    def __post_init__(self) -> None:
        if not self.domains or len({len(domain.logit_G) for domain in self.domains}) != 1:
            raise ValueError(f"domains need the same number of positions, got {[len(d.logit_G) for d in self.domains]}")
        total = sum(domain.share for domain in self.domains)
        if abs(total - 1) > SHARE_TOLERANCE:
            raise ValueError(f"the domains' shares must add up to 1, got {total}")

    @property
    def gamma(self) -> int:
        """Drafts of a block."""
        return len(self.domains[0].logit_G)

    def start(self, places: int, rng: np.random.Generator) -> ParametricState:
        """Fresh state; every place must `begin` before it draws."""
        return ParametricState(self.domains, places, rng)


class ParametricState:
    """See `AcceptanceState`."""

    def __init__(self, domains: Sequence[Domain], places: int, rng: np.random.Generator) -> None:
        self._rng = rng
        self._share_D = np.array([domain.share for domain in domains])
        self._share_D /= self._share_D.sum()
        self._logit_DG = np.array([domain.logit_G for domain in domains])
        self._spread = {
            name: np.array([getattr(domain, name) for domain in domains])
            for name in (
                "request_sd", "round_sd", "position_sd", "persistence", "confidence_bias", "confidence_noise",
            )
        }  # fmt: skip
        self._wrong = bool(self._spread["confidence_bias"].any() or self._spread["confidence_noise"].any())
        self.domain_P = np.zeros(places, dtype=np.int64)
        self._request_P, self._round_P = np.zeros(places), np.zeros(places)

    def begin(self, places: Integer[np.ndarray, " P"]) -> None:
        """New requests: a domain, a level of their own, and a first passage."""
        count, rng = len(places), self._rng
        self.domain_P[places] = rng.choice(len(self._share_D), count, p=self._share_D)
        self._request_P[places] = rng.standard_normal(count)
        self._round_P[places] = rng.standard_normal(count)

    def draw(
        self, places: Integer[np.ndarray, " B"], tokens_B: Integer[np.ndarray, " B"]
    ) -> tuple[Float[np.ndarray, "B G"], Float[np.ndarray, "B G"]]:
        """Chances of a round; the passage moves on."""
        domain_B, rng = self.domain_P[places], self._rng
        rho_B = self._spread["persistence"][domain_B]
        fresh_B = rng.standard_normal(len(places))
        self._round_P[places] = rho_B * self._round_P[places] + np.sqrt(1 - rho_B**2) * fresh_B
        level_B = self._spread["request_sd"][domain_B] * self._request_P[places]
        level_B += self._spread["round_sd"][domain_B] * self._round_P[places]
        logit_BG = rng.standard_normal((len(places), self._logit_DG.shape[1]), dtype=np.float32)
        logit_BG *= self._spread["position_sd"][domain_B, None].astype(np.float32)
        logit_BG += (self._logit_DG[domain_B] + level_B[:, None]).astype(np.float32)
        chance_BG = _sigmoid(logit_BG)
        if not self._wrong:
            return chance_BG, chance_BG
        noise_BG = rng.standard_normal(logit_BG.shape) * self._spread["confidence_noise"][domain_B, None]
        return _sigmoid(logit_BG + noise_BG + self._spread["confidence_bias"][domain_B, None]), chance_BG


class TraceAcceptance:
    """Requests replayed out of a trace: at each point of a text, the chances of the traced round that began there.

    The trace must come from full-block verification with laws (`accept_prob`); confidences are its own, or the chances
    themselves where the drafter gives none. A text longer than the traced one starts over. `in_turn`: requests replay
    the traced ones in their order, as `serve-bench` serves its prompts; else each draws one.
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]], *, gamma: int | None = None, in_turn: bool = False) -> None:
        by_request: dict[str, list[Mapping[str, Any]]] = {}
        for row in rows:
            by_request.setdefault(str(row["request_id"]), []).append(row)
        longest = max((len(row["accept_prob"]) for group in by_request.values() for row in group), default=0)
        self._gamma, self._in_turn = gamma or longest, in_turn
        if self._gamma < 1:
            raise ValueError("the trace holds no drafted position with its accept_prob")
        if self._gamma > longest:
            raise ValueError(f"gamma {self._gamma} is more than the {longest} drafts of the traced rounds")
        self._kept: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        for group in by_request.values():
            group = sorted(group, key=lambda row: row["round"])
            whole = [row for row in group if len(row["accept_prob"]) >= self._gamma]
            if not whole:
                continue
            starts = np.array([row["context_tokens"] for row in whole])
            chance = np.array([row["accept_prob"][: self._gamma] for row in whole], dtype=np.float32)
            told = [row["confidence"][: self._gamma] if row["confidence"] else row["accept_prob"] for row in whole]
            confidence = np.array([row[: self._gamma] for row in told], dtype=np.float32)
            self._kept.append((starts - starts[0], chance, confidence))
        if not self._kept:
            raise ValueError(f"no traced round has {self._gamma} drafts")

    @property
    def gamma(self) -> int:
        """Drafts of a block."""
        return self._gamma

    @property
    def requests(self) -> int:
        """Traced requests that are replayed."""
        return len(self._kept)

    def start(self, places: int, rng: np.random.Generator) -> TraceState:
        """Fresh state."""
        return TraceState(self._kept, places, rng, in_turn=self._in_turn)


class TraceState:
    """See `AcceptanceState`: one long table of rounds, indexed by request and by tokens since its beginning."""

    def __init__(
        self,
        kept: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]],
        places: int,
        rng: np.random.Generator,
        *,
        in_turn: bool = False,
    ) -> None:
        self._rng, self._in_turn, self._begun = rng, in_turn, 0
        self._chance_NG = np.concatenate([chance for _, chance, _ in kept])
        self._confidence_NG = np.concatenate([confidence for _, _, confidence in kept])
        spans = [int(starts[-1]) + 1 for starts, _, _ in kept]
        firsts = np.cumsum([0, *(len(chance) for _, chance, _ in kept)])
        # row of the table for each token of each request
        at = [np.searchsorted(starts, np.arange(starts[-1] + 1), side="right") - 1 for starts, _, _ in kept]
        self._row_T = np.concatenate([first + rows for first, rows in zip(firsts[:-1], at, strict=True)])
        self._span_R, self._begin_R = np.array(spans), np.cumsum([0, *spans[:-1]])
        self._request_P = np.zeros(places, dtype=np.int64)

    def begin(self, places: Integer[np.ndarray, " P"]) -> None:
        """New requests, each a traced one: drawn, or the next in turn."""
        if self._in_turn:
            self._request_P[places] = (self._begun + np.arange(len(places))) % len(self._span_R)
        else:
            self._request_P[places] = self._rng.integers(len(self._span_R), size=len(places))
        self._begun += len(places)

    def text_tokens(self, places: Integer[np.ndarray, " P"]) -> Integer[np.ndarray, " P"]:
        """Tokens of the traced texts at `places`, as far as rounds began in them."""
        return self._span_R[self._request_P[places]]

    def draw(
        self, places: Integer[np.ndarray, " B"], tokens_B: Integer[np.ndarray, " B"]
    ) -> tuple[Float[np.ndarray, "B G"], Float[np.ndarray, "B G"]]:
        """Chances of the traced rounds at these points."""
        request_B = self._request_P[places]
        row_B = self._row_T[self._begin_R[request_B] + tokens_B % self._span_R[request_B]]
        return self._confidence_NG[row_B], self._chance_NG[row_B]


def _sigmoid(logit: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logit))
