"""Drafters that run token by token on their own hidden state: what EAGLE-3 and MTP share.

Pairing: the target's feature of token i goes with the embedding of token i + 1, at rotary position i, and the output
proposes token i + 2. The next step takes the output in place of the feature.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dspec_lab.drafters.architecture import ChainArchitecture
from dspec_lab.drafters.cache import DraftCache
from dspec_lab.drafters.layers import DraftLayer, RMSNorm, RotaryTable, attend, rotate
from dspec_lab.drafters.vocabulary import DraftModel
from dspec_lab.models.family import FULL


class ChainDraftModel(DraftModel, ABC):
    """Layers, cache and steps of a one-token-at-a-time drafter; subclasses say how hidden state and token meet."""

    layers: nn.ModuleList

    def __init__(self, arch: ChainArchitecture, *, own_embedding: bool, own_head: bool) -> None:
        super().__init__(arch.spec, arch.draft_vocab_size, own_embedding=own_embedding, own_head=own_head)
        self.arch = arch
        self.norm = RMSNorm(arch.spec.hidden_size, arch.spec.norm_eps)
        shape = arch.spec.attention[FULL]
        self.rotary = RotaryTable(shape.rotary, shape.head_dim, arch.spec.max_positions + arch.ttt_length)

    @abstractmethod
    def from_features(self, features: Float[Tensor, "*N F"]) -> Float[Tensor, "*N D"]:
        """Hidden state that stands for the target's features of a token."""

    @abstractmethod
    def enter(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Residual stream before the first layer."""

    @abstractmethod
    def attention_input(self, layer: DraftLayer, x: Tensor, embedded: Tensor) -> Tensor:
        """What a layer's query, key and value projections read."""

    @abstractmethod
    def leave(self, x: Tensor) -> Tensor:
        """Hidden state handed to the next step, from the stream after the last layer."""

    @abstractmethod
    def before_head(self, hidden: Float[Tensor, "*N D"]) -> Float[Tensor, "*N D"]:
        """What the output head reads of hidden states as `leave` returns them."""

    def logits(self, hidden: Float[Tensor, "*N D"]) -> Float[Tensor, "*N W"]:
        """Draft logits of hidden states as `leave` returns them."""
        return self.head_logits(self.before_head(hidden))

    def new_cache(self, capacity: int) -> DraftCache:
        """Empty cache for a context of at most `capacity` tokens."""
        shape, weight = self.arch.spec.attention[FULL], self.norm.weight
        return DraftCache(
            len(self.layers),
            shape.num_kv_heads,
            shape.head_dim,
            capacity=capacity,
            scratch=self.arch.ttt_length,
            dtype=self.activation_dtype,
            device=weight.device,
        )

    def extend(
        self, cache: DraftCache, features_NF: Float[Tensor, "N F"], next_ids_N: Int[Tensor, " N"]
    ) -> Float[Tensor, "1 D"]:
        """Add committed tokens to the cache; returns the last row's hidden state, which proposes the first token.

        Row n has the target's features of a token and the id of the token after it.
        """
        if features_NF.shape[0] != next_ids_N.shape[0] or not next_ids_N.shape[0]:
            raise ValueError(f"{features_NF.shape[0]} feature rows for {next_ids_N.shape[0]} tokens")
        cache.make_room(next_ids_N.shape[0])
        hidden_1ND = self._rows(cache, 0, self.from_features(features_NF)[None], self.embed(next_ids_N)[None])
        cache.advance(next_ids_N.shape[0])
        return hidden_1ND[:, -1]

    def step(self, cache: DraftCache, offset: int, hidden_1D: Float[Tensor, "1 D"], token_id: int) -> Tensor:
        """Hidden state [1, D] after one drafted token; its cache entry is scratch, `offset` places past the context."""
        ids_11 = torch.tensor([[token_id]], device=hidden_1D.device)
        return self._rows(cache, offset, hidden_1D[None], self.embed(ids_11))[:, 0]

    def _rows(self, cache: DraftCache, offset: int, hidden_1ND: Tensor, embedded_1ND: Tensor) -> Tensor:
        count = hidden_1ND.shape[1]
        x_1ND = self.enter(hidden_1ND, embedded_1ND)
        cos_NE, sin_NE = self.rotary.span(cache.length + offset, count, x_1ND)
        cos_N1E, sin_N1E = cos_NE[:, None], sin_NE[:, None]
        for index, layer in enumerate(self.layers):
            attention = layer.self_attn
            q_1NHE, k_1NKE, v_1NKE = attention.project(self.attention_input(layer, x_1ND, embedded_1ND))
            cache.write(index, offset, rotate(k_1NKE, cos_N1E, sin_N1E).transpose(1, 2), v_1NKE.transpose(1, 2))
            keys_1KSE, values_1KSE = cache.read(index, offset + count)
            q_NHE = rotate(q_1NHE[0], cos_N1E, sin_N1E)
            x_1ND = layer.finish(x_1ND, attend(q_NHE, keys_1KSE, values_1KSE, attention.shape.score_scale, causal=True))
        return self.leave(x_1ND)

    def train_steps(
        self,
        features_BTF: Float[Tensor, "B T F"],
        input_ids_BT: Int[Tensor, "B T"],
        num_steps: int | None = None,
        later_BN: Int[Tensor, "B N"] | None = None,
    ) -> Iterator[Float[Tensor, "B X D"]]:
        """Training-time test: hidden states of step 0, 1, ... (default `ttt_length` steps).

        Step 0 gives all T positions. Later steps give the positions `later_BN` (repeated as fillers where a sequence
        has fewer), or all: no other row reads what they make.

        At step s position i gets token i + 1 + s (id 0 past the end) and its own output of step s - 1. It sees keys
        of step 0 at positions up to i, and of every later step only its own. Rows whose tokens lie past the real
        end of a sequence carry no meaning.

        Ref: EAGLE-3 (arXiv:2503.01840), section 3.2.
        """
        num_steps = num_steps or self.arch.ttt_length
        batch, length = input_ids_BT.shape
        hidden_BXD = self.from_features(features_BTF)
        past: list[_StepKeys] = [_StepKeys() for _ in self.layers]
        row_BX = torch.arange(length, device=input_ids_BT.device).expand(batch, -1)
        ids_BT = torch.cat([input_ids_BT, input_ids_BT.new_zeros(batch, num_steps)], dim=1)
        for step in range(num_steps):
            embedded_BXD = self.embed(ids_BT.gather(1, row_BX + 1 + step))
            x_BXD = self.enter(hidden_BXD, embedded_BXD)
            cos_BXE, sin_BXE = self.rotary.at(row_BX + step, x_BXD)
            cos_BX1E, sin_BX1E = cos_BXE[:, :, None], sin_BXE[:, :, None]
            for layer, keys in zip(self.layers, past, strict=True):
                attention = layer.self_attn
                q_BXHE, k_BXKE, v_BXKE = attention.project(self.attention_input(layer, x_BXD, embedded_BXD))
                keys.append(rotate(k_BXKE, cos_BX1E, sin_BX1E), v_BXKE)
                attended_BXD = keys.attend(rotate(q_BXHE, cos_BX1E, sin_BX1E), row_BX, attention.shape.score_scale)
                x_BXD = layer.finish(x_BXD, attended_BXD)
            hidden_BXD = self.leave(x_BXD)
            yield hidden_BXD
            if step == 0 and later_BN is not None:
                row_BX = later_BN
                hidden_BXD = hidden_BXD.gather(1, later_BN[..., None].expand(-1, -1, hidden_BXD.shape[-1]))


class _StepKeys:
    """Keys and values of all steps of one layer, and the step-wise causal attention over them."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def append(self, k_BXKE: Tensor, v_BXKE: Tensor) -> None:
        self.keys.append(k_BXKE)
        self.values.append(v_BXKE)

    def attend(self, q_BXHE: Tensor, row_BX: Tensor, scale: float) -> Tensor:
        """Heads' output [B, X, H*E] of the newest step's queries, which stand at positions `row_BX`."""
        num_rows, num_keys = q_BXHE.shape[1], self.keys[0].shape[1]
        group = q_BXHE.shape[2] // self.keys[0].shape[2]
        # P is the query heads that share a key head
        q_BKPXE = (q_BXHE.unflatten(2, (-1, group)) * scale).permute(0, 2, 3, 1, 4)
        k_BKTE, v_BKTE = self.keys[0].transpose(1, 2), self.values[0].transpose(1, 2)
        scores = (q_BKPXE.flatten(2, 3) @ k_BKTE.transpose(-1, -2)).unflatten(2, (group, num_rows))
        later_BXT = torch.arange(num_keys, device=q_BXHE.device) > row_BX[..., None]
        scores = [scores.masked_fill(later_BXT[:, None, None], float("-inf"))]
        for k_BXKE in self.keys[1:]:
            scores.append((q_BKPXE * k_BXKE.transpose(1, 2)[:, :, None]).sum(-1, keepdim=True))
        weights = torch.cat(scores, dim=-1).float().softmax(dim=-1).to(q_BXHE.dtype)
        out_BKPXE = (weights[..., :num_keys].flatten(2, 3) @ v_BKTE).unflatten(2, (group, num_rows))
        for step, v_BXKE in enumerate(self.values[1:]):
            out_BKPXE = out_BKPXE + weights[..., num_keys + step, None] * v_BXKE.transpose(1, 2)[:, :, None]
        return out_BKPXE.permute(0, 3, 1, 2, 4).flatten(2)
