"""What block verification gains over token-wise verification, exactly, where both laws are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dspec_lab.config import SamplingConfig
from dspec_lab.models.toy import TableTarget
from dspec_lab.verifier.known_law import filtered


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleGain:
    """Tokens that a round commits in expectation, the extra one included (tau), under each rule."""

    token: float
    block: float
    bound: float  # no lossless rule that keeps a prefix of the same draft commits more

    @property
    def share(self) -> float:
        """What block verification adds to the token-wise accepted length, as a share of it."""
        return self.block / self.token - 1


def rule_gain(
    target: TableTarget, draft: TableTarget, context: Sequence[int], gamma: int, sampling: SamplingConfig
) -> RuleGain:
    """Expected tokens of the round after `context`, by the sum over all drafts x_1..gamma that `draft` can sample.

    With r_i = p_t(x_i) / p_d(x_i) at each position, drafts 1..k all survive with chance prod min(1, r_i) token-wise
    and w_k by blocks, w_0 = 1, w_i = min(1, w_{i-1} r_i); a text can be kept no more often than the target writes it,
    so no rule does better than min(1, prod r_i). tau = 1 + sum over k of that chance's mean over the draft's law.
    Needs a temperature above 0: a greedy draft is one-hot, and the rules are the same.

    Ref: Leviathan et al. 2023 (arXiv:2211.17192); Sun et al. 2024 (arXiv:2403.10444), Theorem 1 and section 4.
    """
    if gamma < 1:
        raise ValueError(f"gamma must be at least 1, got {gamma}")
    if sampling.greedy:
        raise ValueError(f"the rules differ only for sampled drafts, got temperature {sampling.temperature}")
    if target.vocab_size != draft.vocab_size:
        raise ValueError(f"the tables have {target.vocab_size} and {draft.vocab_size} tokens; they must share them")
    sums = {"token": 1.0, "block": 1.0, "bound": 1.0}

    def walk(text: list[int], depth: int, chance: float, token: float, block: float, ratio: float) -> None:
        p_t, p_d = (filtered(table.law_after(text).tolist(), sampling) for table in (target, draft))
        for x, p in enumerate(p_d):
            if not p > 0:
                continue
            r = p_t[x] / p
            here = (chance * p, token * min(1.0, r), min(1.0, block * r), ratio * r)
            sums["token"] += here[0] * here[1]
            sums["block"] += here[0] * here[2]
            sums["bound"] += here[0] * min(1.0, here[3])
            if depth < gamma:
                walk([*text, x], depth + 1, *here)

    walk(list(context), 1, 1.0, 1.0, 1.0, 1.0)
    return RuleGain(**sums)
