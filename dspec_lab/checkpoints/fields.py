"""Drafter settings to and from the fields of a checkpoint's config.json.

The DeepSpec layout: the target's text config with a few fields changed or added. Names of DSpark and EAGLE-3
architectures are DeepSpec's (`Qwen3DSparkModel`, `Gemma4Eagle3Model`); DFlash has no name of its own. Llama, MTP and
Medusa drafters follow the same pattern (`LlamaDSparkModel`, `Qwen3MtpModel`, `LlamaMedusaModel`), which is ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dspec_lab.drafters.architecture import (
    HEAD_TYPES,
    Architecture,
    BlockArchitecture,
    ChainArchitecture,
    HeadType,
    MedusaArchitecture,
)
from dspec_lab.models.family import FAMILIES, FULL, ModelSpec, model_spec, text_config

KINDS: dict[str, str] = {"DSparkModel": "dspark", "Eagle3Model": "eagle3", "MtpModel": "mtp", "MedusaModel": "medusa"}
NESTED = ("dspark_config", "dflash_config")  # where engines look for the same keys again
ANCHOR_FLAGS = ("sample_from_anchor", "query_zero_predicts_next")  # two spellings of one layout flag


def architecture_kind(config: Mapping[str, Any]) -> str:
    """ "dspark", "eagle3", "mtp" or "medusa", from `architectures[0]`; its family must fit `model_type`."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ValueError(f"config field architectures must be a list with one name, got {names!r}")
    known = {
        f"{family.prefix}{suffix}": (name, kind) for name, family in FAMILIES.items() for suffix, kind in KINDS.items()
    }
    if names[0] not in known:
        raise ValueError(f"architecture {names[0]!r} is not known; known: {', '.join(sorted(known))}")
    family, kind = known[names[0]]
    if model_spec(config).family.name != family:
        raise ValueError(f"architecture {names[0]!r} does not fit model_type {config.get('model_type')!r}")
    return kind


def read_architecture(config: Mapping[str, Any]) -> Architecture:
    """The drafter that a checkpoint's config describes; a missing or contradictory field raises ValueError by name."""
    kind = architecture_kind(config)
    spec = model_spec(config)
    # draft layers attend fully even under a sliding label: so does the code that trained them
    spec = replace(spec, layer_types=(FULL,) * spec.num_layers, attention={FULL: spec.attention[FULL]})
    if kind == "medusa":
        return MedusaArchitecture(
            spec=spec,
            num_target_layers=_integer(config, "num_target_layers"),
            medusa_num_heads=_integer(config, "medusa_num_heads"),
            draft_vocab_size=_draft_vocab_size(config, spec),
        )
    if kind in ("eagle3", "mtp"):
        depth = config.get("draft_num_hidden_layers", spec.num_layers)
        if depth != spec.num_layers:
            raise ValueError(f"draft_num_hidden_layers {depth} differs from num_hidden_layers {spec.num_layers}")
        return ChainArchitecture(
            kind="eagle3" if kind == "eagle3" else "mtp",
            spec=spec,
            target_hidden_size=int(config.get("target_hidden_size") or spec.hidden_size),
            num_target_layers=_integer(config, "num_target_layers"),
            target_layer_ids=_layer_ids(config) if kind == "eagle3" else (),
            ttt_length=_integer(config, "ttt_length"),
            step_loss_decay=float(config.get("step_loss_decay", 0.8)),
            draft_vocab_size=_draft_vocab_size(config, spec),
        )
    rank = _integer(config, "markov_rank")
    confidence = _boolean(config, "enable_confidence_head")
    return BlockArchitecture(
        spec=spec,
        target_hidden_size=int(config.get("target_hidden_size") or spec.hidden_size),
        num_target_layers=_integer(config, "num_target_layers"),
        target_layer_ids=_layer_ids(config),
        block_size=_integer(config, "block_size"),
        mask_token_id=_integer(config, "mask_token_id"),
        num_anchors=_integer(config, "num_anchors") if "num_anchors" in config else 512,
        markov_rank=rank,
        markov_head_type=_head_type(config) if rank else None,
        confidence_head=confidence,
        # a flag left behind without its head has no meaning
        confidence_with_markov=bool(rank and confidence and lookup(config, "confidence_head_with_markov")),
        sample_from_anchor=anchor_first(config),
        draft_vocab_size=_draft_vocab_size(config, spec),
        context_window=config.get("draft_context_window"),
    )


def lookup(config: Mapping[str, Any], name: str) -> Any:
    """A field's value from the top level or the nested engine configs (None if absent); differing values raise."""
    found = {place: part[name] for place, part in _places(config).items() if name in part}
    values = list(found.values())
    if any(value != values[0] for value in values[1:]):
        raise ValueError(f"config field {name} has different values: {found}")
    return values[0] if values else None


def anchor_first(config: Mapping[str, Any]) -> bool:
    """Whether slot 0, the anchor, proposes the next token. True where no flag is written: DeepSpec has none."""
    found = {name: lookup(config, name) for name in ANCHOR_FLAGS if lookup(config, name) is not None}
    for name, value in found.items():
        if not isinstance(value, bool):
            raise ValueError(f"config field {name} must be true or false, got {value!r}")
    if len(set(found.values())) > 1:
        raise ValueError(f"the anchor layout is contradictory: {found}")
    return next(iter(found.values()), True)


