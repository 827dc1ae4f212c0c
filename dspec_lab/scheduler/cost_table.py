"""What a round costs: the target's time by rows sent to it, as measured, and the terms around it.

Between two measured row counts the time is interpolated (`linear`) or that of the one below (`floor`, as SGLang reads
its table). Nothing is smoothed: a step or a cliff between two probes stays where it was seen. Beyond the last probe
the cost is infinite, so that no decision rests on what was not measured.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from dspec_lab.config import from_dict
from dspec_lab.core.files import read_json, write_json

FORMAT = "dspec cost table 1"
Lookup = Literal["linear", "floor"]
LOOKUPS: tuple[Lookup, ...] = ("linear", "floor")
FLAT = 1.05  # a table whose dearest pass costs less than this times its cheapest one cannot trim anything
FALL = 0.97  # a pass below this times the one with fewer rows is a fall, not noise
REMEMBERED = 512  # rounds of one shape each whose times are kept
LEAST_SHARE = 0.1  # of a measured pass that stays with its rows, whatever its requests seem to take
SPREAD = 0.25  # (largest - median) / median of a probe's samples from which it is called noisy


@dataclass(frozen=True, kw_only=True, slots=True)
class CostSample:
    """One timed pass of the target."""

    rows: int  # tokens sent to the target
    context_tokens: int  # tokens that each of its requests held before
    requests: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftCost:
    """Seconds that drafting for a batch takes, by the requests that draft and the tokens they draft in all.

    fixed + per request + per token; where `request_s` is given it stands for the first two, measured at each of
    `request_probes`, with straight lines between and their mean slope beyond.
    """

    drafter: str = ""
    fixed_s: float = 0.0
    per_request_s: float = 0.0
    per_token_s: float = 0.0
    # optional in files: tables from before joint drafting lack them. Whether requests shared the drafter's passes; None
    # is unknown, and such a table's times are those of one pass a request
    joint: bool | None = None
    request_probes: tuple[int, ...] = ()
    request_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("fixed_s", "per_request_s", "per_token_s"):
            _require_seconds(f"draft {name}", getattr(self, name))
        if self.joint not in (None, False, True):
            raise ValueError(f"draft joint must be true, false or left out, got {self.joint!r}")
        if len(self.request_probes) != len(self.request_s):
            raise ValueError(f"drafting has {len(self.request_probes)} request counts but {len(self.request_s)} times")
        if any(a >= b for a, b in zip((0, *self.request_probes), self.request_probes, strict=False)):
            raise ValueError(f"drafting's request counts must rise from 1, got {list(self.request_probes)}")
        for seconds in self.request_s:
            _require_seconds("a time of drafting", seconds)
        if self.request_s and (self.fixed_s or self.per_request_s):
            raise ValueError("drafting is given by request counts: fixed_s and per_request_s must be 0 then")

    def by_requests_N(self, most: int) -> Float[np.ndarray, " N"]:
        """Time for n = 0..most drafting requests, tokens left out; nothing where none drafts. Not to be written to."""
        return _drafting_s_N(self, most)

    def seconds(self, requests: int, tokens: int) -> float:
        """Time to draft `tokens` in all for `requests` requests; nothing where none drafts."""
        return float(self.by_requests_N(requests)[-1]) + self.per_token_s * tokens if requests else 0.0

    def growth(self, requests: int, drafts: int) -> float:
        """Drafting `drafts` tokens for each of `requests` requests over doing so for one; `requests` if not joint."""
        one_s = self.seconds(1, drafts) if self.joint else 0.0
        return self.seconds(requests, requests * drafts) / one_s if one_s else float(requests)


@functools.lru_cache(maxsize=REMEMBERED)
def _drafting_s_N(cost: DraftCost, most: int) -> Float[np.ndarray, " N"]:
    count_N = np.arange(most + 1, dtype=np.float64)
    if cost.request_s:
        probes, seconds = cost.request_probes, cost.request_s
        slope = 0.0 if len(probes) == 1 else max(0.0, (seconds[-1] - seconds[0]) / (probes[-1] - probes[0]))
        found_N = np.interp(count_N, probes, seconds) + slope * np.maximum(count_N - probes[-1], 0.0)
    else:
        found_N = cost.fixed_s + cost.per_request_s * count_N
    found_N[0] = 0.0
    found_N.flags.writeable = False
    return found_N


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """Seconds of a round. `rows` rise strictly; `seconds[i]` is the target's pass over `rows[i]` tokens."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    name: str = ""  # model and machine, for people
    source: str = "given"  # measured, data sheet, fitted, sglang, given
    lookup: Lookup = "linear"
    max_rows: int = 0  # 0: the last probe
    context_tokens: int = 0  # context at which `seconds` holds
    context_s: float = 0.0  # more seconds per row and context token beyond that
    fixed_s: float = 0.0  # per round, whatever its size
    settle_per_request_s: float = 0.0  # verdict, rollback and the drafter's commit, per request
    request_probes: tuple[int, ...] = ()  # and a term by requests, interpolated and clamped (as SGLang's alpha)
    request_s: tuple[float, ...] = ()
    draft: DraftCost = field(default_factory=DraftCost)
    samples: tuple[CostSample, ...] = ()
    run: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.rows:
            raise ValueError("the cost table is empty: it needs at least one row count with its seconds")
        if len(self.rows) != len(self.seconds):
            raise ValueError(f"the cost table has {len(self.rows)} row counts but {len(self.seconds)} times")
        if self.rows[0] < 1 or any(a >= b for a, b in zip(self.rows, self.rows[1:], strict=False)):
            raise ValueError(f"row counts must be at least 1 and rise strictly, got {list(self.rows)}")
        for count, seconds in zip(self.rows, self.seconds, strict=True):
            if not (math.isfinite(seconds) and seconds > 0):
                raise ValueError(f"the time of {count} rows must be above 0 and finite, got {seconds}")
        if self.lookup not in LOOKUPS:
            raise ValueError(f"lookup must be one of {LOOKUPS}, got {self.lookup!r}")
        if self.max_rows and self.max_rows < self.rows[-1]:
            raise ValueError(f"max_rows {self.max_rows} is below the last row count {self.rows[-1]}")
        if self.lookup == "linear" and self.max_rows > self.rows[-1]:
            raise ValueError(f"nothing to interpolate between the last row count {self.rows[-1]} and {self.max_rows}")
        for name in ("context_s", "fixed_s", "settle_per_request_s"):
            _require_seconds(name, getattr(self, name))
        if len(self.request_probes) != len(self.request_s):
            raise ValueError(f"{len(self.request_probes)} request counts but {len(self.request_s)} times")
        if any(a >= b for a, b in zip(self.request_probes, self.request_probes[1:], strict=False)):
            raise ValueError(f"request counts must rise strictly, got {list(self.request_probes)}")

    @property
    def last_row(self) -> int:
        """The most rows whose cost is known."""
        return self.max_rows or self.rows[-1]

    @cached_property
    def verify_s_N(self) -> Float[np.ndarray, " N"]:
        """Seconds of a pass by row count: entry n for n rows, entry 0 infinite, up to `last_row`."""
        count_N = np.arange(self.last_row + 1)
        if self.lookup == "floor":
            at_N = np.searchsorted(self.rows, count_N, side="right") - 1
            found_N = np.asarray(self.seconds)[np.maximum(at_N, 0)]
        else:
            found_N = np.interp(count_N, self.rows, self.seconds)
        found_N[0] = np.inf
        return found_N

    def overhead_s(self, requests: int) -> float:
        """What a round of `requests` requests costs beside drafting and the target's pass."""
        probed = float(np.interp(requests, self.request_probes, self.request_s)) if self.request_probes else 0.0
        return self.fixed_s + self.settle_per_request_s * requests + probed

    def round_s_N(
        self, requests: int, most: int, *, draft_s: float = 0.0, context_tokens: float | None = None
    ) -> Float[np.ndarray, " N"]:
        """Seconds of a round that verifies n = 0..most drafts of `requests` requests, drafting time `draft_s` included.

        Drafting has been paid for when lengths are chosen, but it is part of the round that tokens are won in.
        `context_tokens`: mean context of the requests; None is the table's own. Infinite beyond the table's end.
        """
        if requests < 1 or requests > self.last_row:
            raise ValueError(f"the cost table covers 1 to {self.last_row} rows, {requests} requests need as many")
        held = self._rounds.get((requests, most))
        if held is None:
            base_N = np.full(most + 1, np.inf)
            known_N = self.verify_s_N[requests : requests + most + 1]
            base_N[: len(known_N)] = known_N + self.overhead_s(requests)
            held = base_N, np.arange(requests, requests + most + 1)
            if len(self._rounds) >= REMEMBERED:
                self._rounds.clear()
            self._rounds[requests, most] = held
        base_N, rows_N = held
        if self.context_s and context_tokens is not None and context_tokens > self.context_tokens:
            return base_N + (draft_s + self.context_s * (context_tokens - self.context_tokens) * rows_N)
        return base_N + draft_s

    @cached_property
    def _rounds(self) -> dict[tuple[int, int], tuple[np.ndarray, np.ndarray]]:
        # times and rows of rounds asked for before, by requests and most drafts: a scheduler asks in every round
        return {}

    def steps_per_s(self, rows: int, requests: int = 1) -> float:
        """SPS(B) without drafting. Ref: DSpark (arXiv:2607.05147), Algorithm 1."""
        return 1.0 / float(self.round_s_N(requests, rows - requests)[-1])

    @property
    def flat(self) -> bool:
        """Whether more rows cost nothing to speak of, so that a scheduler can only verify everything."""
        return max(self.seconds) < FLAT * min(self.seconds)

    def findings(self, *, need_rows: int | None = None) -> list[str]:
        """What a reader must know of this table, in words: flat, falling, noisy, thin, too short for `need_rows`."""
        found = []
        if self.flat:
            found.append(
                f"flat: {min(self.seconds):.3g} to {max(self.seconds):.3g} s from {self.rows[0]} to {self.rows[-1]} "
                "rows, so every draft is verified always"
            )
        how = "less the term by requests" if self.request_probes else "kept as measured"
        for i in range(1, len(self.rows)):
            if self.seconds[i] < FALL * self.seconds[i - 1]:
                found.append(
                    f"falls: {self.rows[i]} rows take {self.seconds[i]:.4g} s, {self.rows[i - 1]} rows "
                    f"{self.seconds[i - 1]:.4g} s; {how}"
                )
        by_pass: dict[tuple[int, int, int], list[float]] = {}
        for sample in self.samples:
            by_pass.setdefault((sample.rows, sample.requests, sample.context_tokens), []).append(sample.seconds)
        for (rows, requests, _), times in sorted(by_pass.items()):
            middle = statistics.median(times)
            if len(times) > 2 and max(times) - middle > SPREAD * middle:
                whose = f" of {requests} requests" if requests > 1 else ""
                found.append(f"noisy: {rows} rows{whose} took {min(times):.4g} to {max(times):.4g} s")
        if self.draft.drafter and self.draft.joint is None:
            found.append(
                f"old: drafting with {self.draft.drafter} was timed one request at a time, and a block drafter's joint "
                "pass costs less; dspec profile measures it"
            )
        if self.source == "measured" and not self.samples:
            found.append("no raw samples: its times cannot be checked")
        if len(self.rows) < 3:
            found.append(f"thin: {len(self.rows)} row counts")
        if need_rows is not None and need_rows > self.last_row:
            found.append(f"short: ends at {self.last_row} rows, this load can send {need_rows}; the rest is left out")
        return found

    def with_draft(self, draft: DraftCost) -> CostTable:
        """The same table with another drafter's cost."""
        return dataclasses.replace(self, draft=draft)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready, raw samples included."""
        return {"format": FORMAT, **dataclasses.asdict(self)}


def table_from_samples(samples: Sequence[CostSample], **options: Any) -> CostTable:
    """A measured table: the median per row count at the shortest context, and the slope over longer contexts.

    Where row counts were also timed as that many requests of one row, what those take more becomes a term by requests
    (each request has a cache of its own to read), and the time by rows is what remains without it.
    """
    if not samples:
        raise ValueError("no samples: a cost table needs at least one timed pass")
    base = min(sample.context_tokens for sample in samples)
    middle = pass_medians(samples, base)
    # of the passes over as many rows, the one of the fewest requests
    sharing = {count: min(r for n, r in middle if n == count) for count in sorted({n for n, _ in middle})}
    rows = tuple(sharing)
    slopes = [
        (sample.seconds - middle[sample.rows, sharing[sample.rows]]) / (sample.rows * (sample.context_tokens - base))
        for sample in samples
        if sample.context_tokens > base and sample.requests == sharing.get(sample.rows)
    ]
    alone = [count for count in rows if sharing[count] < count and (count, count) in middle]
    more_s = _request_terms(middle, sharing, alone)
    if alone:
        probes = {"request_probes": (1, *alone), "request_s": tuple(more_s)}
        options = {**probes, **options}
    by_requests_s = np.interp([sharing[count] for count in rows], (1, *alone), more_s)
    return CostTable(
        rows=rows,
        seconds=tuple(
            max(middle[count, sharing[count]] - float(more), LEAST_SHARE * middle[count, sharing[count]])
            for count, more in zip(rows, by_requests_s, strict=True)
        ),
        context_tokens=base,
        context_s=max(0.0, statistics.median(slopes)) if slopes else 0.0,
        samples=tuple(samples),
        **{"source": "measured", **options},
    )


def pass_medians(samples: Sequence[CostSample], context_tokens: int) -> dict[tuple[int, int], float]:
    """Median seconds of passes at this context by (rows, requests)."""
    by_pass: dict[tuple[int, int], list[float]] = {}
    for sample in samples:
        if sample.context_tokens == context_tokens:
            by_pass.setdefault((sample.rows, sample.requests), []).append(sample.seconds)
    return {shape: statistics.median(times) for shape, times in sorted(by_pass.items())}


def _request_terms(
    middle: Mapping[tuple[int, int], float], sharing: Mapping[int, int], alone: Sequence[int]
) -> list[float]:
    """What a pass over 1 and over `alone` requests takes more than over one request of as many rows; never falling.

    The passes they are compared with have some requests themselves, `sharing`, whose term is unknown too: the terms are
    found by going around until they agree.
    """
    from sklearn.isotonic import isotonic_regression

    probes, more_s = [1, *alone], np.zeros(1 + len(alone))
    for _ in range(50):
        held_s = np.interp([sharing[count] for count in alone], probes, more_s)
        found_s = [
            middle[count, count] - middle[count, sharing[count]] + held
            for count, held in zip(alone, held_s, strict=True)
        ]
        # one slow probe must not lift all that follow
        fresh_s = np.maximum(isotonic_regression([0.0, *found_s]), 0.0)
        fresh_s[0] = 0.0
        if np.allclose(fresh_s, more_s, rtol=1e-12, atol=1e-15):
            break
        more_s = fresh_s
    return [float(seconds) for seconds in more_s]


def save_table(path: Path | str, table: CostTable) -> Path:
    """Write `table` as JSON, whole."""
    return write_json(path, table.as_dict())


def load_table(path: Path | str) -> CostTable:
    """The table in `path`, ours or SGLang's. Raises `ValueError` that names the file and what is wrong in it."""
    from dspec_lab.scheduler.sglang_table import is_sglang, parse_sglang

    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no cost table {path}; dspec profile writes one")
    values = read_json(path)
    if not isinstance(values, dict):
        raise ValueError(f"{path} is not a cost table: expected an object, got {type(values).__name__}")
    try:
        if is_sglang(values):
            return parse_sglang(values, name=path.stem)
        return parse_table(values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def parse_table(values: Mapping[str, Any]) -> CostTable:
    """The table that `as_dict` wrote."""
    if values.get("format") != FORMAT:
        raise ValueError(f"format must be {FORMAT!r}, got {values.get('format')!r}")
    plain = {key: value for key, value in values.items() if key != "format"}
    draft = dict(plain.get("draft", {}))
    for key in ("request_probes", "request_s"):
        if not isinstance(draft.get(key, []), list):
            raise ValueError(f"draft {key} must be a list, got {draft[key]!r}")
        draft[key] = tuple(draft.get(key, ()))
    plain["draft"] = from_dict(DraftCost, draft)
    plain["samples"] = tuple(from_dict(CostSample, sample) for sample in plain.get("samples", ()))
    for key in ("rows", "seconds", "request_probes", "request_s"):
        if not isinstance(plain.get(key, []), list):
            raise ValueError(f"{key} must be a list, got {plain[key]!r}")
        kind = float if key in ("seconds", "request_s") else int
        plain[key] = tuple(kind(value) for value in plain.get(key, ()))
    return from_dict(CostTable, plain)


def _require_seconds(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} must be 0 or more and finite, got {value!r}")
