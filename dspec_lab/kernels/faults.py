"""What makes a request unfit to commit a token, as a code per request, so that a GPU kernel can report it.

A code is 0 for a good request, else 8 * position + kind: the first bad draft position (0-based) and what is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import IntEnum

from jaxtyping import Int
from torch import Tensor

from dspec_lab.core.sampling import NonFiniteLogitsError


class Fault(IntEnum):
    """Kinds of fault. Where one position has several, the lowest kind is reported."""

    TARGET_ROW = 1
    DRAFT_ROW = 2
    TOKEN_ID = 3
    LENGTH = 4
    UNIFORM = 5
    TEMPERATURE = 6
    SURVIVAL = 7


MEANING = {
    Fault.TARGET_ROW: "the target's row is no law (NaN, infinite, negative or no mass)",
    Fault.DRAFT_ROW: "the drafter's row is no law (NaN, infinite, negative or no mass)",
    Fault.TOKEN_ID: "a token id lies outside the vocabulary",
    Fault.LENGTH: "the number of drafts or the first row is out of range",
    Fault.UNIFORM: "a random number lies outside [0, 1)",
    Fault.TEMPERATURE: "the temperature is neither 0 nor in [1e-5, inf)",
    Fault.SURVIVAL: "a survival product lies outside [0, 1] or above the one before it",
}


# the lowest temperature of `SamplingConfig`, and the little less that fp32 holds it as
LEAST, LEAST_FP32 = 1e-5, 9.999999747378752e-06


def legal_temperature(temperature: float) -> float:
    """`temperature` if it is 0 or in [1e-5, inf), where 1e-5 in fp32 counts as 1e-5; NaN for any other."""
    if temperature == LEAST_FP32:
        return LEAST
    return temperature if temperature == 0 or LEAST <= temperature < math.inf else math.nan


def encode(position: int, kind: Fault) -> int:
    """The code of `kind` at draft position `position`."""
    return 8 * position + kind


def decode(code: int) -> tuple[int, Fault]:
    """(position, kind) of a code that is not 0."""
    return code // 8, Fault(code % 8)


def raise_faults(fault_B: Int[Tensor, " B"], values: Mapping[Fault, Tensor], *, what: str = "request") -> None:
    """Raise for the first fault, naming request (or `what` B counts), position and, where `values` has it, the value.

    `NonFiniteLogitsError` for a row, `ValueError` for the rest. `values[kind]` is [B] or [B, G]. Waits for the device.
    """
    bad = fault_B.nonzero()
    if not bad.numel():
        return
    b = int(bad[0])
    position, kind = decode(int(fault_B[b]))
    value = ""
    if kind in values:
        held = values[kind][b]
        if held.ndim == 0 or position < held.shape[0]:
            value = f", got {(held if held.ndim == 0 else held[position]).item()}"
    text = f"{what} {b}, position {position}: {MEANING[kind]}{value}"
    raise (NonFiniteLogitsError if kind in (Fault.TARGET_ROW, Fault.DRAFT_ROW) else ValueError)(text)
