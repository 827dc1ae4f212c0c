"""The multi-token-prediction drafter's model (DeepSeek MTP): one module, applied again for each further token."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dspec_lab.drafters.architecture import ChainArchitecture
from dspec_lab.drafters.chain_model import ChainDraftModel
from dspec_lab.drafters.layers import DraftLayer, Linear, RMSNorm


class MtpDraftModel(ChainDraftModel):
    """x = eh_proj [rms(h); rms(embedding)], then plain decoder layers; h is the target's last hidden state.

    The output after `norm` is what the shared head reads, and it takes the place of h in the next step: both are
    hidden states after a final norm, so one module serves all depths.

    Ref: DeepSeek-V3 (arXiv:2412.19437), eq. 21 to 23.
    """

    def __init__(self, arch: ChainArchitecture, *, own_embedding: bool = False, own_head: bool = False) -> None:
        if arch.kind != "mtp":
            raise ValueError(f"an MTP model cannot be built from an architecture of kind {arch.kind!r}")
        super().__init__(arch, own_embedding=own_embedding, own_head=own_head)
        width, eps = arch.spec.hidden_size, arch.spec.norm_eps
        self.hnorm = RMSNorm(arch.target_hidden_size, eps)
        self.enorm = RMSNorm(width, eps)
        self.eh_proj = Linear(arch.target_hidden_size + width, width, bias=False)
        self.layers = nn.ModuleList(DraftLayer(arch.spec) for _ in range(arch.spec.num_layers))

    def from_features(self, features: Float[Tensor, "*N F"]) -> Float[Tensor, "*N D"]:
        if features.shape[-1] != self.arch.feature_width:
            raise ValueError(f"last hidden states are {features.shape[-1]} wide, need {self.arch.feature_width}")
        return features.to(self.activation_dtype)

    def enter(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        return self.eh_proj(torch.cat([self.hnorm(hidden), self.enorm(embedded)], dim=-1))

    def attention_input(self, layer: DraftLayer, x: Tensor, embedded: Tensor) -> Tensor:
        return layer.input_layernorm(x)

    def leave(self, x: Tensor) -> Tensor:
        return self.norm(x)

    def before_head(self, hidden: Float[Tensor, "*N D"]) -> Float[Tensor, "*N D"]:
        return hidden
