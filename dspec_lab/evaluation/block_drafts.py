"""What a block drafter proposes along a text of the target, with its sequential head and without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int

from dspec_lab.drafters.backbone import BlockDraftModel
from dspec_lab.models.protocol import Taps, Target


@dataclass(frozen=True, slots=True)
class BlockDrafts:
    """Greedy blocks of G tokens at A anchors of one text, and the text's own tokens there.

    `parallel_AG` takes the largest logit of each slot by itself. `sequential_AG` adds the head's bias for the token
    that was chosen before; without a head both are the same.
    """

    anchors_A: np.ndarray
    truth_AG: np.ndarray
    parallel_AG: np.ndarray
    sequential_AG: np.ndarray


@torch.inference_mode()
def block_drafts(
    model: BlockDraftModel, target: Target, text: Sequence[int], first_anchor: int, *, stride: int = 1
) -> BlockDrafts:
    """Blocks at every `stride`-th anchor from `first_anchor` on that has a whole block of text behind it.

    The model must have the target's embedding and head (`open_drafter` and a `start` see to that). Raises
    `ValueError` where no anchor is left.
    """
    size = model.arch.block_size - model.arch.first_slot
    anchors = range(first_anchor, len(text) - size, stride)
    if first_anchor < 1 or not anchors:
        raise ValueError(f"a text of {len(text)} tokens has no whole block of {size} behind anchor {first_anchor}")
    session = target.session(capacity=len(text), taps=Taps(layers=model.arch.target_layer_ids))
    tapped_NF = session.extend(list(text), logit_rows=0).tapped_NF()
    cache = model.new_cache(len(text))
    parallel, sequential = [], []
    for anchor in anchors:
        model.append_context(cache, tapped_NF[cache.length : anchor])
        slots_GD = model.block_hidden(cache, text[anchor])[model.arch.first_slot :]
        base_GW = model.head_logits(slots_GD)
        parallel.append(model.to_target_ids(base_GW.argmax(-1)).tolist())
        drafted = model.draft(slots_GD, base_GW.clone(), text[anchor], lambda _, row_1W: int(row_1W.argmax()))
        sequential.append(list(drafted.token_ids))
    truth = [list(text[anchor + 1 : anchor + 1 + size]) for anchor in anchors]
    return BlockDrafts(np.array(anchors), np.array(truth), np.array(parallel), np.array(sequential))


def conditional_agreement(
    drafts_AG: Int[np.ndarray, "A G"], truth_AG: Int[np.ndarray, "A G"]
) -> tuple[np.ndarray, np.ndarray]:
    """(share of agreeing tokens at each position among blocks that agree before it, number of those blocks).

    NaN where no block agrees that far. At temperature 0 this is the conditional acceptance by position.
    """
    agree_AG: Bool[np.ndarray, "A G"] = drafts_AG == truth_AG
    survived_AG = np.cumprod(agree_AG, axis=1)
    reached_G = np.concatenate([[len(agree_AG)], survived_AG.sum(0)[:-1]])
    with np.errstate(invalid="ignore"):
        return np.where(reached_G > 0, survived_AG.sum(0) / reached_G, np.nan), reached_G


def repeats(drafts_AG: Int[np.ndarray, "A G"]) -> float:
    """Share of neighbouring pairs of a block that are one token twice, as where two slots both name the next word."""
    return float((drafts_AG[:, 1:] == drafts_AG[:, :-1]).mean())
