"""What training needs of the target: hidden states of a known text, and the normaliser of each of its laws."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from dspec_lab.models.decoder import LeanDecoder
from dspec_lab.models.protocol import Taps

# ids of the target's most likely next tokens that are kept for each position
NUM_TOP = 8
# columns of the vocabulary whose logits are alive at once
HEAD_COLUMNS = 4096


@dataclass(frozen=True, slots=True)
class SequenceFeatures:
    """The target's view of one sequence. Hidden states are rounded to bf16; no logits are kept.

    `lse_T` is computed from the rounded last hidden state, so that laws made from both sum to 1.
    """

    tapped_TF: Tensor | None  # bf16
    last_TD: Tensor  # bf16, after the final norm
    lse_T: Tensor  # fp32; 0 where `first_law` has not been reached
    top_TX: Tensor  # int32 ids, most likely first; -1 there


class TargetReader:
    """Reads sequences one at a time, so that what it gives does not depend on what else is in a batch."""

    def __init__(self, target: LeanDecoder, layers: Sequence[int]) -> None:
        self.target = target
        self.taps = Taps(layers=tuple(layers), last_hidden=True)
        self.taps.check(target.num_layers)

    @property
    def tapped_width(self) -> int:
        """Width of the concatenated tapped layers."""
        return len(self.taps.layers) * self.target.hidden_size

    def bytes_per_token(self) -> int:
        """Memory of one token's features."""
        return 2 * (self.tapped_width + self.target.hidden_size) + 4 + 4 * NUM_TOP

    def flops(self, num_tokens: int, num_laws: int) -> float:
        """Multiplications and additions of reading: matrix products of all layers, and of the head for the laws."""
        layer = self.target.weights.layers[0]
        weights = sum(matrix.numel() for matrix in (layer.qkv, layer.out, layer.gate_up, layer.down))
        return 2.0 * (num_tokens * weights * self.target.num_layers + num_laws * self.target.head().numel())

    @torch.no_grad()
    def read(self, token_ids: Sequence[int], first_law: int) -> SequenceFeatures:
        """Features of a sequence; the laws after tokens from `first_law` on get their normaliser."""
        session = self.target.session(capacity=len(token_ids), taps=self.taps)
        rows = session.extend(token_ids, logit_rows=0)
        last_TD = rows.last_ND().to(torch.bfloat16)
        lse_T = torch.zeros(len(token_ids), device=last_TD.device)
        top_TX = torch.full((len(token_ids), NUM_TOP), -1, dtype=torch.int32, device=last_TD.device)
        lse_T[first_law:], top_TX[first_law:] = self._laws(last_TD[first_law:].float())
        tapped_TF = rows.tapped_NF().to(torch.bfloat16) if self.taps.layers else None
        return SequenceFeatures(tapped_TF, last_TD, lse_T, top_TX)

    def _laws(self, hidden_ND: Float[Tensor, "N D"]) -> tuple[Tensor, Tensor]:
        """(log-sum-exp, most likely ids) of the whole logits, a slice of the vocabulary at a time."""
        head_VD, cap = self.target.head(), self.target.spec.logit_softcap
        best, ids, norms = [], [], []
        for start in range(0, head_VD.shape[0], HEAD_COLUMNS):
            slice_XD = head_VD[start : start + HEAD_COLUMNS]
            if self.target.ops.name == "native":
                logits_NX = self.target.ops.linear(hidden_ND, slice_XD)
            else:
                logits_NX = torch.nn.functional.linear(hidden_ND, slice_XD.to(hidden_ND.dtype))
            if cap is not None:
                logits_NX = torch.tanh(logits_NX / cap) * cap
            top_N, index_N = logits_NX.topk(min(NUM_TOP, logits_NX.shape[-1]), dim=-1)
            best.append(top_N)
            ids.append(index_N + start)
            norms.append(top_N[:, 0].double() + logits_NX.sub_(top_N[:, :1]).exp_().sum(-1).double().log())
        order_NX = torch.cat(best, dim=-1).topk(NUM_TOP, dim=-1).indices
        return torch.stack(norms).logsumexp(0).float(), torch.cat(ids, dim=-1).gather(-1, order_NX).int()


def fingerprint(target: LeanDecoder) -> str:
    """A short name of the target's weights, from a few rows of every matrix."""
    digest = hashlib.blake2b(digest_size=8)
    weights = target.weights
    matrices = [weights.embedding, weights.head]
    matrices += [m for layer in weights.layers for m in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    for matrix in matrices:
        rows = matrix[:: max(matrix.shape[0] // 8, 1)]
        digest.update(rows.to(device="cpu", dtype=torch.float32).contiguous().numpy().tobytes())
    digest.update(weights.norm.to("cpu").numpy().tobytes())
    return digest.hexdigest()
