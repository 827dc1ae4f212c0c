"""Filling templates with words from lists, with a seeded generator."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence

from dspec_lab.training.prompts.record import TrainPrompt, without_repeats

_PLACE = re.compile(r"\{(\w+?)\d*\}")
# how often in a row a generator may give nothing new before it is taken to be used up
PATIENCE = 500

NAMES = (
    "Amara Bashir Celine Dmitri Elena Farid Greta Hiro Imani Jonas Katya Leon Marisol Nikhil Odette Pavel Quinn Rosa "
    "Sofia Tariq Uma Viktor Wanda Ximena Yusuf Zora Anneke Bruno Chidi Daria Emeka Freya Gustav Hanna Ivo Jaya Kenji "
    "Lotte Mateo Nadia Oskar Priya Rafael Signe Tomas Ulla Vera Wim Yara Zoltan"
).split()


def fill(template: str, words: Mapping[str, Sequence[str]], rng: random.Random) -> str:
    """`template` with each {name} replaced by a word of that list. {name1} and {name2} differ; {name1} twice is one.

    A replaced word may itself hold places. A name without a list raises `ValueError`.
    """
    chosen: dict[str, str] = {}
    text = template
    while (match := _PLACE.search(text)) is not None:
        place, name = match.group(0), match.group(1)
        if place not in chosen:
            if name not in words:
                raise ValueError(f"no words for {place} in the template {template!r}")
            taken = {word for other, word in chosen.items() if _PLACE.fullmatch(other).group(1) == name}  # type: ignore[union-attr]
            choices = [word for word in words[name] if word not in taken]
            if not choices:
                raise ValueError(f"not enough words for {place} in the template {template!r}")
            chosen[place] = rng.choice(choices)
        text = text.replace(place, chosen[place])
    return text


def distinct(
    make: Callable[[random.Random], str], count: int, seed: int, domain: str, source: str
) -> list[TrainPrompt]:
    """`count` different prompts from a function that makes one at a time."""
    if count < 0:
        raise ValueError(f"count must be 0 or more, got {count}")
    rng = random.Random(f"{source}/{seed}")
    prompts: list[TrainPrompt] = []
    seen: set[str] = set()
    fails = 0
    while len(prompts) < count:
        text = make(rng)
        key = " ".join(text.lower().split())
        if key in seen:
            fails += 1
            if fails > PATIENCE:
                raise ValueError(f"the generator {source} has no more than {len(prompts)} different prompts")
            continue
        fails = 0
        seen.add(key)
        prompts.append(TrainPrompt(domain, source, (text,)))
    return without_repeats(prompts)
