"""The EAGLE-3 drafter's model: fused target features and the next token's embedding feed one decoder layer."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dspec_lab.drafters.architecture import ChainArchitecture
from dspec_lab.drafters.chain_model import ChainDraftModel
from dspec_lab.drafters.layers import DraftLayer, Linear, RMSNorm


class Eagle3Layer(DraftLayer):
    """A decoder layer whose attention reads [rms(embedding); rms(hidden)], twice the width."""

    def __init__(self, arch: ChainArchitecture) -> None:
        super().__init__(arch.spec, attention_input=2 * arch.spec.hidden_size)
        self.hidden_norm = RMSNorm(arch.spec.hidden_size, arch.spec.norm_eps)


class Eagle3DraftModel(ChainDraftModel):
    """y = fc(features); the recurrent hidden state is y before the final norm.

    Ref: EAGLE-3 (arXiv:2503.01840), section 3.
    """

    def __init__(self, arch: ChainArchitecture, *, own_embedding: bool = False, own_head: bool = False) -> None:
        if arch.kind != "eagle3":
            raise ValueError(f"an EAGLE-3 model cannot be built from an architecture of kind {arch.kind!r}")
        super().__init__(arch, own_embedding=own_embedding, own_head=own_head)
        self.fc = Linear(arch.feature_width, arch.spec.hidden_size, bias=False)
        self.layers = nn.ModuleList(Eagle3Layer(arch) for _ in range(arch.spec.num_layers))

    def from_features(self, features: Float[Tensor, "*N F"]) -> Float[Tensor, "*N D"]:
        if features.shape[-1] != self.arch.feature_width:
            raise ValueError(
                f"target features are {features.shape[-1]} wide, layers {list(self.arch.target_layer_ids)} need "
                f"{self.arch.feature_width}"
            )
        return self.fc(features.to(self.activation_dtype))

    def enter(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        return hidden

    def attention_input(self, layer: DraftLayer, x: Tensor, embedded: Tensor) -> Tensor:
        return torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(x)], dim=-1)

    def leave(self, x: Tensor) -> Tensor:
        return x

    def before_head(self, hidden: Float[Tensor, "*N D"]) -> Float[Tensor, "*N D"]:
        return self.norm(hidden)
