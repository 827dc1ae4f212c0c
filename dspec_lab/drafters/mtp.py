"""The multi-token-prediction drafter. MTP-1, the production baseline, is gamma = 1."""

from __future__ import annotations

from dspec_lab.drafters.chain import ChainDrafter
from dspec_lab.drafters.mtp_model import MtpDraftModel
from dspec_lab.models.protocol import Taps


class MtpDrafter(ChainDrafter):
    """Reads the target's last hidden state; one module is applied again for each further token.

    Ref: DeepSeek-V3 (arXiv:2412.19437), section 2.2.
    """

    def __init__(self, model: MtpDraftModel, *, name: str = "mtp") -> None:
        super().__init__(model, name=name, taps=Taps(last_hidden=True))
