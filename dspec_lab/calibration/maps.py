"""Maps from a stated chance to a calibrated one, one per draft position.

Three of them read the stated chance alone and keep its order. `EntropyMap` also reads the drafter's own entropy, so it
keeps the order of the two taken together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from jaxtyping import Float

Method = Literal["temperature", "platt", "isotonic", "entropy"]

# traces keep confidences as float32, whose largest value below 1 is 1 - 6e-8
EDGE = 1e-7


def logit(chance: Float[np.ndarray, "*N"]) -> Float[np.ndarray, "*N"]:
    """ln(c / (1 - c)); chances within 1e-7 of 0 or 1 count as that."""
    kept = np.clip(chance, EDGE, 1 - EDGE)
    return np.log(kept) - np.log1p(-kept)


def sigmoid(x: Float[np.ndarray, "*N"]) -> Float[np.ndarray, "*N"]:
    """1 / (1 + exp(-x)), without overflow."""
    return 0.5 * (1 + np.tanh(0.5 * x))


@dataclass(frozen=True, slots=True)
class TemperatureMap:
    """sigmoid(logit(c) / T): T > 1 makes the drafter less sure of itself. It leaves 1/2 where it is."""

    temperature: float
    method = "temperature"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ValueError(f"a temperature must be above 0 and finite, got {self.temperature}")

    def __call__(self, chance: Float[np.ndarray, "*N"]) -> Float[np.ndarray, "*N"]:
        return sigmoid(logit(chance) / self.temperature)

    def as_json(self) -> Any:
        """The temperature."""
        return self.temperature


@dataclass(frozen=True, slots=True)
class PlattMap:
    """sigmoid(slope logit(c) + bias), slope >= 0. Ref: Platt 1999, probabilistic outputs for SVMs."""

    slope: float
    bias: float
    method = "platt"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.slope) and math.isfinite(self.bias) and self.slope >= 0):
            raise ValueError(f"a Platt map needs a finite slope of at least 0 and bias, got {self.slope}, {self.bias}")

    def __call__(self, chance: Float[np.ndarray, "*N"]) -> Float[np.ndarray, "*N"]:
        return sigmoid(self.slope * logit(chance) + self.bias)

    def as_json(self) -> Any:
        """Slope and bias."""
        return {"slope": self.slope, "bias": self.bias}


@dataclass(frozen=True, slots=True)
class IsotonicMap:
    """Piecewise linear between (input, output) knots, flat outside. Ref: Zadrozny and Elkan 2002."""

    inputs: tuple[float, ...]
    outputs: tuple[float, ...]
    method = "isotonic"

    def __post_init__(self) -> None:
        if not self.inputs or len(self.inputs) != len(self.outputs):
            raise ValueError(f"{len(self.inputs)} inputs and {len(self.outputs)} outputs make no map")
        # written so that NaN is refused too
        rising = all(a < b for a, b in zip(self.inputs, self.inputs[1:], strict=False))
        keeping = all(a <= b for a, b in zip(self.outputs, self.outputs[1:], strict=False))
        if not (rising and keeping and all(0 <= value <= 1 for value in (*self.inputs, *self.outputs))):
            raise ValueError("the knots of an isotonic map must rise within 0..1 and their outputs never fall")

    def __call__(self, chance: Float[np.ndarray, "*N"]) -> Float[np.ndarray, "*N"]:
        return np.interp(chance, self.inputs, self.outputs)

    def as_json(self) -> Any:
        """The knots."""
        return {"inputs": list(self.inputs), "outputs": list(self.outputs)}


@dataclass(frozen=True, slots=True)
class EntropyMap:
    """sigmoid(slope logit(c) - weight H + bias), H the entropy in bits of the draft law at that position; both >= 0.

    The confidence head is linear in what the draft layers know, the entropy of their law is not, so it can add to it.
    H belongs to the law before the draw: like c it is a function of the drafts before, which losslessness needs.
    """

    slope: float
    weight: float
    bias: float
    method = "entropy"

    def __post_init__(self) -> None:
        values = (self.slope, self.weight, self.bias)
        if not (all(map(math.isfinite, values)) and self.slope >= 0 and self.weight >= 0):
            raise ValueError(f"an entropy map needs finite numbers, slope and weight of at least 0, got {values}")

    def __call__(
        self, chance: Float[np.ndarray, "*N"], entropy_bits: Float[np.ndarray, "*N"]
    ) -> Float[np.ndarray, "*N"]:
        return sigmoid(self.slope * logit(chance) - self.weight * entropy_bits + self.bias)

    def as_json(self) -> Any:
        """Slope, weight and bias."""
        return {"slope": self.slope, "weight": self.weight, "bias": self.bias}


PositionMap: TypeAlias = TemperatureMap | PlattMap | IsotonicMap | EntropyMap


def apply_maps(
    maps: Sequence[PositionMap],
    confidence_IG: Float[np.ndarray, "I G"],
    entropy_IG: Float[np.ndarray, "I G"] | None = None,
) -> Float[np.ndarray, "I G"]:
    """Each position's confidences through its map; `ValueError` for more positions than maps.

    `entropy_IG`, in bits, is what entropy maps read beside; without it they raise `ValueError`.
    """
    if confidence_IG.shape[1] > len(maps):
        raise ValueError(f"calibrated for {len(maps)} positions, got {confidence_IG.shape[1]}")
    columns = []
    for k in range(confidence_IG.shape[1]):
        position_map = maps[k]
        if not isinstance(position_map, EntropyMap):
            columns.append(position_map(confidence_IG[:, k]))
            continue
        if entropy_IG is None or not np.isfinite(entropy_IG[:, k][np.isfinite(confidence_IG[:, k])]).all():
            raise ValueError(f"the entropy map of position {k + 1} needs the draft's entropy, which is missing")
        columns.append(position_map(confidence_IG[:, k], entropy_IG[:, k]))
    return np.stack(columns, axis=1)


def map_from_json(method: str, value: Any) -> PositionMap:
    """The map that `as_json` wrote; `ValueError` names what does not fit."""
    try:
        if method == "temperature":
            return TemperatureMap(float(value))
        if method == "platt" and isinstance(value, Mapping):
            return PlattMap(float(value["slope"]), float(value["bias"]))
        if method == "isotonic" and isinstance(value, Mapping):
            return IsotonicMap(tuple(map(float, value["inputs"])), tuple(map(float, value["outputs"])))
        if method == "entropy" and isinstance(value, Mapping):
            return EntropyMap(float(value["slope"]), float(value["weight"]), float(value["bias"]))
    except (TypeError, KeyError) as error:
        raise ValueError(f"{value!r} is no {method} map: {error!r}") from error
    raise ValueError(f"{value!r} is no map of the method {method!r}")
