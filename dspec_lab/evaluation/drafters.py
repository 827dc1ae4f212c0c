"""Drafters by name, made for a target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dspec_lab.drafters.autoregressive import AutoregressiveDrafter
from dspec_lab.drafters.lookahead import LookaheadDrafter
from dspec_lab.drafters.prompt_lookup import PromptLookupDrafter
from dspec_lab.drafters.protocol import Drafter
from dspec_lab.models.decoder import LeanDecoder
from dspec_lab.models.protocol import Target

# Layers of the default target (30 layers) that its untrained draft model leaves out: those whose removal, one at a
# time, changed the fewest greedy tokens of training responses.
LEFT_OUT: Mapping[int, tuple[int, ...]] = {30: (3, 4, 5, 7, 14, 16, 17, 18, 25, 26)}


def shallow_drafter(target: Target) -> AutoregressiveDrafter:
    """The target without some of its middle layers, as a draft model: no training, no extra memory, and not fast."""
    if not isinstance(target, LeanDecoder):
        raise ValueError(f"the drafter 'autoregressive' needs a draft model for the target {target.name}: give one")
    left_out = LEFT_OUT.get(target.num_layers) or tuple(range(target.num_layers // 2, target.num_layers - 2, 3))
    keep = [layer for layer in range(target.num_layers) if layer not in left_out]
    return AutoregressiveDrafter(
        target.keep_layers(keep, name=f"{target.name}, {len(keep)} of {target.num_layers} layers")
    )


BUILDERS: Mapping[str, Callable[[Target], Drafter]] = {
    "prompt_lookup": lambda target: PromptLookupDrafter(),
    "lookahead": lambda target: LookaheadDrafter(),
    "autoregressive": shallow_drafter,
}


def check_names(names: Sequence[str]) -> tuple[str, ...]:
    """`names` if each is a known drafter and none comes twice; costs nothing, so call it before loading a model."""
    if not names:
        raise ValueError("no drafter was named; known are " + ", ".join(BUILDERS))
    for name in names:
        if name not in BUILDERS:
            raise ValueError(f"unknown drafter {name!r}; known are {', '.join(BUILDERS)}")
    if len(set(names)) != len(names):
        raise ValueError(f"a drafter is named twice: {', '.join(names)}")
    return tuple(names)


def build_drafters(
    names: Sequence[str], target: Target, *, draft_model: str | Path | None = None
) -> dict[str, Drafter]:
    """Drafters by name for `target`. `draft_model` is a model folder or name for `autoregressive`.

    Without a draft model, `autoregressive` is the target with some layers left out (lean decoders only).
    """
    made: dict[str, Drafter] = {}
    for name in check_names(names):
        if name == "autoregressive" and draft_model is not None:
            from dspec_lab.models.load import load_target

            made[name] = AutoregressiveDrafter(load_target(str(draft_model), target.dtype, target.device))
        else:
            made[name] = BUILDERS[name](target)
    return made
