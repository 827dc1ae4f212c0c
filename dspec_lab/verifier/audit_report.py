"""What the audit found: one row a check, with its verdict and the evidence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Outcome = Literal["pass", "FAIL", "inconclusive"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What happened in the runs behind a verdict. A check that saw no acceptance, say, has not tested acceptance."""

    runs: int = 0
    proposed: int = 0
    accepted: int = 0
    rejected: int = 0

    def __add__(self, other: Seen) -> Seen:
        return Seen(
            runs=self.runs + other.runs,
            proposed=self.proposed + other.proposed,
            accepted=self.accepted + other.accepted,
            rejected=self.rejected + other.rejected,
        )

    @property
    def missing(self) -> str | None:
        """What was never seen, in words; None where nothing is missing."""
        if not self.proposed:
            return "nothing was proposed"
        if not self.accepted:
            return "no draft was accepted"
        return None if self.rejected else "no draft was rejected"


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditRow:
    """One check of one way to decode."""

    check: str  # "exact law", "random streams", "greedy text", ...
    subject: str  # drafter, or the planted fault
    settings: str
    verdict: Outcome
    expected: Outcome = "pass"  # "FAIL" for a planted fault
    evidence: str = ""
    value: float | None = None  # the number that was compared with `limit`
    limit: float | None = None
    seen: Seen = field(default_factory=Seen)
    details: Mapping[str, Any] = field(default_factory=dict)
    wall_s: float = 0.0

    @property
    def as_expected(self) -> bool:
        """An honest way passes, a planted fault fails."""
        return self.verdict == self.expected


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditReport:
    """All rows of one audit."""

    rows: tuple[AuditRow, ...]
    seed: int
    quick: bool
    wall_s: float

    @property
    def ok(self) -> bool:
        """Every honest row passes and every planted fault fails."""
        return bool(self.rows) and all(row.as_expected for row in self.rows)

    @property
    def summary(self) -> str:
        """One line for people."""
        honest = [row for row in self.rows if row.expected == "pass"]
        planted = [row for row in self.rows if row.expected == "FAIL"]
        passed = sum(row.verdict == "pass" for row in honest)
        caught = sum(row.verdict == "FAIL" for row in planted)
        return (
            f"{'lossless' if self.ok else 'NOT PROVEN LOSSLESS'}: {passed} of {len(honest)} checks pass, "
            f"{caught} of {len(planted)} planted faults caught, {self.wall_s:.0f} s"
        )

    def as_dict(self) -> dict[str, Any]:
        """JSON form; numbers without a finite value are None."""
        return {
            "ok": self.ok,
            "summary": self.summary,
            "seed": self.seed,
            "quick": self.quick,
            "wall_s": round(self.wall_s, 3),
            "rows": [_finite({**asdict(row), "as_expected": row.as_expected}) for row in self.rows],
        }


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
