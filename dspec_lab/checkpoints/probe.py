"""A probe that runs a drafter on a target's own text and tells a flipped layout flag or wrong layer ids.

Such a drafter loads and runs; only its acceptance gives it away. So the probe also tries the neighbouring readings:
proposals one slot earlier or later, and target layers one lower or higher.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspec_lab.checkpoints.doctor import Finding
from dspec_lab.drafters.backbone import BlockDraftModel
from dspec_lab.drafters.chain_model import ChainDraftModel
from dspec_lab.models.protocol import Taps, Target

SHIFTS = (-1, 0, 1)


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """Share of first proposals (greedy) that equal the target's text, for each reading; None where it is impossible."""

    trials: int
    hits_by_slot_shift: dict[int, float | None]
    hits_by_layer_shift: dict[int, float | None]
    findings: tuple[Finding, ...]


def greedy_text(target: Target, prompt_ids: Sequence[int], new_tokens: int) -> list[int]:
    """The prompt and its greedy continuation, which is the text a drafter should be able to guess."""
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
    """Compare the readings on texts of the target; anchors of text i start at `first_anchors[i]`.

    Use `greedy_text` with the prompt's length as first anchor. A few hundred anchors tell the readings apart.
    """
    if len(texts) != len(first_anchors):
        raise ValueError(f"{len(texts)} texts but {len(first_anchors)} first anchors")
    ids = model.arch.target_layer_ids
    by_layer: dict[int, float | None] = {}
    by_slot: dict[int, float | None] = {0: None}
    trials = 0
    for layer_shift in SHIFTS if ids else (0,):
        layers = tuple(layer + layer_shift for layer in ids)
        if ids and not (-1 <= layers[0] and layers[-1] < target.num_layers - 1):
            by_layer[layer_shift] = None
            continue
        taps = Taps(layers=layers) if ids else Taps(last_hidden=True)
        hits, count = torch.zeros(len(SHIFTS)), 0
        for text, first in zip(texts, first_anchors, strict=True):
            got, tried = _text_hits(model, target, list(text), first, taps)
            hits, count = hits + got, count + tried
        if not count:
            raise ValueError("the texts are too short: no anchor has three tokens after it")
        by_layer[layer_shift] = float(hits[1]) / count
        if layer_shift == 0:
            trials = count
            if isinstance(model, BlockDraftModel):
                by_slot = {shift: float(hits[i]) / count for i, shift in enumerate(SHIFTS)}
    by_slot[0] = by_layer[0]
    return ProbeReport(trials, by_slot, by_layer, tuple(_findings(model, trials, by_slot, by_layer)))


def _text_hits(
    model: BlockDraftModel | ChainDraftModel, target: Target, text: list[int], first: int, taps: Taps
) -> tuple[Tensor, int]:
    """Per slot shift, how often the first proposal equals the text's token there; and the number of anchors."""
    features = target.session(capacity=len(text), taps=taps).extend(text, logit_rows=0).features
    assert features is not None
    rows_NF = features.tapped_NF if taps.layers else features.last_ND
    assert rows_NF is not None
    cache, hits, count = model.new_cache(len(text)), torch.zeros(len(SHIFTS)), 0
    for anchor in range(first, len(text) - 2):
        new_NF = rows_NF[cache.length : anchor]
        if isinstance(model, BlockDraftModel):
            model.append_context(cache, new_NF)
            proposed = _first_proposal(model, model.block_hidden(cache, text[anchor]), text[anchor])
        else:
            hidden_1D = model.extend(cache, new_NF, torch.tensor(text[cache.length + 1 : anchor + 1]))
            proposed = int(model.to_target_ids(model.logits(hidden_1D).argmax(-1)))
        hits += torch.tensor([proposed == text[anchor + 1 + shift] for shift in SHIFTS])
        count += 1
    return hits, count


def _first_proposal(model: BlockDraftModel, hidden_GD: Tensor, anchor: int) -> int:
    slot_1D = hidden_GD[model.arch.first_slot :][:1]
    block = model.draft(slot_1D, model.head_logits(slot_1D), anchor, lambda _, logits_1W: int(logits_1W.argmax()))
    return block.token_ids[0]


def _findings(
    model: BlockDraftModel | ChainDraftModel,
    trials: int,
    by_slot: dict[int, float | None],
    by_layer: dict[int, float | None],
) -> list[Finding]:
    findings = []
    now = by_layer[0] or 0.0
    better_slot = _clearly_better(by_slot, now, trials)
    if better_slot is not None and isinstance(model, BlockDraftModel):
        flag = model.arch.sample_from_anchor
        message = (
            f"proposals fit the text {better_slot:+d} places away ({by_slot[better_slot]:.1%} against {now:.1%}): the "
            f"anchor layout flag is flipped, set it to {str(not flag).lower()}"
        )
        findings.append(Finding("error", "anchor_flag_flipped", "sample_from_anchor", message))
    better_layer = _clearly_better(by_layer, now, trials)
    if better_layer is not None:
        ids = [layer + better_layer for layer in model.arch.target_layer_ids]
        message = f"layers {ids} fit better ({by_layer[better_layer]:.1%} against {now:.1%}): ids are off by one"
        findings.append(Finding("error", "layer_ids_off_by_one", "target_layer_ids", message))
    if not findings and now < 0.02:
        message = f"{now:.1%} of first proposals fit the text under every reading: untrained, or of another target"
        findings.append(Finding("error", "accepts_nothing", "model.safetensors", message))
    return findings


def _clearly_better(rates: dict[int, float | None], now: float, trials: int) -> int | None:
    """The shift that beats the present reading by half its hits again and by four standard errors, if any."""
    best = max((shift for shift in rates if rates[shift] is not None), key=lambda shift: rates[shift] or 0.0)
    top = rates[best] or 0.0
    error = (max(top * (1 - top), 1 / trials) / trials) ** 0.5
    return best if best and top > 1.5 * now and top - now > 4 * error else None
