"""Settings of one training run, frozen and checked. No torch."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dspec_lab.config import from_dict
from dspec_lab.drafters.architecture import HEAD_TYPES, HeadType

DrafterName = Literal["dspark", "dflash", "eagle3", "mtp", "medusa"]
DRAFTERS: tuple[DrafterName, ...] = ("dspark", "dflash", "eagle3", "mtp", "medusa")
FEATURE_MODES = ("cache", "stream")
TRAINED_PARTS = ("all", "confidence")
PRECISIONS = ("fp32", "bf16")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """What is trained, on how much, and how. `default_config` gives the values that fit each drafter."""

    drafter: DrafterName

    # shape of the drafter
    num_layers: int = 2  # draft layers (medusa has none)
    target_layer_ids: tuple[int, ...] | None = None  # tapped layers; None: spread evenly over the target
    draft_vocab_size: int | None = 16384  # most frequent tokens of the responses; None: the whole vocabulary
    block_size: int = 7  # dspark, dflash: slots of a block, which are the tokens it proposes
    markov_rank: int = 64  # dspark: rank of the sequential head; 0 leaves it out
    markov_head_type: HeadType = "vanilla"  # dspark: vanilla, gated or rnn
    confidence_head: bool = True  # dspark
    confidence_with_markov: bool = True  # dspark: the confidence head also reads the previous token's embedding
    mask_token_id: int | None = None  # dspark, dflash: None takes the lowest id that the responses do not use
    context_window: int | None = 512  # dspark, dflash: context positions a block sees; None: all
    ttt_length: int = 7  # eagle3, mtp: steps of training-time test, the longest proposal
    step_loss_decay: float = 0.8  # eagle3, mtp, medusa: weight of step s is decay ** s
    medusa_num_heads: int = 4  # medusa

    # start
    warm_start: bool = True  # layers, norms and fc from the target's own weights
    start_from: str | None = None  # a checkpoint folder of the same shape, whose weights and vocabulary go on instead
    trained_part: str = "all"  # confidence: only the confidence head moves

    # loss of dspark and dflash
    loss_ce: float = 0.1
    loss_l1: float = 0.9
    loss_confidence: float = 1.0
    slot_decay_gamma: float | None = 4.0  # slot k weighs exp(-k / gamma); None: all alike
    confidence_through_backbone: bool = True  # whether the confidence loss also moves the draft layers
    vocab_certain: int = 2048  # most frequent tokens that are in every step's part of the vocabulary
    vocab_drawn: int | None = 1024  # tokens drawn from the rest for a step; None: the whole draft vocabulary, exactly

    # amount and order
    steps: int = 2000  # optimiser steps
    minutes: float | None = None  # end after this long instead; warm-up and decay then follow the clock
    sequences_per_step: int = 4  # over all processes and micro-batches
    first_step: int = 0  # of the data's order: a stage that goes on where the last one stopped begins with its steps
    accumulate: int = 1  # micro-batches a step
    anchors_per_sequence: int = 32  # dspark, dflash: blocks started in each sequence of a step
    first_slots: int | None = 3  # dspark, dflash, eagle3, mtp: tokens proposed in the first phase; None: no such phase
    first_share: float = 0.4  # share of the run that is the first phase
    first_anchors: int = 64  # dspark, dflash: blocks in each sequence in the first phase
    max_tokens: int = 1024  # longer sequences are cut

    # bf16: products of bf16 numbers, faster where the CPU has them; the drafter's weights stay fp32, the target is
    # loaded in bf16
    precision: str = "fp32"

    # optimiser: AdamW, linear warm-up, cosine decay
    learning_rate: float = 6e-4
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0  # of matrices
    warmup_share: float = 0.04
    final_lr_share: float = 0.05  # the learning rate decays to this share of its peak
    clip_norm: float = 1.0

    # features, hold-out, seed
    features: str = "cache"  # cache: on disk from the first use on; stream: computed each time
    cached_layer_ids: tuple[int, ...] | None = None  # layers in the cache, if more than the drafter taps (to share it)
    validation_share: float = 0.03  # share of prompts held out
    validation_sequences: int = 64  # of these are measured
    validation_anchors: int = 16  # dspark, dflash: blocks in each
    on_policy_prompts: int = 12  # held-out prompts decoded greedily at the end, for the accepted length as verified
    validate_every: int = 200  # optimiser steps; also writes the checkpoint
    save_every: int = 100  # optimiser steps between saves of the state to resume from
    seed: int = 0

    def __post_init__(self) -> None:
        if self.drafter not in DRAFTERS:
            raise ValueError(f"drafter must be one of {', '.join(DRAFTERS)}, got {self.drafter!r}")
        for name, lowest in _WHOLE.items():
            value = getattr(self, name)
            if value is None and name in _MAY_BE_NONE:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be a whole number, got {value!r}")
            if value < lowest:
                raise ValueError(f"{name} must be at least {lowest}, got {value}")
        for name, (low, high) in _REAL.items():
            value = getattr(self, name)
            if value is None and name in _MAY_BE_NONE:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise TypeError(f"{name} must be a number, got {value!r}")
            if not low <= value <= high or (value == 0 and name in _ABOVE_ZERO):
                raise ValueError(f"{name} must lie in {'(' if name in _ABOVE_ZERO else '['}{low}, {high}], got {value}")
        if self.features not in FEATURE_MODES:
            raise ValueError(f"features must be {' or '.join(FEATURE_MODES)}, got {self.features!r}")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision must be {' or '.join(PRECISIONS)}, got {self.precision!r}")
        if self.trained_part not in TRAINED_PARTS:
            raise ValueError(f"trained_part must be {' or '.join(TRAINED_PARTS)}, got {self.trained_part!r}")
        if self.trained_part == "confidence" and not (self.is_block and self.confidence_head and self.loss_confidence):
            raise ValueError(
                f"trained_part confidence needs a confidence head and its loss, {self.drafter} has confidence_head "
                f"{self.confidence_head} and loss_confidence {self.loss_confidence}"
            )
        if self.start_from is not None and not isinstance(self.start_from, str):
            raise TypeError(f"start_from must be the path of a checkpoint folder, got {self.start_from!r}")
        if self.markov_head_type not in HEAD_TYPES:
            raise ValueError(f"markov_head_type must be one of {', '.join(HEAD_TYPES)}, got {self.markov_head_type!r}")
        if self.first_slots is not None and self.first_slots > self.proposed:
            raise ValueError(f"first_slots {self.first_slots} is more than the drafter proposes, {self.proposed}")
        if self.sequences_per_step % self.accumulate:
            raise ValueError(f"sequences_per_step {self.sequences_per_step} is no multiple of {self.accumulate} parts")
        if self.loss_ce + self.loss_l1 <= 0:
            raise ValueError(f"loss_ce and loss_l1 must not both be 0, got {self.loss_ce} and {self.loss_l1}")
        if self.drafter == "dflash" and (self.markov_rank or self.confidence_head):
            raise ValueError(
                f"dflash has neither sequential nor confidence head, got markov_rank {self.markov_rank} and "
                f"confidence_head {self.confidence_head}"
            )

    @property
    def is_block(self) -> bool:
        """Whether the drafter proposes blocks from anchors."""
        return self.drafter in ("dspark", "dflash")

    @property
    def proposed(self) -> int:
        """Longest proposal."""
        if self.is_block:
            return self.block_size
        return self.medusa_num_heads if self.drafter == "medusa" else self.ttt_length

    def slots_at(self, progress: float) -> int | None:
        """Tokens proposed in training at this share of the run; None is all of them."""
        if self.first_slots is None or self.drafter == "medusa" or progress >= self.first_share:
            return None
        return self.first_slots

    def anchors_at(self, progress: float) -> int:
        """Blocks in each sequence at this share of the run."""
        return self.anchors_per_sequence if self.slots_at(progress) is None else self.first_anchors

    def rate_at(self, progress: float) -> float:
        """Learning rate at this share of the run, 0..1: linear warm-up, then half a cosine."""
        if progress < self.warmup_share:
            return self.learning_rate * max(progress / self.warmup_share, 1e-3)
        done = min((progress - self.warmup_share) / max(1 - self.warmup_share, 1e-9), 1.0)
        share = self.final_lr_share + (1 - self.final_lr_share) * 0.5 * (1 + math.cos(math.pi * done))
        return self.learning_rate * share

    def to_dict(self) -> dict[str, Any]:
        """All settings in JSON's types; `from_dict` takes them back."""
        values = dataclasses.asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


