"""What earlier rounds tell about the coming one: acceptance by position, and by how much confidences were off.

One implementation for the real batch and for the simulator: everything works on rows, one a request. Fed after a round
is settled and asked before the next is drafted, it depends on earlier rounds alone, so decisions on it stay lossless.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Integer

OWN_WEIGHT = 6.0  # rounds of all requests' average that a request's own counts are mixed with
# and rounds, of `PRIOR` or of the position before, that the average starts from: with few, one hard text at the start
# lets a gate rest that should not, and at rest it learns slowly
PRIOR_ROUNDS = 16.0
# little better than even: where drafting hardly pays a batch that begins with whole blocks loses many rounds' gain
PRIOR = 0.55
DECAY = 0.95  # of a request's own counts, per drafted round: texts change
STEP_ALL, STEP_OWN = 0.03, 0.2  # logits by which one wrong verdict moves the shift of all requests, and a request's own
MOST_SHIFT = 3.0
# rounds after which what they taught is taken in, while the same requests take part: looking takes longer than deciding
HOLD = 4
CERTAIN = 1e-4  # confidences are kept this far from 0 and 1 before their logit is taken
# so many requests are worked on number by number: a numpy call takes longer than a request's few numbers
FEW = 4


@dataclass(frozen=True, slots=True)
class Standing:
    """What is kept of requests, one row each; `settle` changes it in place."""

    counts_B2G: Float[np.ndarray, "B 2 G"]  # rounds that reached a position, and those that kept it
    shift_B: Float[np.ndarray, " B"]  # logits

    @classmethod
    def new(cls, requests: int, gamma: int) -> Standing:
        """Of requests without a round."""
        return cls(np.zeros((requests, 2, gamma)), np.zeros(requests))

    def rows(self, at: Integer[np.ndarray, " B"]) -> Standing:
        """A copy of some rows."""
        return Standing(self.counts_B2G[at], self.shift_B[at])

    def put(self, at: Integer[np.ndarray, " B"], rows: Standing) -> None:
        """Write `rows` back."""
        self.counts_B2G[at], self.shift_B[at] = rows.counts_B2G, rows.shift_B


def recalled(old_BG: Float[np.ndarray, "B G"], expected_BG: Float[np.ndarray, "B G"]) -> Float[np.ndarray, "B G"]:
    """Survival of a round ago, for a capacity now: B parts of it and one of what the history expects, both [B, G].

    The chances of many requests stay spread as they were. Those of one request say little of its next rounds.
    """
    share = len(old_BG) / (len(old_BG) + 1)
    return share * old_BG + (1 - share) * expected_BG


class AcceptanceHistory:
    """Conditional acceptance by position over all requests, and how a request's own rounds differ from it.

    Position k counts a round only where drafts 1..k-1 were accepted. A draft that was not verified counts by its
    corrected confidence, as far as there is one: else low chances, which policies cut, would be missing from the mean.
    """

    def __init__(self, gamma: int) -> None:
        if gamma < 1:
            raise ValueError(f"gamma must be at least 1, got {gamma}")
        self.gamma = gamma
        self._all_2G = np.zeros((2, gamma))
        self._shift_G = np.zeros(gamma)

    def average(self) -> Float[np.ndarray, " G"]:
        """Conditional acceptance over all requests so far, each position's drawn towards that of the one before it.

        The first is drawn towards `PRIOR`. So a position that was never reached goes as the last that was: a gate that
        has seen short drafts alone still learns whether longer ones would pay.
        """
        found_G, before = [], PRIOR
        for reached, kept in self._all_2G.T.tolist():
            before = (kept + PRIOR_ROUNDS * before) / (reached + PRIOR_ROUNDS)
            found_G.append(before)
        return np.array(found_G)

    def chances(self, standing: Standing) -> Float[np.ndarray, "B G"]:
        """Expected conditional acceptance of each request's next drafts."""
        reached_BG, kept_BG = standing.counts_B2G[:, 0], standing.counts_B2G[:, 1]
        return (kept_BG + OWN_WEIGHT * self.average()) / (reached_BG + OWN_WEIGHT)

    def corrected(self, confidence_BG: Float[np.ndarray, "B G"], standing: Standing) -> Float[np.ndarray, "B G"]:
        """Confidences shifted by what earlier verdicts said of them, by position and by request.

        Each is a function of the raw one alone and of earlier rounds, so it knows nothing that the raw one does not.
        """
        if len(confidence_BG) <= FEW:
            rows = zip(confidence_BG.tolist(), standing.shift_B.tolist(), strict=True)
            return np.array([self.corrected_row(row, own) for row, own in rows]).reshape(confidence_BG.shape)
        sure_BG = np.clip(confidence_BG, CERTAIN, 1 - CERTAIN)
        logit_BG = np.log(sure_BG / (1 - sure_BG)) + self._shift_G[: sure_BG.shape[1]] + standing.shift_B[:, None]
        shifted_BG = 1 / (1 + np.exp(-logit_BG))
        # where nothing was learned the confidences stay as they are, 0 and 1 included
        moved_BG = (self._shift_G[: sure_BG.shape[1]] + standing.shift_B[:, None]) != 0
        return np.where(moved_BG, shifted_BG, confidence_BG)

    def corrected_row(self, confidence_G: Sequence[float], own: float) -> list[float]:
        """`corrected` of one request, whose own shift is `own`."""
        return [_shifted(value, mine + own) for value, mine in zip(confidence_G, self._shift_G.tolist(), strict=False)]

    def settle(
        self,
        standing: Standing,
        lens_B: Integer[np.ndarray, " B"],
        verified_B: Integer[np.ndarray, " B"],
        accepted_B: Integer[np.ndarray, " B"],
        chance_BG: Float[np.ndarray, "B G"] | None = None,
    ) -> None:
        """One settled round: so many drafts made, verified and accepted; `chance_BG` as `corrected` gave them."""
        few = len(lens_B) <= FEW
        if few:
            rounds = list(zip(lens_B.tolist(), verified_B.tolist(), accepted_B.tolist(), strict=True))
            sensible = all(0 <= accepted <= verified <= lens <= self.gamma for lens, verified, accepted in rounds)
        else:
            bad_B = (accepted_B > verified_B) | (verified_B > lens_B) | (lens_B > self.gamma) | (accepted_B < 0)
            sensible = not bad_B.any()
        if not sensible:
            raise ValueError(
                f"{accepted_B.tolist()} of {verified_B.tolist()} verified and {lens_B.tolist()} drafted were accepted, "
                f"gamma is {self.gamma}"
            )
        if few:
            self._settle_few(standing, rounds, chance_BG)
            return
        at_G = np.arange(self.gamma)
        judged_BG = at_G < np.minimum(verified_B, accepted_B + 1)[:, None]
        kept_BG = at_G < accepted_B[:, None]
        reached_BG, gained_BG = judged_BG.astype(float), kept_BG.astype(float)
        if chance_BG is not None:
            wrong_BG = np.where(judged_BG, kept_BG - chance_BG, 0.0)
            self._shift_G = np.clip(self._shift_G + STEP_ALL * wrong_BG.sum(0), -MOST_SHIFT, MOST_SHIFT)
            standing.shift_B[:] = np.clip(standing.shift_B + STEP_OWN * wrong_BG.sum(1), -MOST_SHIFT, MOST_SHIFT)
            # behind the last verified draft, if it was accepted: what the confidences say would have come
            open_BG = (at_G >= verified_B[:, None]) & (at_G < lens_B[:, None]) & (accepted_B == verified_B)[:, None]
            onward_BG = np.where(open_BG, chance_BG, 1.0).cumprod(1)
            before_BG = np.concatenate([np.ones((len(lens_B), 1)), onward_BG[:, :-1]], 1)
            reached_BG += np.where(open_BG, before_BG, 0.0)
            gained_BG += np.where(open_BG, onward_BG, 0.0)
        self._all_2G += np.stack([reached_BG.sum(0), gained_BG.sum(0)])
        drafted_B11 = (lens_B > 0)[:, None, None]
        standing.counts_B2G[:] = np.where(
            drafted_B11, DECAY * standing.counts_B2G + np.stack([reached_BG, gained_BG], 1), standing.counts_B2G
        )

    def _settle_few(
        self,
        standing: Standing,
        rounds: list[tuple[int, int, int]],
        chance_BG: Float[np.ndarray, "B G"] | None,
    ) -> None:
        """`settle`, number by number."""
        (all_reached_G, all_kept_G), moved_G = self._all_2G.tolist(), [0.0] * self.gamma
        for b, (lens, verified, accepted) in enumerate(rounds):
            reached_G, kept_G = [0.0] * self.gamma, [0.0] * self.gamma
            for k in range(accepted):
                reached_G[k] = kept_G[k] = 1.0
            if accepted < verified:
                reached_G[accepted] = 1.0
            if chance_BG is not None:
                chance_G = chance_BG[b].tolist()
                wrong = 0.0
                for k in range(min(verified, accepted + 1)):
                    off = kept_G[k] - chance_G[k]
                    moved_G[k] += off
                    wrong += off
                shift = float(standing.shift_B[b]) + STEP_OWN * wrong
                standing.shift_B[b] = min(max(shift, -MOST_SHIFT), MOST_SHIFT)
                if accepted == verified:
                    onward = 1.0
                    for k in range(verified, lens):
                        reached_G[k] = onward
                        onward *= chance_G[k]
                        kept_G[k] = onward
            all_reached_G = [a + b for a, b in zip(all_reached_G, reached_G, strict=True)]
            all_kept_G = [a + b for a, b in zip(all_kept_G, kept_G, strict=True)]
            if lens:
                own_2G = standing.counts_B2G[b].tolist()
                standing.counts_B2G[b] = [
                    [DECAY * old + new for old, new in zip(*pair, strict=True)]
                    for pair in zip(own_2G, (reached_G, kept_G), strict=True)
                ]
        self._all_2G = np.array([all_reached_G, all_kept_G])
        if chance_BG is not None:
            shift_G = [s + STEP_ALL * m for s, m in zip(self._shift_G.tolist(), moved_G, strict=True)]
            self._shift_G = np.array([min(max(s, -MOST_SHIFT), MOST_SHIFT) for s in shift_G])


def _shifted(chance: float, shift: float) -> float:
    """`chance` with its logit moved by `shift`; as it is where nothing was learned."""
    if shift == 0:
        return chance
    sure = min(max(chance, CERTAIN), 1 - CERTAIN)
    return 1 / (1 + math.exp(-(math.log(sure / (1 - sure)) + shift)))
