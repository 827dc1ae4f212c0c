"""The Medusa drafter's model: independent heads on the target's last hidden state.

Each head is one residual block; the output matrix is the target's own (the published heads carry one each, which
would be most of the weights). Heads start as the identity.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from dspec_lab.drafters.architecture import MedusaArchitecture
from dspec_lab.drafters.layers import Linear
from dspec_lab.drafters.vocabulary import DraftModel


class MedusaBlock(nn.Module):
    """x + silu(W x + b)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class MedusaDraftModel(DraftModel):
    """Head k (from 0) on the hidden state of token i proposes token i + 2 + k; the target's own head has i + 1.

    Ref: Medusa (arXiv:2401.10774), section 3.1, chain form.
    """

    def __init__(self, arch: MedusaArchitecture, *, own_embedding: bool = False, own_head: bool = False) -> None:
        if own_embedding:
            raise ValueError("a Medusa drafter reads no embeddings, so it cannot own a table")
        super().__init__(arch.spec, arch.draft_vocab_size, own_head=own_head)
        self.arch = arch
        self.medusa_heads = nn.ModuleList(MedusaBlock(arch.spec.hidden_size) for _ in range(arch.medusa_num_heads))

    @property
    def activation_dtype(self) -> torch.dtype:
        return self.medusa_heads[0].linear.bias.dtype

    def hidden(self, last_hidden: Float[Tensor, "*N D"], num_heads: int | None = None) -> Float[Tensor, "*N G D"]:
        """Outputs of the first `num_heads` heads (default all), to be read by `head_logits`."""
        last_hidden = last_hidden.to(self.activation_dtype)
        heads = list(self.medusa_heads)[:num_heads]
        return torch.stack([head(last_hidden) for head in heads], dim=-2)
