"""Acceptance of a real drafter at every token of real texts: what a simulation of the same load needs, and by domain.

Greedy only. Then the text is the target's own whatever is verified, so one pass that drafts at every token and verifies
nothing tells how each policy's rounds would have gone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dspec_lab.config import DecodeConfig, from_dict
from dspec_lab.drafters.protocol import Drafter
from dspec_lab.models.decoder import LeanDecoder
from dspec_lab.serving.acceptance import TraceAcceptance
from dspec_lab.verifier.ragged import BatchRequest, generate_batch
from dspec_lab.verifier.request import Request

MAX_ACTIVE = 8  # requests that share a pass while acceptance is measured
DIGITS = 4  # of a confidence that are kept


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredText:
    """One text: the round that would begin at each of its tokens but the last."""

    domain: str
    prompt_tokens: int
    accepted: tuple[int, ...]  # drafts that the target would have kept, by token
    confidence: tuple[tuple[float, ...], ...]  # of as many drafts as were made; empty where the drafter gives none


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredAcceptance:
    """Texts in the order in which a load serves their prompts."""

    drafter: str
    gamma: int
    texts: tuple[MeasuredText, ...]

    def law(self) -> TraceAcceptance:
        """The texts replayed in turn; a draft is accepted exactly where it was the text's token."""
        rows = []
        for number, text in enumerate(self.texts):
            for at, accepted in enumerate(text.accepted):
                told = list(text.confidence[at]) if text.confidence else [1.0] * self.gamma
                rows.append(
                    {
                        "request_id": f"{number:06d}",
                        "round": at,
                        "context_tokens": at,
                        "accept_prob": [1.0] * accepted + [0.0] * (self.gamma - accepted),
                        # near a text's end fewer drafts are made; what is filled in is never looked at
                        "confidence": told + [0.0] * (self.gamma - len(told)),
                    }
                )
        return TraceAcceptance(rows, gamma=self.gamma, in_turn=True)

    @property
    def context_tokens(self) -> float:
        """Mean context of a round."""
        return float(np.mean([text.prompt_tokens + 1 + at for text in self.texts for at in range(len(text.accepted))]))

    def by_domain(self) -> dict[str, dict[str, Any]]:
        """Per domain: places, mean accepted drafts of a whole block, conditional acceptance by position."""
        found = {}
        for domain in dict.fromkeys(text.domain for text in self.texts):
            kept_N = np.array([n for text in self.texts if text.domain == domain for n in text.accepted])
            reached = [int((kept_N >= k).sum()) for k in range(self.gamma + 1)]
            found[domain] = {
                "texts": sum(text.domain == domain for text in self.texts),
                "places": len(kept_N),
                "accepted_drafts": float(kept_N.mean()),
                "accept_by_position": [b / a if a else None for a, b in zip(reached, reached[1:], strict=False)],
            }
        return found

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready, with the summary by domain."""
        return {**asdict(self), "by_domain": self.by_domain()}


def parse_measured(values: Mapping[str, Any]) -> MeasuredAcceptance:
    """The acceptance that `as_dict` wrote; `ValueError` for anything else."""
    try:
        texts = tuple(
            MeasuredText(
                domain=text["domain"],
                prompt_tokens=int(text["prompt_tokens"]),
                accepted=tuple(int(n) for n in text["accepted"]),
                confidence=tuple(tuple(float(c) for c in row) for row in text["confidence"]),
            )
            for text in values["texts"]
        )
        plain = {"drafter": values["drafter"], "gamma": values["gamma"], "texts": texts}
    except (KeyError, TypeError) as error:
        raise ValueError(f"no measured acceptance: {error!r}") from error
    if not texts or not any(text.accepted for text in texts):
        raise ValueError("the measured acceptance holds no round")
    return from_dict(MeasuredAcceptance, plain)


def measure_acceptance(
    target: LeanDecoder,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    domains: Sequence[str],
    config: DecodeConfig,
) -> MeasuredAcceptance:
    """Draft at every token of the target's answers. Raises `ValueError` above temperature 0."""
    if config.temperature != 0:
        raise ValueError(f"acceptance at every token is measured at temperature 0, got {config.temperature:g}")
    if len(prompts) != len(domains) or not prompts:
        raise ValueError(f"{len(prompts)} prompts but {len(domains)} domains")
    drafted: dict[tuple[int, ...], list[tuple[tuple[int, ...], tuple[float, ...]]]] = {}

    def watch(requests: Sequence[Request]) -> list[int]:
        for request in requests:
            proposal = request.proposal
            entry = (proposal.token_ids, proposal.confidence_G or ())
            drafted.setdefault(request.result.prompt_ids, []).append(entry)
        return [0] * len(requests)

    # a prompt that occurs twice is answered once
    wanted = {tuple(ids): BatchRequest(request_id=str(i), prompt_ids=tuple(ids), config=config, drafter=drafter)
              for i, ids in enumerate(prompts)}  # fmt: skip
    results = generate_batch(target, wanted.values(), max_active=MAX_ACTIVE, policy=watch)
    texts = []
    for ids, domain in zip(map(tuple, prompts), domains, strict=True):
        tokens, rounds = results[wanted[ids].request_id].token_ids, drafted.get(ids, [])
        accepted = [_matching(draft, tokens[at + 1 :]) for at, (draft, _) in enumerate(rounds)]
        told = [tuple(round(c, DIGITS) for c in confidence) for _, confidence in rounds]
        texts.append(
            MeasuredText(
                domain=domain,
                prompt_tokens=len(ids),
                accepted=tuple(accepted),
                confidence=tuple(told) if any(told) else (),
            )
        )
    return MeasuredAcceptance(drafter=drafter.name, gamma=config.gamma, texts=tuple(texts))


def _matching(draft: Sequence[int], text: Sequence[int]) -> int:
    """Leading tokens of `draft` that `text` has too."""
    count = 0
    for mine, theirs in zip(draft, text, strict=False):
        if mine != theirs:
            break
        count += 1
    return count
