"""The DFlash drafter: DSpark's block pass alone, every slot chosen without regard to the one before it."""

from __future__ import annotations

from dspec_lab.drafters.backbone import BlockDraftModel
from dspec_lab.drafters.dspark import DSparkDrafter


class DFlashDrafter(DSparkDrafter):
    """A block drafter of Markov rank 0. It has no checkpoint name of its own in the DeepSpec layout."""

    def __init__(self, model: BlockDraftModel, *, name: str = "dflash") -> None:
        if model.arch.markov_rank:
            raise ValueError(f"DFlash has no sequential head; this model has one of rank {model.arch.markov_rank}")
        super().__init__(model, name=name)
