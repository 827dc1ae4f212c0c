"""Drafters by name, made for a target."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dspec_lab.checkpoints.drafters import open_drafter
from dspec_lab.checkpoints.layout import CONFIG
from dspec_lab.core.files import data_dir
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


# drafters with trained weights for the default target, in data/checkpoints/smollm2
TRAINED = ("dspark", "dflash", "eagle3", "mtp", "medusa")


def trained_folder(name: str) -> Path:
    """Where the trained weights of a drafter for the default target lie; the folder need not exist."""
    return data_dir() / "checkpoints" / "smollm2" / name


def _trained(name: str) -> Callable[[Target], Drafter]:
    return lambda target: open_drafter(trained_folder(name), target, name=name)


BUILDERS: Mapping[str, Callable[[Target], Drafter]] = {
    "prompt_lookup": lambda target: PromptLookupDrafter(),
    "lookahead": lambda target: LookaheadDrafter(),
    "autoregressive": shallow_drafter,
    **{name: _trained(name) for name in TRAINED},
}


def available() -> tuple[str, ...]:
    """Names that can be built for the default target: all, less those whose weights are not in the data folder."""
    return tuple(name for name in BUILDERS if name not in TRAINED or (trained_folder(name) / CONFIG).is_file())


def check_names(names: Sequence[str]) -> tuple[str, ...]:
    """`names` if each is a known drafter or NAME=FOLDER, and none comes twice.

    FOLDER is a checkpoint, NAME is free (letters, digits, _ and -). Costs nothing, so call it before loading a model.
    """
    if not names:
        raise ValueError("no drafter was named; known are " + ", ".join(BUILDERS))
    for given in names:
        name, folder = split_name(given)
        if folder is None and name not in BUILDERS:
            raise ValueError(f"unknown drafter {name!r}; known are {', '.join(BUILDERS)}, and NAME=FOLDER")
        if folder is None and name in TRAINED:
            folder = trained_folder(name)
        if folder is not None and not (folder / CONFIG).is_file():
            raise ValueError(f"drafter {name}: {folder} is no checkpoint, it has no {CONFIG}")
    short = [split_name(given)[0] for given in names]
    if len(set(short)) != len(short):
        raise ValueError(f"a drafter is named twice: {', '.join(names)}")
    return tuple(names)


def split_name(given: str) -> tuple[str, Path | None]:
    """(name, checkpoint folder) of NAME or NAME=FOLDER."""
    name, equals, folder = given.partition("=")
    if not equals:
        return name, None
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or not folder:
        raise ValueError(f"a drafter of your own is NAME=FOLDER with a plain name, got {given!r}")
    return name, Path(folder).expanduser()


def build_drafters(
    names: Sequence[str], target: Target, *, draft_model: str | Path | None = None
) -> dict[str, Drafter]:
    """Drafters by name for `target`. `draft_model` is a model folder or name for `autoregressive`.

    Without a draft model, `autoregressive` is the target with some layers left out (lean decoders only). NAME=FOLDER
    opens a checkpoint; the trained drafters' names open those in the data folder.
    """
    made: dict[str, Drafter] = {}
    for given in check_names(names):
        name, folder = split_name(given)
        if folder is not None:
            made[name] = open_drafter(folder, target, name=name)
        elif name == "autoregressive" and draft_model is not None:
            from dspec_lab.models.load import load_target

            made[name] = AutoregressiveDrafter(load_target(str(draft_model), target.dtype, target.device))
        else:
            made[name] = BUILDERS[name](target)
    return made
