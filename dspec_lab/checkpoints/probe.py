"""A probe that runs a drafter on a target's own text and tells a flipped layout flag or wrong layer ids.

Such a drafter loads and runs; only its acceptance gives it away. So the probe also tries the neighbouring readings:
the slot before or after the one that should propose first, and target layers one lower or higher.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dspec_lab.checkpoints.doctor import Finding
from dspec_lab.drafters.backbone import BlockDraftModel
from dspec_lab.drafters.chain_model import ChainDraftModel
from dspec_lab.models.protocol import Taps, Target

SHIFTS = (-1, 0, 1)
# a reading must beat the present one by this much before it is named
CLEAR_GAIN = 0.03


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """Share of first proposals that are the target's own choice, per reading; None where a reading is impossible.

    Slot shift s: the token after the anchor is read from slot `first_slot` + s. Layer shift s: each tapped layer + s.
    """

    anchors: int
    hits_by_slot_shift: dict[int, float | None]
    hits_by_layer_shift: dict[int, float | None]
    findings: tuple[Finding, ...]


@dataclass(slots=True)
class _Count:
    right: list[bool] = field(default_factory=list)  # of each anchor, in the same order for every reading

    @property
    def rate(self) -> float | None:
        return sum(self.right) / len(self.right) if self.right else None


@torch.inference_mode()
def target_text(target: Target, prompt_ids: Sequence[int], new_tokens: int) -> list[int]:
    """The prompt and its greedy continuation: what a drafter of this target should be able to guess."""
    session = target.session(capacity=len(prompt_ids) + new_tokens)
    ids = list(prompt_ids)
    rows = session.extend(ids, logit_rows=1)
    for step in range(new_tokens):
        ids.append(int(rows.logits_JV[-1].argmax()))
        if ids[-1] in target.eos_ids or step == new_tokens - 1:
            break
        rows = session.extend(ids[-1:])
    return ids


@torch.inference_mode()
def probe_drafter(
    model: BlockDraftModel | ChainDraftModel,
    target: Target,
    texts: Sequence[Sequence[int]],
    first_anchors: Sequence[int],
) -> ProbeReport:
    """Compare the readings on texts of the target; anchors of text i start at `first_anchors[i]`, at least 1.

    Use `target_text` with the prompt's length as first anchor. A few hundred anchors tell the readings apart.
    """
    if len(texts) != len(first_anchors) or min(first_anchors, default=0) < 1:
        raise ValueError(f"{len(texts)} texts need as many first anchors, 1 or more each, got {list(first_anchors)}")
    ids = model.arch.target_layer_ids
    block = isinstance(model, BlockDraftModel)
    by_layer = {shift: _Count() for shift in (SHIFTS if ids else (0,))}
    by_slot = {shift: _Count() for shift in (SHIFTS if block else (0,))}
    anchors = 0
    for text, first in zip(texts, first_anchors, strict=True):
        for layer_shift, layer_count in by_layer.items():
            layers = tuple(layer + layer_shift for layer in ids)
            if ids and not (-1 <= layers[0] and layers[-1] < target.num_layers - 1):
                continue
            taps = Taps(layers=layers) if ids else Taps(last_hidden=True)
            rows = target.session(capacity=len(text), taps=taps).extend(list(text))
            features_NF = rows.tapped_NF() if ids else rows.last_ND()
            choice_T = rows.logits_JV.argmax(-1)
            counts = {0: layer_count} if layer_shift else by_slot
            if isinstance(model, BlockDraftModel):
                _count_blocks(model, list(text), first, features_NF, choice_T, counts)
            else:
                _count_chain(model, list(text), first, features_NF, choice_T, counts[0])
            anchors += 0 if layer_shift else max(len(text) - first, 0)
    by_layer[0] = by_slot[0]
    if not by_slot[0].right:
        raise ValueError("the texts are too short: there is no token after any first anchor")
    slot_rates = {shift: count.rate for shift, count in by_slot.items()}
    layer_rates = {shift: count.rate for shift, count in by_layer.items()}
    findings = _findings(model, by_slot, by_layer)
    return ProbeReport(anchors, slot_rates, layer_rates, tuple(findings))


def _count_blocks(
    model: BlockDraftModel,
    text: list[int],
    first: int,
    features_NF: Tensor,
    choice_T: Tensor,
    counts: dict[int, _Count],
) -> None:
    """Add up, for each slot shift, how often the first proposal is what the target would choose."""
    cache = model.new_cache(len(text))
    for anchor in range(first, len(text)):
        model.append_context(cache, features_NF[cache.length : anchor])
        slots_GD = model.block_hidden(cache, text[anchor])
        for shift, count in counts.items():
            slot = model.arch.first_slot + shift
            if not 0 <= slot < slots_GD.shape[0]:
                continue
            slot_1D = slots_GD[slot : slot + 1]
            drafted = model.draft(slot_1D, model.head_logits(slot_1D), text[anchor], lambda _, row: int(row.argmax()))
            count.right.append(drafted.token_ids[0] == int(choice_T[anchor]))


def _count_chain(
    model: ChainDraftModel, text: list[int], first: int, features_NF: Tensor, choice_T: Tensor, count: _Count
) -> None:
    """Add up how often the first proposal of a chain is what the target would choose."""
    cache = model.new_cache(len(text))
    for anchor in range(first, len(text)):
        next_ids = torch.tensor(text[cache.length + 1 : anchor + 1])
        hidden_1D = model.extend(cache, features_NF[cache.length : anchor], next_ids)
        count.right.append(int(model.to_target_ids(model.logits(hidden_1D).argmax(-1))) == int(choice_T[anchor]))


def _findings(
    model: BlockDraftModel | ChainDraftModel, by_slot: dict[int, _Count], by_layer: dict[int, _Count]
) -> list[Finding]:
    findings = []
    now = by_slot[0].rate or 0.0
    slot = _clearly_better(by_slot)
    if slot is not None and isinstance(model, BlockDraftModel):
        message = f"slot {model.arch.first_slot + slot} proposes better ({_gain(by_slot, slot)})"
        if slot == (1 if model.arch.sample_from_anchor else -1):
            flag = str(not model.arch.sample_from_anchor).lower()
            message += f": the anchor layout flag is flipped, set it to {flag}"
        findings.append(Finding("error", "anchor_flag_flipped", "sample_from_anchor", message))
    layer = _clearly_better(by_layer)
    if layer is not None:
        ids = [index + layer for index in model.arch.target_layer_ids]
        message = f"layers {ids} fit better ({_gain(by_layer, layer)}): the ids are off by one"
        findings.append(Finding("error", "layer_ids_off_by_one", "target_layer_ids", message))
    if not findings and now < 0.02:
        message = f"{now:.1%} of its choices are the target's under every reading: untrained, or of another target"
        findings.append(Finding("error", "accepts_nothing", "model.safetensors", message))
    return findings


def _clearly_better(counts: dict[int, _Count]) -> int | None:
    """The shift that beats the present reading by more than chance (four standard errors), if any.

    Readings are compared anchor by anchor: most anchors are easy or hard for all of them, which says nothing.
    """
    best = max(counts, key=lambda shift: counts[shift].rate or 0.0)
    if best == 0:
        return None
    differences = [int(a) - int(b) for a, b in zip(counts[best].right, counts[0].right, strict=True)]
    gain, count = sum(differences) / len(differences), len(differences)
    error = (sum((value - gain) ** 2 for value in differences) / count) ** 0.5 / count**0.5
    # no difference at all in the other direction must not look like certainty
    return best if gain > max(4 * max(error, 1 / count), CLEAR_GAIN) else None


def _gain(counts: dict[int, _Count], shift: int) -> str:
    return f"{counts[shift].rate or 0.0:.1%} of choices are the target's, against {counts[0].rate or 0.0:.1%}"
