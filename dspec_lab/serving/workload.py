"""The load: who asks when. Closed loop keeps a number of requests in flight; open loop sends at given times."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float


@dataclass(frozen=True, kw_only=True, slots=True)
class ClosedLoop:
    """`concurrency` requests in flight at all times: as one ends, the next begins."""

    concurrency: int

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, got {self.concurrency}")


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenLoop:
    """Requests come at `arrivals_s` whatever the server does; at most `max_active` run, the others wait in line."""

    arrivals_s: Float[np.ndarray, " N"]
    max_active: int

    def __post_init__(self) -> None:
        if self.max_active < 1:
            raise ValueError(f"max_active must be at least 1, got {self.max_active}")
        if not len(self.arrivals_s) or (np.diff(self.arrivals_s) < 0).any() or self.arrivals_s[0] < 0:
            raise ValueError(f"arrivals must be there, at 0 or later and in order, got {self.arrivals_s[:5].tolist()}")


Load = ClosedLoop | OpenLoop


def poisson_arrivals(rate_per_s: float, count: int, rng: np.random.Generator) -> Float[np.ndarray, " N"]:
    """Times of `count` independent arrivals at `rate_per_s`."""
    _check(rate_per_s, count)
    return np.cumsum(rng.exponential(1 / rate_per_s, count))


def burst_arrivals(rate_per_s: float, count: int, size: int, rng: np.random.Generator) -> Float[np.ndarray, " N"]:
    """The same mean rate in bursts of `size` at one moment; the bursts come at random."""
    _check(rate_per_s, count)
    if size < 1:
        raise ValueError(f"a burst must hold at least 1 request, got {size}")
    starts = np.cumsum(rng.exponential(size / rate_per_s, -(-count // size)))
    return np.repeat(starts, size)[:count]


def _check(rate_per_s: float, count: int) -> None:
    if not rate_per_s > 0 or not np.isfinite(rate_per_s):
        raise ValueError(f"the arrival rate must be above 0 a second, got {rate_per_s}")
    if count < 1:
        raise ValueError(f"at least 1 request must arrive, got {count}")
