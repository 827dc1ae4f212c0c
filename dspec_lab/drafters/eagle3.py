"""The EAGLE-3 drafter: fused target features, then a chain on its own hidden states."""

from __future__ import annotations

from dspec_lab.drafters.chain import ChainDrafter
from dspec_lab.drafters.eagle3_model import Eagle3DraftModel
from dspec_lab.models.protocol import Taps


class Eagle3Drafter(ChainDrafter):
    """Ref: EAGLE-3 (arXiv:2503.01840), chain drafting."""

    def __init__(self, model: Eagle3DraftModel, *, name: str = "eagle3") -> None:
        super().__init__(model, name=name, taps=Taps(layers=model.arch.target_layer_ids))
