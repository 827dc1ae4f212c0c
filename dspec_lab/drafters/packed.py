"""Attention of many isolated blocks over one shared context, without the blocks-by-blocks part of the mask."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def packed_attend(
    q_BXHE: Float[Tensor, "B X H E"],
    context_k_BTKE: Float[Tensor, "B T K E"],
    context_v_BTKE: Float[Tensor, "B T K E"],
    block_k_BXKE: Float[Tensor, "B X K E"],
    block_v_BXKE: Float[Tensor, "B X K E"],
    anchor_positions_BA: Int[Tensor, "B A"],
    *,
    scale: float,
    window: int | None = None,
) -> Float[Tensor, "B X D"]:
    """Attention output [B, A*G, H*E] of the A blocks' slots (X = A*G), heads concatenated.

    A slot sees context positions before its block's anchor (the last `window` of them) and its own block's slots.
    With a window, the cost of a block does not depend on T.

    Ref: DSpark (arXiv:2607.05147), anchor-bounded packing.
    """
    num_anchors = anchor_positions_BA.shape[1]
    num_heads, num_kv_heads = q_BXHE.shape[2], context_k_BTKE.shape[2]
    group = num_heads // num_kv_heads
    # rows of a key head: its query heads times the block's slots
    q_BXKPE = q_BXHE.unflatten(2, (num_kv_heads, group)) * scale
    q_BAGKPE = q_BXKPE.unflatten(1, (num_anchors, -1))
    size = q_BAGKPE.shape[2]
    q_BKAPE = q_BAGKPE.permute(0, 3, 1, 4, 2, 5).flatten(3, 4)  # P becomes group * slots
    block_k_BKAGE = block_k_BXKE.unflatten(1, (num_anchors, -1)).permute(0, 3, 1, 2, 4)
    block_v_BKAGE = block_v_BXKE.unflatten(1, (num_anchors, -1)).permute(0, 3, 1, 2, 4)
    block_scores = q_BKAPE @ block_k_BKAGE.transpose(-1, -2)

    num_context = context_k_BTKE.shape[1]
    k_BKTE, v_BKTE = context_k_BTKE.transpose(1, 2), context_v_BTKE.transpose(1, 2)
    if window is not None and window < num_context:
        index_BAS = anchor_positions_BA[..., None] - window + torch.arange(window, device=q_BXHE.device)
        seen_BAS = index_BAS >= 0
        context_k_BKASE = _gather(k_BKTE, index_BAS.clamp_min(0))
        context_v_BKASE = _gather(v_BKTE, index_BAS.clamp_min(0))
        context_scores = q_BKAPE @ context_k_BKASE.transpose(-1, -2)
    else:
        positions_T = torch.arange(num_context, device=q_BXHE.device)
        seen_BAS = positions_T < anchor_positions_BA[..., None]
        if window is not None:
            seen_BAS &= positions_T >= anchor_positions_BA[..., None] - window
        # all blocks' rows against the shared keys in one product
        context_scores = (q_BKAPE.flatten(2, 3) @ k_BKTE.transpose(-1, -2)).unflatten(2, (num_anchors, -1))
        context_v_BKASE = None
    context_scores = context_scores.masked_fill(~seen_BAS[:, None, :, None], float("-inf"))

    weights = torch.cat([context_scores, block_scores], dim=-1).float().softmax(dim=-1).to(q_BXHE.dtype)
    context_w, block_w = weights.split([context_scores.shape[-1], size], dim=-1)
    if context_v_BKASE is None:
        out_BKAPE = (context_w.flatten(2, 3) @ v_BKTE).unflatten(2, (num_anchors, -1))
    else:
        out_BKAPE = context_w @ context_v_BKASE
    out_BKAPE = out_BKAPE + block_w @ block_v_BKAGE
    out_BAGKPE = out_BKAPE.unflatten(3, (group, size)).permute(0, 2, 4, 1, 3, 5)
    return out_BAGKPE.flatten(3, 5).flatten(1, 2)


def _gather(x_BKTE: Tensor, index_BAS: Tensor) -> Tensor:
    """x at each block's own positions, [B,K,A,S,E]."""
    batch_B11 = torch.arange(x_BKTE.shape[0], device=x_BKTE.device)[:, None, None]
    return x_BKTE.transpose(1, 2)[batch_B11, index_BAS].permute(0, 3, 1, 2, 4)