_WHOLE = {
    "num_layers": 1, "draft_vocab_size": 1, "block_size": 1, "markov_rank": 0, "mask_token_id": 0, "context_window": 1,
    "ttt_length": 1, "medusa_num_heads": 1, "vocab_certain": 0, "vocab_drawn": 1, "steps": 1, "sequences_per_step": 1,
    "accumulate": 1, "anchors_per_sequence": 1, "first_slots": 1, "first_anchors": 1, "max_tokens": 8,
    "validation_sequences": 0, "validation_anchors": 1, "on_policy_prompts": 0, "validate_every": 1, "save_every": 1,
    "seed": 0, "first_step": 0,
}  # fmt: skip
_REAL = {
    "step_loss_decay": (0.0, 1.0), "loss_ce": (0.0, math.inf), "loss_l1": (0.0, math.inf),
    "loss_confidence": (0.0, math.inf), "slot_decay_gamma": (0.0, math.inf), "minutes": (0.0, math.inf),
    "first_share": (0.0, 1.0), "learning_rate": (0.0, 1.0), "beta1": (0.0, 1.0), "beta2": (0.0, 1.0),
    "weight_decay": (0.0, 1.0), "warmup_share": (0.0, 1.0), "final_lr_share": (0.0, 1.0), "clip_norm": (0.0, math.inf),
    "validation_share": (0.0, 0.5),
}  # fmt: skip
_MAY_BE_NONE = {
    "draft_vocab_size", "mask_token_id", "context_window", "slot_decay_gamma", "vocab_drawn", "minutes", "first_slots",
}  # fmt: skip
_ABOVE_ZERO = {"step_loss_decay", "slot_decay_gamma", "minutes", "learning_rate", "clip_norm"}

