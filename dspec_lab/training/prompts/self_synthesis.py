"""Prompts that the target writes itself: from its chat template, up to where the user speaks, it continues.

Ref: Magpie (arXiv:2406.08464).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from dspec_lab.models.decoder import LeanDecoder
from dspec_lab.training.prompts.record import TrainPrompt, without_repeats
from dspec_lab.training.sampler import BatchSampler, Request

SOURCE = "self"
# beginnings that steer a share of the prompts; the model writes the rest
OPENINGS: dict[str, tuple[str, ...]] = {
    "self": ("",),
    "code": ("Write a Python", "Write a function", "How do I", "Can you implement", "Create a class", "I have a"),
    "math": ("Solve", "If", "A train", "What is the sum", "Find the value of", "Calculate", "Let"),
    "chat": ("What", "How can I", "Explain", "Write a", "Why", "Can you tell me", "Describe", "Give me"),
}  # fmt: skip
FEWEST, MOST = 4, 120  # tokens of a prompt that is kept


def user_prefix(tokenizer: object) -> list[int]:
    """The ids of the chat template up to where the user's text begins."""
    marker = "\u2060MARK\u2060"
    text = tokenizer.apply_chat_template(  # type: ignore[attr-defined]
        [{"role": "user", "content": marker}], add_generation_prompt=False, tokenize=False
    )
    before, found, _ = text.partition(marker)
    if not found:
        raise ValueError("the chat template does not show the user's text as it is")
    return list(tokenizer(before, add_special_tokens=False)["input_ids"])  # type: ignore[operator]


def synthesise(
    target: LeanDecoder,
    tokenizer: object,
    count: int,
    *,
    seed: int = 0,
    domain: str = "self",
    num_slots: int = 64,
    temperature: float = 1.0,
    on_tokens: Callable[[int], None] | None = None,
) -> list[TrainPrompt]:
    """At most `count` prompts of a domain, written by the target; unfinished, short and repeated ones are dropped."""
    if domain not in OPENINGS:
        raise ValueError(f"domain must be one of {', '.join(OPENINGS)}, got {domain!r}")
    prefix, rng = user_prefix(tokenizer), random.Random(f"{domain}/{seed}")
    requests, openings = [], []
    for number in range(count):
        opening = rng.choice(OPENINGS[domain])
        ids = tokenizer(opening, add_special_tokens=False)["input_ids"] if opening else []  # type: ignore[operator]
        openings.append(opening)
        requests.append(
            Request(request_id=f"self/{domain}/{number}", prompt_ids=(*prefix, *ids), temperature=temperature)
        )
    longest = max((len(request.prompt_ids) for request in requests), default=1)
    sampler = BatchSampler(target, num_slots=num_slots, max_prompt=longest, max_new_tokens=MOST, seed=seed)
    texts: dict[int, str] = {}
    for number, ids in sampler.run(requests, on_tokens):
        if ids[-1] in target.eos_ids and len(ids) > FEWEST:
            written = tokenizer.decode(ids[:-1], skip_special_tokens=True)  # type: ignore[attr-defined]
            texts[number] = (openings[number] + written).strip()
    return without_repeats(TrainPrompt(domain, SOURCE, (texts[n],)) for n in sorted(texts) if usable(texts[n]))


def usable(text: str) -> bool:
    """Whether a synthesised prompt is a text at all: mostly letters and spaces, no word over and over."""
    words = text.split()
    if len(words) < 3 or len(set(words)) * 3 < len(words):
        return False
    plain = sum(character.isalpha() or character.isspace() for character in text)
    return plain >= 0.6 * len(text)


def shares(count: int, domains: Sequence[str]) -> dict[str, int]:
    """`count` split evenly over `domains`, the first ones taking what is left."""
    each, left = divmod(count, len(domains))
    return {domain: each + (rank < left) for rank, domain in enumerate(domains)}
