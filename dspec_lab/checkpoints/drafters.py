"""From a checkpoint folder to a drafter that the decoding loop can use."""

from __future__ import annotations

from pathlib import Path

import torch

from dspec_lab.checkpoints.layout import load_drafter
from dspec_lab.drafters.backbone import BlockDraftModel
from dspec_lab.drafters.dflash import DFlashDrafter
from dspec_lab.drafters.dspark import DSparkDrafter
from dspec_lab.drafters.eagle3 import Eagle3Drafter
from dspec_lab.drafters.eagle3_model import Eagle3DraftModel
from dspec_lab.drafters.fit import check_target
from dspec_lab.drafters.medusa import MedusaDrafter
from dspec_lab.drafters.medusa_model import MedusaDraftModel
from dspec_lab.drafters.mtp import MtpDrafter
from dspec_lab.drafters.mtp_model import MtpDraftModel
from dspec_lab.drafters.protocol import Drafter
from dspec_lab.drafters.vocabulary import DraftModel
from dspec_lab.models.protocol import Target


def open_drafter(
    folder: Path | str, target: Target, *, dtype: torch.dtype | None = None, name: str | None = None
) -> Drafter:
    """The drafter of a checkpoint, on the target's device and checked against its sizes.

    `dtype` is that of the matrices, by default the target's. A block drafter of Markov rank 0 is DFlash.
    """
    loaded = load_drafter(folder, target, dtype=dtype or target.dtype, device=target.device)
    drafter = as_drafter(loaded.model, name=name)
    check_target(loaded.model.arch, target, drafter.name)
    return drafter


def as_drafter(model: DraftModel, *, name: str | None = None) -> Drafter:
    """The drafter around a model, by the model's kind."""
    named = {} if name is None else {"name": name}
    if isinstance(model, BlockDraftModel):
        block = DSparkDrafter if model.arch.markov_rank else DFlashDrafter
        return block(model, **named)
    if isinstance(model, Eagle3DraftModel):
        return Eagle3Drafter(model, **named)
    if isinstance(model, MtpDraftModel):
        return MtpDrafter(model, **named)
    if isinstance(model, MedusaDraftModel):
        return MedusaDrafter(model, **named)
    raise TypeError(f"{type(model).__name__} is no drafter's model")
