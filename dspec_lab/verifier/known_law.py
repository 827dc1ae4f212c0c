"""The law that decoding a table target must have, worked out apart from the code under audit.

Plain Python on lists, nothing of `core.sampling`: a fault there shows as a deviation and not on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence

from dspec_lab.config import SamplingConfig
from dspec_lab.models.toy import TableTarget

Sequences = dict[tuple[int, ...], float]


def filtered(probs: Sequence[float], sampling: SamplingConfig) -> list[float]:
    """`probs` after temperature, top-k and top-p; ties go to the lower token id."""
    if sampling.greedy:
        best = max(range(len(probs)), key=lambda token: (probs[token], -token))
        return [float(token == best) for token in range(len(probs))]
    heated = _normalised([p ** (1 / sampling.temperature) for p in probs])
    order = sorted(range(len(heated)), key=lambda token: (-heated[token], token))
    if sampling.top_k:
        order = order[: sampling.top_k]
        heated = _normalised([p if token in order else 0.0 for token, p in enumerate(heated)])
    kept, mass = [], 0.0
    for token in order:
        kept.append(token)
        mass += heated[token]
        if mass >= sampling.top_p:
            break
    return _normalised([p if token in kept else 0.0 for token, p in enumerate(heated)])


def known_law(target: TableTarget, prompt: Sequence[int], length: int, sampling: SamplingConfig) -> Sequences:
    """Chance of each text of `length` tokens after `prompt`, cut behind an end token; texts of chance 0 left out."""
    law: Sequences = {}
    _extend(target, list(prompt), (), 1.0, length, sampling, law)
    return law


def _extend(
    target: TableTarget,
    context: list[int],
    text: tuple[int, ...],
    chance: float,
    room: int,
    sampling: SamplingConfig,
    law: Sequences,
) -> None:
    if room == 0 or (text and text[-1] in target.eos_ids):
        law[text] = chance
        return
    for token, p in enumerate(filtered(target.law_after(context).tolist(), sampling)):
        if p > 0:
            _extend(target, [*context, token], (*text, token), chance * p, room - 1, sampling, law)


def _normalised(weights: list[float]) -> list[float]:
    total = sum(weights)
    return [weight / total for weight in weights]
