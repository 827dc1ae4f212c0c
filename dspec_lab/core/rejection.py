"""The verifier's laws: accept a prefix of the draft, then draw the replacement or bonus token.

Two rules with the same output law: token-wise (Leviathan et al. 2023) and block verification (Sun et al. 2024), which
accepts at least as many tokens in expectation. All probabilities are those after the sampling filters.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspec_lab.config import SamplingConfig, Verification
from dspec_lab.core.sampling import greedy_ids, law
from dspec_lab.core.streams import Chooser
from dspec_lab.core.types import Proposal, Verdict

# guards the division by a p_d that rounded to 0; no token that was sampled has so little
DRAFT_FLOOR = 1e-20

# a residual with no more mass than this is rounding noise: p and q agree, so p itself is drawn from
RESIDUAL_FLOOR = 1e-8


def accept_probs(
    target_probs_BGV: Float[Tensor, "B G V"],
    draft_probs_BGV: Float[Tensor, "B G V"],
    draft_ids_BG: Int[Tensor, "B G"],
) -> Float[Tensor, "B G"]:
    """Chance that each drafted token survives on its own, min(1, p_t / p_d).

    Ref: Leviathan et al. 2023 (arXiv:2211.17192), Algorithm 1; p is the target there.
    """
    index_BG1 = draft_ids_BG.unsqueeze(-1)
    p_t_BG = target_probs_BGV.gather(-1, index_BG1).squeeze(-1)
    p_d_BG = draft_probs_BGV.gather(-1, index_BG1).squeeze(-1)
    # a floor that real probabilities can reach would bias the law: the tail of a large vocabulary lies below 1e-8
    return (p_t_BG / p_d_BG.clamp_min(DRAFT_FLOOR)).clamp_max(1.0)


def residual_probs(target_NV: Float[Tensor, "N V"], draft_NV: Float[Tensor, "N V"]) -> Float[Tensor, "N V"]:
    """Law of the replacement token, max(p_t - p_d, 0) normalised; p_t where nothing is left of it.

    Ref: Leviathan et al. 2023, Algorithm 1 (p' = norm(max(0, p - q))).
    """
    left_NV = (target_NV - draft_NV).clamp_min(0)
    mass_N1 = left_NV.sum(-1, keepdim=True)
    return torch.where(mass_N1 > RESIDUAL_FLOOR, left_NV / mass_N1.clamp_min(RESIDUAL_FLOOR), target_NV)


def accept_chance(p_t: float, p_d: float) -> float:
    """`accept_probs` of one token, from its two probabilities."""
    return min(1.0, p_t / max(p_d, DRAFT_FLOOR))


def residual_weights(target_V: Float[Tensor, " V"], draft_V: Float[Tensor, " V"]) -> Float[Tensor, " V"]:
    """One row of `residual_probs`, not normalised: a draw needs no more."""
    left_V = (target_V - draft_V).clamp_min_(0)
    return left_V if float(left_V.sum()) > RESIDUAL_FLOOR else target_V


class LazyLaw:
    """Rows of the target's law, made when asked for: most rounds need only the rows up to the first rejection."""

    def __init__(self, logits_JV: Float[Tensor, "J V"], sampling: SamplingConfig) -> None:
        self._logits_JV, self._sampling = logits_JV, sampling
        self.shape = logits_JV.shape

    def __getitem__(self, row: int) -> Float[Tensor, " V"]:
        return law(self._logits_JV[row : row + 1], self._sampling, what=f"target (draft position {row})")[0]

    def dense(self) -> Float[Tensor, "J V"]:
        """All rows."""
        return law(self._logits_JV, self._sampling)


TargetRowsLaw = Float[Tensor, "J V"] | LazyLaw


def verify(
    target_probs_JV: TargetRowsLaw,
    proposal: Proposal,
    chooser: Chooser,
    round_index: int,
    rule: Verification = "token",
) -> Verdict:
    """Accept a prefix of `proposal` and draw the extra token; row j of `target_probs_JV` is the law after j drafts.

    Raises `ValueError` when the rows do not fit the proposal or a drafted id lies outside the vocabulary.
    """
    gamma, vocab = proposal.gamma, target_probs_JV.shape[-1]
    if target_probs_JV.shape[0] != gamma + 1:
        raise ValueError(f"{gamma} drafted tokens need {gamma + 1} target rows, got {target_probs_JV.shape[0]}")
    if gamma and max(proposal.token_ids) >= vocab:
        raise ValueError(f"a proposal holds the token id {max(proposal.token_ids)}; the vocabulary ends at {vocab - 1}")
    if rule == "token":
        return _verify_tokens(target_probs_JV, proposal, chooser, round_index)
    if rule == "block":
        if isinstance(target_probs_JV, LazyLaw):
            target_probs_JV = target_probs_JV.dense()
        return _verify_block(target_probs_JV, proposal, chooser, round_index)
    raise ValueError(f"verification rule must be 'token' or 'block', got {rule!r}")


def verify_greedy(logits_JV: Float[Tensor, "J V"], proposal: Proposal) -> Verdict:
    """`verify` at temperature 0, where p is one-hot: keep the drafts that equal the target's own choice.

    Row j of the logits is the target's after j drafts; rows behind the first difference are not looked at.
    """
    if logits_JV.shape[0] != proposal.gamma + 1:
        raise ValueError(f"{proposal.gamma} drafts need {proposal.gamma + 1} target rows, got {logits_JV.shape[0]}")
    if proposal.gamma == 0:
        return Verdict(num_accepted=0, next_token=greedy_ids(logits_JV, what="target (draft position 0)")[0])
    for k in range(proposal.gamma + 1):
        choice = greedy_ids(logits_JV[k : k + 1], what=f"target (draft position {k})")[0]
        if k == proposal.gamma or choice != proposal.token_ids[k]:
            break
    return Verdict(num_accepted=k, next_token=choice)


def draft_rows(proposal: Proposal, like_GV: Tensor) -> Tensor:
    """The proposal's q [G, V]: its own rows, or one-hot rows for a `one_hot` proposal."""
    if proposal.draft_probs_GV is not None:
        return proposal.draft_probs_GV.to(device=like_GV.device, dtype=like_GV.dtype)
    rows_GV = torch.zeros_like(like_GV)
    ids_G1 = torch.tensor(proposal.token_ids, device=like_GV.device, dtype=torch.long).unsqueeze(-1)
    return rows_GV.scatter_(-1, ids_G1, 1.0)


def _verify_tokens(target_probs_JV: TargetRowsLaw, proposal: Proposal, chooser: Chooser, round_index: int) -> Verdict:
    # rows are asked for one by one: those behind the first rejection are never made
    for k, token in enumerate(proposal.token_ids):
        target_V = target_probs_JV[k]
        p_t = float(target_V[token])
        if proposal.draft_probs_GV is None:
            accept = p_t
        else:
            accept = accept_chance(p_t, float(proposal.draft_probs_GV[k, token]))
        if not chooser.bernoulli("accept", round_index, k, accept):
            if proposal.draft_probs_GV is None:
                # the residual of a one-hot q is p without the token; a draw needs no normalising
                residual_V = target_V.clone()
                residual_V[token] = 0.0
                if not float(residual_V.amax()) > 0:
                    residual_V = target_V
            else:
                residual_V = residual_weights(target_V, proposal.draft_probs_GV[k].to(target_V))
            return Verdict(k, chooser.categorical("replacement", round_index, 0, residual_V))
    return Verdict(proposal.gamma, chooser.categorical("bonus", round_index, 0, target_probs_JV[proposal.gamma]))


def block_accept_probs(
    target_probs_JV: Float[Tensor, "J V"], draft_GV: Float[Tensor, "G V"], token_ids: tuple[int, ...]
) -> tuple[list[float], list[float]]:
    """(h, w) of block verification: h_i, the chance that prefix i passes its own test, and the running weights w_i.

    w_0 = 1, w_i = min(1, w_{i-1} p_t(x_i) / p_d(x_i));
    h_i = s_i / (s_i + 1 - w_i), s_i = sum_x max(w_i p_t(x | x_{1..i}) - p_d(x | x_{1..i}), 0) for i < gamma;
    h_gamma = w_gamma.
    The longest prefix that passes is kept. h[i - 1] is h_i; w[i] is w_i.

    Ref: Sun et al. 2024 (arXiv:2403.10444), Algorithm 2.
    """
    gamma = len(token_ids)
    target_JV, draft_GV = target_probs_JV.double(), draft_GV.double()
    weight = [1.0]
    for i, token in enumerate(token_ids):
        ratio = float(target_JV[i, token]) / max(float(draft_GV[i, token]), DRAFT_FLOOR)
        weight.append(min(1.0, weight[-1] * ratio))
    pass_prob = []
    for i in range(1, gamma + 1):
        if i == gamma:
            pass_prob.append(weight[gamma])
            continue
        surplus = float((weight[i] * target_JV[i] - draft_GV[i]).clamp_min(0).sum())
        # 1 - w first: added to a small surplus it would round the chance above 1
        below = surplus + (1.0 - weight[i])
        # 0 / 0: the laws agree and nothing was lost so far, so a longer prefix always passes
        pass_prob.append(surplus / below if below > 0 else 0.0)
    return pass_prob, weight


def _verify_block(target_probs_JV: Tensor, proposal: Proposal, chooser: Chooser, round_index: int) -> Verdict:
    gamma = proposal.gamma
    if gamma == 0:
        return Verdict(0, chooser.categorical("bonus", round_index, 0, target_probs_JV[0]))
    draft_GV = draft_rows(proposal, target_probs_JV[:gamma])
    pass_prob, weight = block_accept_probs(target_probs_JV, draft_GV, proposal.token_ids)
    kept = 0
    for i in range(gamma, 0, -1):
        # the longest prefix that passes wins, so the shorter ones need no draw once one has
        if chooser.bernoulli("accept", round_index, i - 1, pass_prob[i - 1]):
            kept = i
            break
    if kept == gamma:
        return Verdict(gamma, chooser.categorical("bonus", round_index, 0, target_probs_JV[gamma]))
    target_V, draft_V = target_probs_JV[kept].double(), draft_GV[kept].double()
    left_V = (weight[kept] * target_V - draft_V).clamp_min(0)
    if float(left_V.sum()) <= RESIDUAL_FLOOR:
        left_V = target_V
    return Verdict(kept, chooser.categorical("replacement", round_index, 0, left_V))
