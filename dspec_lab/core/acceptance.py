"""Expected acceptance: 1 - TV, prefix survival, accepted length and the latency model of equation 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from dspec_lab.core.types import RoundRecord


def accept_rate(target_probs_NV: Float[Tensor, "N V"], draft_probs_NV: Float[Tensor, "N V"]) -> Float[Tensor, " N"]:
    """Chance that a token drawn from p_d is accepted: 1 - TV(p_d, p_t) = sum_x min(p_t(x), p_d(x)).

    Ref: Leviathan et al. 2023, Corollary 3.6.
    """
    return torch.minimum(target_probs_NV, draft_probs_NV).sum(-1)


def survival(conditional_BG: Float[Tensor, "B G"]) -> Float[Tensor, "B G"]:
    """Chance that drafts 1..k all survive, a_k = prod_{i<=k} c_i, from conditional chances c_k."""
    return conditional_BG.cumprod(-1)


def expected_accepted_length(conditional_BG: Float[Tensor, "B G"]) -> Float[Tensor, " B"]:
    """Tokens gained per round, the extra one included: tau = 1 + sum_k a_k."""
    return 1 + survival(conditional_BG).sum(-1)


def latency_per_token_s(draft_s: float, verify_s: float, accepted_length: float) -> float:
    """L = (T_draft + T_verify) / tau, seconds per generated token. Ref: DSpark (arXiv:2607.05147), eq. 1."""
    if accepted_length < 1:
        raise ValueError(f"accepted length counts the extra token, so it is at least 1; got {accepted_length}")
    return (draft_s + verify_s) / accepted_length


@dataclass(frozen=True, slots=True)
class AcceptanceStats:
    """Pooled counts over rounds. Position k divides by the rounds that proposed at least k tokens."""

    rounds: int
    num_committed: int
    num_accepted: int
    num_proposed: int
    verified_rows: int  # rows sent to the target: the anchor's and one per draft
    survived: tuple[int, ...]  # rounds in which drafts 1..k were all accepted
    proposed: tuple[int, ...]  # rounds that proposed at least k tokens
    reached: tuple[int, ...]  # of these, the rounds that accepted the first k - 1

    @property
    def accepted_length(self) -> float:
        """Tokens committed per round, the extra token included (tau)."""
        return self.num_committed / self.rounds if self.rounds else float("nan")

    @property
    def accept_rate(self) -> float:
        """Accepted drafts per proposed draft, in [0, 1]."""
        return self.num_accepted / self.num_proposed if self.num_proposed else float("nan")

    @property
    def verify_rate(self) -> float:
        """Committed tokens per verified row; the extra token counts on both sides."""
        return self.num_committed / self.verified_rows if self.verified_rows else float("nan")

    @property
    def survival_by_position(self) -> list[float]:
        """Share of rounds whose drafts 1..k were all accepted, among rounds that proposed k or more."""
        return [s / n for s, n in zip(self.survived, self.proposed, strict=True)]

    @property
    def accept_by_position(self) -> list[float]:
        """Conditional acceptance at k given that drafts 1..k-1 were accepted; NaN where that never happened."""
        return [s / n if n else float("nan") for s, n in zip(self.survived, self.reached, strict=True)]


def acceptance_stats(rounds: Sequence[RoundRecord]) -> AcceptanceStats:
    """Pool the counts of `rounds`, ragged widths included."""
    widest = max((record.gamma for record in rounds), default=0)
    return AcceptanceStats(
        rounds=len(rounds),
        num_committed=sum(record.num_committed for record in rounds),
        num_accepted=sum(record.num_accepted for record in rounds),
        num_proposed=sum(record.gamma for record in rounds),
        verified_rows=sum(r.gamma + 1 if r.verified_rows is None else r.verified_rows for r in rounds),
        survived=tuple(sum(r.num_accepted >= k for r in rounds) for k in range(1, widest + 1)),
        proposed=tuple(sum(r.gamma >= k for r in rounds) for k in range(1, widest + 1)),
        reached=tuple(sum(r.gamma >= k and r.num_accepted >= k - 1 for r in rounds) for k in range(1, widest + 1)),
    )
