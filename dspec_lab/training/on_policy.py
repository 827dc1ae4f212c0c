"""Accepted length of a drafter in training as the verifier sees it: on its own drafts, over whole answers.

Acceptance measured slot by slot on given texts says how good single predictions are. It does not see what happens
behind a rejection, so it may look good where decoding does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dspec_lab.checkpoints.drafters import as_drafter
from dspec_lab.config import DecodeConfig
from dspec_lab.drafters.vocabulary import DraftModel
from dspec_lab.models.decoder import LeanDecoder
from dspec_lab.training.data import TrainSequence
from dspec_lab.verifier.decode import generate


def on_policy_lengths(
    model: DraftModel, target: LeanDecoder, sequences: Sequence[TrainSequence], gamma: int, max_new_tokens: int = 96
) -> dict[str, dict[str, Any]]:
    """Greedy decoding of the prompts of `sequences`: rounds and committed tokens per round, by domain and in all.

    Each prompt is decoded once, however many answers to it there are.
    """
    model.eval()
    drafter = as_drafter(model)
    config = DecodeConfig(gamma=gamma, max_new_tokens=max_new_tokens)
    rounds: dict[str, int] = {"all": 0}
    committed: dict[str, int] = {"all": 0}
    seen: set[bytes] = set()
    for sequence in sequences:
        prompt = sequence.ids_T[: sequence.num_prompt]
        if prompt.tobytes() in seen:
            continue
        seen.add(prompt.tobytes())
        run = generate(target, drafter, prompt.tolist(), config)
        for name in ("all", sequence.domain):
            rounds[name] = rounds.get(name, 0) + len(run.rounds)
            committed[name] = committed.get(name, 0) + run.num_committed
    model.train()
    return {
        name: {"rounds": rounds[name], "accepted_length": round(committed[name] / rounds[name], 4)}
        for name in rounds
        if rounds[name]
    }
