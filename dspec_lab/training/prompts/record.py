"""One prompt to train on, and the checks that all sources share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

DOMAINS = ("math", "code", "chat", "self", "other")


@dataclass(frozen=True, slots=True)
class TrainPrompt:
    """The user's turns of a conversation to be answered."""

    domain: str
    source: str  # generator, file or data set
    turns: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.turns or not all(isinstance(turn, str) and turn.strip() for turn in self.turns):
            raise ValueError(f"a prompt needs turns that are non-empty texts, got {self.turns!r} from {self.source}")


def without_repeats(prompts: Iterable[TrainPrompt]) -> list[TrainPrompt]:
    """The prompts in order, each conversation once (case and spacing aside)."""
    seen: set[tuple[str, ...]] = set()
    kept = []
    for prompt in prompts:
        key = tuple(" ".join(turn.lower().split()) for turn in prompt.turns)
        if key not in seen:
            seen.add(key)
            kept.append(prompt)
    return kept
