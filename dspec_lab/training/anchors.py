"""Where training blocks start, what they are to predict, and which keys they see.

Ref: DSpark (arXiv:2607.05147), anchor-bounded packing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

Mask = Int[Tensor, "B T"] | Bool[Tensor, "B T"]


@dataclass(frozen=True, slots=True)
class Anchors:
    """Block starts of a batch. Fillers (`keep` false) have position 0 and no meaning."""

    positions_BA: Tensor
    keep_BA: Tensor

    def trimmed(self) -> Anchors:
        """The same without columns of fillers alone, of which at least one stays (fillers stand last)."""
        width = max(int(self.keep_BA.sum(1).max()), 1)
        return Anchors(self.positions_BA[:, :width], self.keep_BA[:, :width])


@dataclass(frozen=True, slots=True)
class BlockLabels:
    """What the slots of each block are compared with, for G proposing slots a block."""

    label_ids_BAG: Tensor  # token at anchor + 1 + k, index cut to the last position
    previous_ids_BAG: Tensor  # token before the label: the anchor, then the labels
    teacher_index_BAG: Tensor  # position whose last hidden state gives the target's law of the label
    supervised_BAG: Tensor  # label inside the sequence and trainable, all earlier slots too, block real


def anchor_candidates(loss_mask_BT: Mask) -> Bool[Tensor, "B S"]:
    """Positions 0..T-2 that may be anchors: the token and its successor are both trainable."""
    mask_BT = loss_mask_BT.bool()
    return mask_BT[:, :-1] & mask_BT[:, 1:]


def sample_anchors(loss_mask_BT: Mask, num_anchors: int, generator: torch.Generator | None = None) -> Anchors:
    """min(num_anchors, candidates) anchors a sequence, drawn uniformly without repetition and sorted; then fillers."""
    if num_anchors < 1:
        raise ValueError(f"num_anchors must be at least 1, got {num_anchors}")
    candidates_BS = anchor_candidates(loss_mask_BT)
    # the candidates with the largest random keys are a uniform draw without repetition
    keys_BS = torch.rand(candidates_BS.shape, generator=generator, device=candidates_BS.device)
    keys_BS = keys_BS.masked_fill(~candidates_BS, -1.0)
    width = min(num_anchors, keys_BS.shape[1])
    top_BA = keys_BS.topk(width, dim=1)
    past_end = keys_BS.shape[1]
    drawn_BA = torch.where(top_BA.values >= 0, top_BA.indices, past_end).sort(dim=1).values
    drawn_BA = torch.nn.functional.pad(drawn_BA, (0, num_anchors - width), value=past_end)
    keep_BA = drawn_BA < past_end
    return Anchors(positions_BA=drawn_BA.masked_fill(~keep_BA, 0), keep_BA=keep_BA)


def block_labels(
    input_ids_BT: Int[Tensor, "B T"],
    loss_mask_BT: Mask,
    anchors: Anchors,
    size: int,
) -> BlockLabels:
    """Labels of `size` proposing slots behind each anchor."""
    last = input_ids_BT.shape[1] - 1
    index_BAG = anchors.positions_BA[..., None] + 1 + torch.arange(size, device=input_ids_BT.device)
    cut_BAG = index_BAG.clamp_max(last).masked_fill(~anchors.keep_BA[..., None], 0)
    label_ids_BAG = _pick(input_ids_BT, cut_BAG)
    anchor_ids_BA1 = _pick(input_ids_BT, anchors.positions_BA[..., None])
    trainable_BAG = (index_BAG <= last) & _pick(loss_mask_BT, cut_BAG).bool() & anchors.keep_BA[..., None]
    return BlockLabels(
        label_ids_BAG=label_ids_BAG,
        previous_ids_BAG=torch.cat([anchor_ids_BA1, label_ids_BAG[..., :-1]], dim=-1),
        teacher_index_BAG=(cut_BAG - 1).clamp_min(0),
        supervised_BAG=trainable_BAG.cumprod(-1).bool(),
    )


def packed_positions(anchors: Anchors, num_context: int, size: int) -> Int[Tensor, "B S"]:
    """Rotary positions of all keys: the context's own, then anchor + slot of each block's `size` slots."""
    device = anchors.positions_BA.device
    slots_BX = (anchors.positions_BA[..., None] + torch.arange(size, device=device)).flatten(1)
    context_BT = torch.arange(num_context, device=device).expand(slots_BX.shape[0], -1)
    return torch.cat([context_BT, slots_BX], dim=1)


def packed_block_mask(anchors: Anchors, num_context: int, size: int) -> Bool[Tensor, "B X S"]:
    """Which of the keys (context, then all blocks' slots) each block slot sees, written out.

    Slots of a block see the context strictly before its anchor and their own block; fillers see nothing. The model
    computes the same without this mask (`drafters.packed`), except that a filler sees its own slots.
    """
    num_anchors = anchors.positions_BA.shape[1]
    device = anchors.positions_BA.device
    context_BAT = torch.arange(num_context, device=device) < anchors.positions_BA[..., None]
    own_AA = torch.eye(num_anchors, dtype=torch.bool, device=device)
    own_BAX = own_AA.repeat_interleave(size, dim=1).expand(context_BAT.shape[0], -1, -1)
    mask_BAS = torch.cat([context_BAT, own_BAX], dim=-1) & anchors.keep_BA[..., None]
    return mask_BAS.repeat_interleave(size, dim=1)


def ttt_mask(lengths_B: Int[Tensor, " B"], num_context: int, step: int) -> Bool[Tensor, "B T S"]:
    """Which keys (of steps 0..step, T each) every position sees at a step of training-time test, written out.

    Keys of step 0 up to the own position, of later steps the own position only; beyond the real length less `step`
    nothing is seen. The model computes the same without this mask (`drafters.chain_model`).
    """
    positions_T = torch.arange(num_context, device=lengths_B.device)
    causal_TT = positions_T[:, None] >= positions_T
    own_TT = torch.eye(num_context, dtype=torch.bool, device=lengths_B.device)
    mask_TS = torch.cat([causal_TT] + [own_TT] * step, dim=1)
    real_BT = positions_T < (lengths_B - step)[:, None]
    return mask_TS & real_BT[:, :, None] & real_BT.repeat(1, step + 1)[:, None, :]


def _pick(values_BT: Tensor, index_BAG: Tensor) -> Tensor:
    return values_BT.gather(1, index_BAG.flatten(1)).view(index_BAG.shape)
