"""Sequential heads (a bias from the previous token) and the confidence head."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dspec_lab.drafters.architecture import HeadType
from dspec_lab.drafters.layers import Linear

LANES = 32  # numbers that torch handles at once at most: two vectors of 16


class SequentialHead(nn.Module):
    """Low-rank bias on the draft logits of slot k, from the token at slot k - 1: B_k = W2 f(W1[x_{k-1}], h_k, state).

    `vanilla`: f = e. Ref: DSpark (arXiv:2607.05147), eq. 5. W1 covers the target vocabulary (any token may precede),
    W2 the draft vocabulary. Subclasses change f only.
    """

    def __init__(self, hidden_size: int, rank: int, vocab_size: int, draft_vocab_size: int) -> None:
        super().__init__()
        del hidden_size
        self.rank = rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = Linear(rank, draft_vocab_size, bias=False)

    def embed(self, token_ids: Int[Tensor, "*N"]) -> Float[Tensor, "*N R"]:
        """e = W1[x], the low-rank embedding of previous tokens."""
        e = self.markov_w1(token_ids)
        # hidden states are fp32 or wider, whatever the table is stored in
        return e if e.dtype == torch.float64 else e.float()

    def initial_state(self) -> Tensor | None:
        """State before slot 0; None for memoryless heads."""
        return None

    def step(self, e_BR: Tensor, hidden_BD: Tensor, state_BR: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(f, next state) of one slot."""
        del hidden_BD
        return e_BR, state_BR

    def features(
        self, previous_ids_NG: Int[Tensor, "N G"], hidden_NGD: Float[Tensor, "N G D"]
    ) -> Float[Tensor, "N G R"]:
        """f at all slots of blocks whose previous tokens are known (teacher forcing)."""
        return self.step(self.embed(previous_ids_NG), hidden_NGD, None)[0]

    def bias(self, feature: Float[Tensor, "*N R"]) -> Float[Tensor, "*N W"]:
        """W2 f, over the draft vocabulary."""
        return self.markov_w2(feature)


def row_sigmoid(x_NR: Float[Tensor, "*N R"]) -> Float[Tensor, "*N R"]:
    """sigmoid(x), where nothing is trained bit for bit the same for a row whatever its neighbours.

    torch computes what is left over at the end of a tensor in another way than whole vectors.
    """
    rank = x_NR.shape[-1]
    if torch.is_inference_mode_enabled() and x_NR.numel() > rank and rank % LANES:
        return torch.cat([torch.sigmoid(row_1R) for row_1R in x_NR.reshape(-1, rank).split(1)]).view(x_NR.shape)
    return torch.sigmoid(x_NR)


class GatedHead(SequentialHead):
    """f = sigmoid(G [h; e] + b) * e."""

    def __init__(self, hidden_size: int, rank: int, vocab_size: int, draft_vocab_size: int) -> None:
        super().__init__(hidden_size, rank, vocab_size, draft_vocab_size)
        self.gate_proj = Linear(hidden_size + rank, rank)

    def step(self, e_BR: Tensor, hidden_BD: Tensor, state_BR: Tensor | None) -> tuple[Tensor, Tensor | None]:
        gate_BR = row_sigmoid(self.gate_proj(torch.cat([hidden_BD, e_BR], dim=-1)))
        return gate_BR * e_BR, state_BR


class RecurrentHead(SequentialHead):
    """[g; c; o] = J [s; e; h] + b; s' = sig(g) s + (1 - sig(g)) tanh(c); f = tanh(o), from the old state s.

    Ref: DSpark (arXiv:2607.05147), eq. 6, with W_g, W_c, W_o as one linear layer.
    """

    def __init__(self, hidden_size: int, rank: int, vocab_size: int, draft_vocab_size: int) -> None:
        super().__init__(hidden_size, rank, vocab_size, draft_vocab_size)
        self.joint_proj = Linear(2 * rank + hidden_size, 3 * rank)

    def initial_state(self) -> Tensor | None:
        return self.joint_proj.bias.new_zeros(1, self.rank)

    def step(self, e_BR: Tensor, hidden_BD: Tensor, state_BR: Tensor | None) -> tuple[Tensor, Tensor | None]:
        state_BR = torch.zeros_like(e_BR) if state_BR is None else state_BR
        joint_BX = self.joint_proj(torch.cat([state_BR, e_BR, hidden_BD], dim=-1))
        gate_BR, candidate_BR, output_BR = joint_BX.chunk(3, dim=-1)
        keep_BR = row_sigmoid(gate_BR)
        return torch.tanh(output_BR), keep_BR * state_BR + (1 - keep_BR) * torch.tanh(candidate_BR)

    def features(
        self, previous_ids_NG: Int[Tensor, "N G"], hidden_NGD: Float[Tensor, "N G D"]
    ) -> Float[Tensor, "N G R"]:
        e_NGR = self.embed(previous_ids_NG)
        state_NR, outputs = None, []
        for k in range(previous_ids_NG.shape[1]):
            output_NR, state_NR = self.step(e_NGR[:, k], hidden_NGD[:, k], state_NR)
            outputs.append(output_NR)
        return torch.stack(outputs, dim=1)


HEADS: dict[HeadType, type[SequentialHead]] = {"vanilla": SequentialHead, "gated": GatedHead, "rnn": RecurrentHead}


class ConfidenceHead(nn.Module):
    """Logit of c_k = sigmoid(w . [h_k; W1[x_{k-1}]] + b), the chance that slot k survives given all before it did.

    `rank` 0 leaves the previous token out. Ref: DSpark (arXiv:2607.05147), eq. 7.
    """

    def __init__(self, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.uses_previous = rank > 0
        self.proj = Linear(hidden_size + rank, 1)

    def forward(self, hidden: Float[Tensor, "*N D"], previous: Float[Tensor, "*N R"] | None) -> Float[Tensor, "*N"]:
        if self.uses_previous:
            if previous is None:
                raise ValueError("this confidence head reads the previous token's embedding, got none")
            hidden = torch.cat([hidden, previous], dim=-1)
        return self.proj(hidden).squeeze(-1)