# what differs from the defaults above
DRAFTER_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "dspark": {},
    "dflash": {
        "markov_rank": 0, "confidence_head": False, "confidence_with_markov": False,
        "loss_ce": 1.0, "loss_l1": 0.0, "loss_confidence": 0.0,
    },
    "eagle3": {"num_layers": 1},
    "mtp": {"num_layers": 1},
    "medusa": {},
}  # fmt: skip


def default_config(drafter: str, **changes: Any) -> TrainConfig:
    """The usual settings of a drafter, with `changes`; unknown names are refused."""
    if drafter not in DRAFTER_DEFAULTS:
        raise ValueError(f"drafter must be one of {', '.join(DRAFTERS)}, got {drafter!r}")
    values: dict[str, Any] = {"drafter": drafter, **DRAFTER_DEFAULTS[drafter], **changes}
    for name, value in values.items():
        # files have lists and whole numbers where settings are tuples and real numbers
        if isinstance(value, list):
            values[name] = tuple(value)
        elif name in _REAL and isinstance(value, int) and not isinstance(value, bool):
            values[name] = float(value)
    return from_dict(TrainConfig, values)


def read_config(path: Path | str, drafter: str | None = None, **changes: Any) -> TrainConfig:
    """Settings from a JSON or YAML file over the drafter's defaults, with `changes` on top.

    The file may name its drafter; naming another one is an error. Unknown settings are refused by name.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no config file {path}")
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not JSON: {error}") from error
    else:
        import yaml

        try:
            values = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold settings by name, got {values!r}")
    values = dict(values)
    named = values.pop("drafter", drafter)
    if named is None:
        raise ValueError(f"{path} does not say which drafter it is for")
    if drafter is not None and named != drafter:
        raise ValueError(f"{path} is for the drafter {named!r}, not {drafter!r}")
    try:
        return default_config(named, **{**values, **changes})
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error