def write_fields(arch: Architecture, target_config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The config.json of a drafter: the target's text config with the drafter's fields over it, all written out.

    `target_config` is the config of the target, or of another drafter of the same target.
    """
    base = text_config(target_config)
    fields: dict[str, Any] = {key: value for key, value in base.items() if key not in _OWN_FIELDS and key not in NESTED}
    if model_spec(base).hidden_size != arch.spec.hidden_size or model_spec(base).vocab_size != arch.spec.vocab_size:
        raise ValueError(
            f"the drafter is {arch.spec.hidden_size} wide with a vocabulary of {arch.spec.vocab_size}; the config to "
            f"build on has {model_spec(base).hidden_size} and {model_spec(base).vocab_size}"
        )
    fields |= _gemma4_fields(target_config, base, arch.spec)
    suffix = {"dspark": "DSparkModel", "eagle3": "Eagle3Model", "mtp": "MtpModel", "medusa": "MedusaModel"}[_kind(arch)]
    fields |= {
        "architectures": [f"{arch.spec.family.prefix}{suffix}"],
        "dtype": dtype,
        "layer_types": [FULL] * arch.spec.num_layers,
        "num_hidden_layers": arch.spec.num_layers,
        "intermediate_size": arch.spec.intermediate_size,
        "num_target_layers": arch.num_target_layers,
        "tie_word_embeddings": False,
        "draft_vocab_size": arch.draft_vocab_size or arch.spec.vocab_size,
    }
    if not isinstance(arch, MedusaArchitecture):
        fields["target_hidden_size"] = arch.target_hidden_size
        if arch.target_layer_ids:
            fields["target_layer_ids"] = list(arch.target_layer_ids)
            # the same layers in the "input of layer i" counting of engines
            fields["eagle_aux_hidden_state_layer_ids"] = [layer + 1 for layer in arch.target_layer_ids]
    if isinstance(arch, BlockArchitecture):
        fields |= {
            "block_size": arch.block_size,
            "mask_token_id": arch.mask_token_id,
            "num_anchors": arch.num_anchors,
            "sample_from_anchor": arch.sample_from_anchor,
            "markov_rank": arch.markov_rank,
            "enable_confidence_head": arch.confidence_head,
            "draft_context_window": arch.context_window,
        }
        if arch.markov_rank:
            fields["markov_head_type"] = arch.markov_head_type
        if arch.confidence_head:
            fields["confidence_head_with_markov"] = arch.confidence_with_markov
    elif isinstance(arch, ChainArchitecture):
        fields |= {
            "ttt_length": arch.ttt_length,
            "step_loss_decay": arch.step_loss_decay,
            "draft_num_hidden_layers": arch.spec.num_layers,
        }
    else:
        fields["medusa_num_heads"] = arch.medusa_num_heads
    return dict(sorted(fields.items()))


_OWN_FIELDS = frozenset(
    "block_size mask_token_id num_anchors sample_from_anchor query_zero_predicts_next markov_rank markov_head_type "
    "enable_confidence_head confidence_head_with_markov draft_context_window ttt_length step_loss_decay "
    "draft_num_hidden_layers medusa_num_heads target_layer_ids eagle_aux_hidden_state_layer_ids target_hidden_size "
    "draft_vocab_size num_target_layers per_layer_config torch_dtype".split()
)


def _kind(arch: Architecture) -> str:
    if isinstance(arch, ChainArchitecture):
        return arch.kind
    return "dspark" if isinstance(arch, BlockArchitecture) else "medusa"


def _gemma4_fields(config: Mapping[str, Any], base: Mapping[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """Fields that Gemma 4 drafters alone have: two that newer transformers hide, and the target's model types."""
    if spec.family.name != "gemma4":
        return {}
    shape = spec.attention[FULL]
    fields: dict[str, Any] = {
        "global_head_dim": shape.head_dim,
        "target_model_type": base.get("target_model_type", "gemma4" if base is config else config.get("model_type")),
        "target_text_model_type": base.get("target_text_model_type", base["model_type"]),
    }
    if "num_global_key_value_heads" in base or "per_layer_config" in base:
        fields["num_global_key_value_heads"] = base.get("num_global_key_value_heads", shape.num_kv_heads)
    return fields


def _places(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    nested = {name: config[name] for name in NESTED if isinstance(config.get(name), Mapping)}
    return {"top level": config, **nested}


def _layer_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    ids = lookup(config, "target_layer_ids")
    if not isinstance(ids, list) or not all(isinstance(layer, int) and not isinstance(layer, bool) for layer in ids):
        raise ValueError(f"config field target_layer_ids must be a list of integers, got {ids!r}")
    shifted = lookup(config, "eagle_aux_hidden_state_layer_ids")
    if shifted is not None and list(shifted) != [layer + 1 for layer in ids]:
        raise ValueError(f"eagle_aux_hidden_state_layer_ids {shifted} is not target_layer_ids {ids} plus one")
    return tuple(ids)


def _draft_vocab_size(config: Mapping[str, Any], spec: ModelSpec) -> int | None:
    size = lookup(config, "draft_vocab_size")
    return None if size is None or size == spec.vocab_size else _integer(config, "draft_vocab_size")


def _head_type(config: Mapping[str, Any]) -> HeadType:
    value = lookup(config, "markov_head_type")
    if value not in HEAD_TYPES:
        raise ValueError(f"config field markov_head_type must be one of {', '.join(HEAD_TYPES)}, got {value!r}")
    return value


def _integer(config: Mapping[str, Any], name: str) -> int:
    value = lookup(config, name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"config field {name} must be an integer, got {value!r}")
    return value


def _boolean(config: Mapping[str, Any], name: str) -> bool:
    value = lookup(config, name)
    if not isinstance(value, bool):
        raise ValueError(f"config field {name} must be true or false, got {value!r}")
    return value
