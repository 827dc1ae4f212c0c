"""The block drafter's model (DSpark, DFlash): one pass proposes a block, the target's features are extra keys.

Ref: DSpark (arXiv:2607.05147), eq. 2 and 3; DFlash is the same backbone without sequential and confidence head.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dspec_lab.drafters.architecture import BlockArchitecture
from dspec_lab.drafters.block_rows import append_rows, block_rows, rows_serve
from dspec_lab.drafters.cache import DraftCache, RowCache
from dspec_lab.drafters.heads import HEADS, ConfidenceHead, SequentialHead
from dspec_lab.drafters.layers import DraftLayer, Linear, RMSNorm, RotaryTable, attend, rotate
from dspec_lab.drafters.packed import packed_attend
from dspec_lab.drafters.vocabulary import DraftModel
from dspec_lab.models.family import FULL

# picks the draft-vocabulary index of slot k from its logits [1, W]
Pick = Callable[[int, Tensor], int]


@dataclass(frozen=True, slots=True)
class DraftedBlock:
    """Tokens of one block, slot by slot, and what they were chosen from."""

    token_ids: tuple[int, ...]  # target ids
    logits_GW: Tensor  # with the sequential head's bias, over the draft vocabulary
    confidence_logits_G: Tensor | None


class BlockDraftModel(DraftModel):
    """Backbone, sequential head (rank > 0) and confidence head of a block drafter."""

    markov_head: SequentialHead | None
    confidence_head: ConfidenceHead | None

    def __init__(self, arch: BlockArchitecture, *, own_embedding: bool = False, own_head: bool = False) -> None:
        super().__init__(arch.spec, arch.draft_vocab_size, own_embedding=own_embedding, own_head=own_head)
        self.arch = arch
        spec, width = arch.spec, arch.spec.hidden_size
        self.fc = Linear(arch.feature_width, width, bias=False)
        self.hidden_norm = RMSNorm(width, spec.norm_eps)
        self.layers = nn.ModuleList(DraftLayer(spec) for _ in range(spec.num_layers))
        self.norm = RMSNorm(width, spec.norm_eps)
        self.markov_head = self.confidence_head = None
        if arch.markov_head_type is not None:
            head = HEADS[arch.markov_head_type]
            self.markov_head = head(width, arch.markov_rank, spec.vocab_size, self.draft_vocab_size)
        if arch.confidence_head:
            self.confidence_head = ConfidenceHead(width, arch.markov_rank if arch.confidence_with_markov else 0)
        shape = spec.attention[FULL]
        self.rotary = RotaryTable(shape.rotary, shape.head_dim, spec.max_positions + arch.block_size)

    def new_cache(self, capacity: int) -> DraftCache:
        """Empty cache for a context of at most `capacity` tokens."""
        shape, weight = self.arch.spec.attention[FULL], self.fc.weight
        kind = RowCache if rows_serve(self) else DraftCache
        return kind(
            len(self.layers),
            shape.num_kv_heads,
            shape.head_dim,
            capacity=capacity,
            scratch=self.arch.block_size,
            window=self.arch.context_window,
            dtype=self.activation_dtype,
            device=weight.device,
        )

    def context(self, features: Float[Tensor, "*N F"]) -> Float[Tensor, "*N D"]:
        """H_ctx = rms(fc(features)), the same input for every layer."""
        if features.shape[-1] != self.arch.feature_width:
            raise ValueError(
                f"target features are {features.shape[-1]} wide, layers {list(self.arch.target_layer_ids)} need "
                f"{self.arch.feature_width}"
            )
        return self.hidden_norm(self.fc(features.to(self.activation_dtype)))

    def append_context(self, cache: DraftCache, features_NF: Float[Tensor, "N F"]) -> None:
        """Add the keys and values of newly committed tokens to every layer's cache."""
        if isinstance(cache, RowCache) and torch.is_inference_mode_enabled():
            append_rows(self, [cache], [features_NF])
            return
        unseen = cache.make_room(features_NF.shape[0])
        count = features_NF.shape[0] - unseen
        if count == 0:
            return
        context_1ND = self.context(features_NF[unseen:])[None]
        cos_NE, sin_NE = self.rotary.span(cache.length, count, context_1ND)
        for index, layer in enumerate(self.layers):
            k_1NKE, v_1NKE = layer.self_attn.project_context(context_1ND)
            k_1NKE = rotate(k_1NKE, cos_NE[:, None], sin_NE[:, None])
            cache.write(index, 0, k_1NKE.transpose(1, 2), v_1NKE.transpose(1, 2))
        cache.advance(count)

    def block_hidden(self, cache: DraftCache, anchor_id: int) -> Float[Tensor, "G D"]:
        """Normed hidden states of the block's slots: the anchor at the context's length, then mask tokens.

        The cache is left as it was; the block's own keys and values are scratch.
        """
        if isinstance(cache, RowCache) and torch.is_inference_mode_enabled():
            return block_rows(self, [cache], [anchor_id])[0]
        size = self.arch.block_size
        ids_1G = torch.tensor([[anchor_id] + [self.arch.mask_token_id] * (size - 1)], device=self.fc.weight.device)
        x_1GD = self.embed(ids_1G)
        cos_GE, sin_GE = self.rotary.span(cache.length, size, x_1GD)
        cos_G1E, sin_G1E = cos_GE[:, None], sin_GE[:, None]
        for index, layer in enumerate(self.layers):
            attention = layer.self_attn
            q_1GHE, k_1GKE, v_1GKE = attention.project(layer.input_layernorm(x_1GD))
            cache.write(index, 0, rotate(k_1GKE, cos_G1E, sin_G1E).transpose(1, 2), v_1GKE.transpose(1, 2))
            keys_1KSE, values_1KSE = cache.read(index, size)
            q_GHE = rotate(q_1GHE[0], cos_G1E, sin_G1E)
            x_1GD = layer.finish(
                x_1GD, attend(q_GHE, keys_1KSE, values_1KSE, attention.shape.score_scale, causal=False)
            )
        return self.norm(x_1GD[0])

    def draft(
        self, hidden_GD: Float[Tensor, "G D"], base_GW: Float[Tensor, "G W"], anchor_id: int, pick: Pick
    ) -> DraftedBlock:
        """Choose the tokens of a block left to right, each with the bias of the one before it.

        `hidden_GD` are normed hidden states of the first G proposing slots and `base_GW` their logits. The bias is
        computed for the one previous token only: W2 (draft vocabulary) times one row of W1.
        """
        head = self.markov_head
        if head is None:
            token_ids = self._target_ids([pick(k, base_GW[k : k + 1]) for k in range(base_GW.shape[0])])
            previous_GR, logits_GW = None, base_GW
        else:
            token_ids, rows, embedded, state_1R = [], [], [], head.initial_state()
            previous = torch.tensor([anchor_id], device=base_GW.device)
            for k in range(base_GW.shape[0]):
                e_1R = head.embed(previous)
                feature_1R, state_1R = head.step(e_1R, hidden_GD[k : k + 1], state_1R)
                row_1W = head.bias(feature_1R).add_(base_GW[k])
                previous = self.to_target_ids(torch.tensor([pick(k, row_1W)], device=base_GW.device))
                token_ids.append(int(previous))
                rows.append(row_1W)
                embedded.append(e_1R)
            previous_GR, logits_GW = torch.cat(embedded), torch.cat(rows)
        confidence_G = None
        if self.confidence_head is not None:
            confidence_G = self.confidence_head(hidden_GD, previous_GR if self.confidence_head.uses_previous else None)
        return DraftedBlock(tuple(token_ids), logits_GW, confidence_G)

    def _target_ids(self, draft_ids: list[int]) -> list[int]:
        return self.to_target_ids(torch.tensor(draft_ids, device=self.fc.weight.device)).tolist()

    def train_hidden(
        self,
        features_BTF: Float[Tensor, "B T F"],
        anchor_ids_BA: Int[Tensor, "B A"],
        anchor_positions_BA: Int[Tensor, "B A"],
        *,
        num_slots: int | None = None,
    ) -> Float[Tensor, "B A G D"]:
        """Normed hidden states of all slots of A isolated blocks a sequence (anchor-bounded packing).

        A block sees the context strictly before its anchor and its own slots. The context's keys and values are
        computed once for all blocks. Blocks without use (fillers) may be given any anchor; ignore their rows.
        `num_slots` makes blocks shorter than the drafter's own, for a first phase of training.
        """
        size = self.arch.block_size if num_slots is None else num_slots
        if not self.arch.first_slot < size <= self.arch.block_size:
            raise ValueError(f"blocks of {size} slots do not fit a drafter of block size {self.arch.block_size}")
        context_BTD = self.context(features_BTF)
        slots_G = torch.arange(size, device=anchor_positions_BA.device)
        positions_BX = (anchor_positions_BA[..., None] + slots_G).flatten(1)
        ids_BAG = torch.full((*anchor_ids_BA.shape, size), self.arch.mask_token_id, device=anchor_ids_BA.device)
        ids_BAG[..., 0] = anchor_ids_BA
        x_BXD = self.embed(ids_BAG).flatten(1, 2)
        cos_TE, sin_TE = self.rotary.span(0, features_BTF.shape[1], x_BXD)
        cos_BXE, sin_BXE = self.rotary.at(positions_BX, x_BXD)
        cos_BX1E, sin_BX1E = cos_BXE[:, :, None], sin_BXE[:, :, None]
        for layer in self.layers:
            attention = layer.self_attn
            context_k_BTKE, context_v_BTKE = attention.project_context(context_BTD)
            q_BXHE, k_BXKE, v_BXKE = attention.project(layer.input_layernorm(x_BXD))
            attended_BXD = packed_attend(
                rotate(q_BXHE, cos_BX1E, sin_BX1E),
                rotate(context_k_BTKE, cos_TE[:, None], sin_TE[:, None]),
                context_v_BTKE,
                rotate(k_BXKE, cos_BX1E, sin_BX1E),
                v_BXKE,
                anchor_positions_BA,
                scale=attention.shape.score_scale,
                window=self.arch.context_window,
            )
            x_BXD = layer.finish(x_BXD, attended_BXD)
        return self.norm(x_BXD).unflatten(1, (-1, size))
