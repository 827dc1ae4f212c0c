"""Frozen run settings. No torch here: a settings object can be made, checked and saved without a model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

Verification = Literal["token", "block"]
VERIFICATIONS: tuple[Verification, ...] = ("token", "block")

_Config = TypeVar("_Config")


def from_dict(cls: type[_Config], values: Mapping[str, Any]) -> _Config:
    """`cls(**values)`, refusing keys that `cls` does not have, by name."""
    known = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(values) - known)
    if unknown:
        raise ValueError(f"{cls.__name__} has no setting {', '.join(map(repr, unknown))}; it has {sorted(known)}")
    return cls(**values)


def _require_int(name: str, value: object, lowest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    if value < lowest:
        raise ValueError(f"{name} must be at least {lowest}, got {value}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingConfig:
    """The law tokens are drawn from. Each filter applies to target and drafter alike.

    Order of application: temperature, then top-k, then top-p on what top-k left, then renormalise.
    """

    temperature: float = 0.0  # 0 is greedy: all mass on the first largest logit
    top_k: int = 0  # keep the k most likely tokens; 0 keeps all
    top_p: float = 1.0  # keep the smallest set of most likely tokens with at least this mass; 1 keeps all

    def __post_init__(self) -> None:
        if isinstance(self.temperature, bool) or not isinstance(self.temperature, (int, float)):
            raise TypeError(f"temperature must be a number, got {self.temperature!r}")
        if not math.isfinite(self.temperature) or self.temperature < 0:
            raise ValueError(f"temperature must be 0 or more and finite, got {self.temperature}")
        if 0 < self.temperature < 1e-5:
            raise ValueError(f"temperature must be 0 (greedy) or at least 1e-5, got {self.temperature}")
        _require_int("top_k", self.top_k, 0)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")

    @property
    def greedy(self) -> bool:
        """True when the law has all its mass on one token at every position."""
        return self.temperature == 0

    @property
    def effectively_greedy(self) -> bool:
        """Greedy by temperature or because top-k leaves one token (a run record flags the latter)."""
        return self.greedy or self.top_k == 1


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeConfig:
    """Settings of one generation."""

    gamma: int = 7  # drafted tokens per round
    temperature: float = 0.0  # see SamplingConfig
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int = 128
    verification: Verification = "token"
    seed: int = 0
    ignore_eos: bool = False  # go on past end tokens (for timing)
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _require_int("gamma", self.gamma, 1)
        _require_int("max_new_tokens", self.max_new_tokens, 1)
        _require_int("seed", self.seed, 0)
        if self.verification not in VERIFICATIONS:
            raise ValueError(f"verification must be one of {VERIFICATIONS}, got {self.verification!r}")
        if isinstance(self.stop_strings, str):
            raise TypeError(f"stop_strings must be a sequence of strings, got the string {self.stop_strings!r}")
        if any(not isinstance(stop, str) or not stop for stop in self.stop_strings):
            raise ValueError(f"a stop string must not be empty, got {self.stop_strings!r}")
        object.__setattr__(self, "stop_strings", tuple(self.stop_strings))
        SamplingConfig(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)

    @property
    def sampling(self) -> SamplingConfig:
        """The law part of the settings."""
        return SamplingConfig(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)
