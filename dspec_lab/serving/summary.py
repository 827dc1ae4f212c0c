"""What a load did, real or simulated, in the same numbers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestEnd:
    """One request that has ended. Times are seconds since the load began."""

    arrived_s: float
    began_s: float  # its prompt has been read
    ended_s: float
    tokens: int  # gained in rounds
    starved_rounds: int = 0  # most rounds in a row in which none of its drafts was verified
    longest_gap_s: float | None = None  # between two of its rounds; None where nobody looked

    @property
    def rate_tok_per_s(self) -> float:
        """Tokens per second as this user sees them, waiting in line left out."""
        return self.tokens / (self.ended_s - self.began_s) if self.ended_s > self.began_s else 0.0


@dataclass(slots=True)
class RoundTally:
    """One entry per round."""

    seconds: list[float] = field(default_factory=list)
    requests: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    verified: list[int] = field(default_factory=list)  # drafts sent to the target
    committed: list[int] = field(default_factory=list)
    draft_s: list[float] = field(default_factory=list)

    def add(
        self, *, seconds: float, requests: int, drafted: int, verified: int, committed: int, draft_s: float = 0.0
    ) -> None:
        """One more round."""
        self.seconds.append(seconds)
        self.requests.append(requests)
        self.drafted.append(drafted)
        self.verified.append(verified)
        self.committed.append(committed)
        self.draft_s.append(draft_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadSummary:
    """Rates per second of rounds; a request-round is one request in one round."""

    rounds: int
    request_rounds: int
    requests_ended: int
    tokens: int  # gained in the rounds counted
    concurrency: float  # mean requests per round, weighted by time
    throughput_tok_per_s: float
    user_tok_per_s: float  # throughput / concurrency: the mean user's rate
    user_p50_tok_per_s: float | None  # over ended requests; None where none has ended
    user_p95_tok_per_s: float | None  # that 95 % of the users exceed
    accepted_length: float  # tokens per request-round
    budget: float  # rows verified per request-round, the extra token's row included
    drafted: float  # drafts made per request-round
    wasted_rows: float  # share of verified rows that gained no token
    wasted_drafts: float  # share of drafted tokens that gained no token
    round_s: float  # mean
    wait_p95_s: float | None  # from arrival to the first round
    most_starved_rounds: int | None
    longest_gap_s: float | None

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def summarise(tally: RoundTally, ends: Sequence[RequestEnd], *, skip: int = 0) -> LoadSummary:
    """The summary of the rounds from `skip` on and of the requests that began in them (of all, where none did).

    Raises `ValueError` when no round is left.
    """
    seconds, requests = tally.seconds[skip:], tally.requests[skip:]
    if not seconds:
        raise ValueError(f"{len(tally.seconds)} rounds, {skip} of them left out: nothing to sum up")
    committed, verified, drafted = sum(tally.committed[skip:]), sum(tally.verified[skip:]), sum(tally.drafted[skip:])
    wall, request_rounds = sum(seconds), sum(requests)
    concurrency = sum(s * n for s, n in zip(seconds, requests, strict=True)) / wall
    if skip:
        from_s = sum(tally.seconds[:skip])
        ends = [end for end in ends if end.began_s >= from_s] or ends
    rates = sorted(end.rate_tok_per_s for end in ends if end.tokens)
    gaps = [end.longest_gap_s for end in ends if end.longest_gap_s is not None]
    rows = verified + request_rounds
    gained_drafts = committed - request_rounds
    return LoadSummary(
        rounds=len(seconds),
        request_rounds=request_rounds,
        requests_ended=len(ends),
        tokens=committed,
        concurrency=concurrency,
        throughput_tok_per_s=committed / wall,
        user_tok_per_s=committed / wall / concurrency,
        user_p50_tok_per_s=statistics.median(rates) if rates else None,
        user_p95_tok_per_s=_low(rates, 0.05),
        accepted_length=committed / request_rounds,
        budget=rows / request_rounds,
        drafted=drafted / request_rounds,
        wasted_rows=max(0, rows - committed) / rows,
        wasted_drafts=max(0, drafted - gained_drafts) / drafted if drafted else 0.0,
        round_s=wall / len(seconds),
        wait_p95_s=_low([-end.began_s + end.arrived_s for end in ends], 0.05, negate=True),
        most_starved_rounds=max((end.starved_rounds for end in ends), default=None),
        longest_gap_s=max(gaps, default=None),
    )


def _low(values: Sequence[float], share: float, *, negate: bool = False) -> float | None:
    if not values:
        return None
    found = sorted(values)[min(len(values) - 1, int(share * len(values)))]
    return -found if negate else found
