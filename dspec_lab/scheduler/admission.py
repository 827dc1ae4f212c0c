"""Which drafts are worth verifying: searches over the survival chances of all requests' drafts, in numpy.

Everything here works on `survival_BG`, a_{r,j} = prod_{i<=j} c_{r,i}, which never increases along a request, and on
`lens_B`, how many drafts each request has; entries behind are not looked at. Comparisons are in fp32, as in
`kernels.admission`. O(N log N) for N drafts, no Python loop over them.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Integer

ABSENT = -1.0  # sorts behind every chance


def present(survival_BG: Float[np.ndarray, "B G"], lens_B: Integer[np.ndarray, " B"]) -> Float[np.ndarray, "B G"]:
    """The chances in fp32, -1 where there is no draft."""
    survival_BG = survival_BG.astype(np.float32, copy=False)
    G = survival_BG.shape[1]
    if int(lens_B.min(initial=G)) == G:
        return survival_BG
    return np.where(np.arange(G) < lens_B[:, None], survival_BG, np.float32(ABSENT))


def falling(chances_BG: Float[np.ndarray, "B G"]) -> Float[np.ndarray, " N"]:
    """All chances of `present`, largest first, those of absent drafts left out."""
    if len(chances_BG) == 1:
        # along a request chances never increase, and absent drafts are the last
        return chances_BG[0][: int(np.count_nonzero(chances_BG >= 0.0))]
    sorted_N = np.sort(chances_BG, axis=None)
    return sorted_N[np.searchsorted(sorted_N, 0.0) :][::-1]


def rates(falling_N: Float[np.ndarray, " N"], requests: int, round_s_N: Float[np.ndarray, " M"]) -> np.ndarray:
    """Theta for 0, 1, ... admitted drafts: (requests + sum of their chances) / seconds of that round."""
    gained_N = np.empty(len(falling_N) + 1)
    gained_N[0] = requests
    np.cumsum(falling_N.astype(np.float64), out=gained_N[1:])
    gained_N[1:] += requests
    return gained_N / round_s_N[: len(gained_N)]


def early_stop_budget(rates_N: Float[np.ndarray, " N"]) -> int:
    """Drafts admitted before the first that does not raise the rate. Ref: DSpark (arXiv:2607.05147), Algorithm 1.

    Whether a draft is admitted rests on larger chances and its own, never on a later draft of its request.
    """
    stops_N = rates_N[1:] <= rates_N[:-1]
    first = int(stops_N.argmax()) if len(stops_N) else 0
    return first if len(stops_N) and stops_N[first] else len(stops_N)


def best_budget(rates_N: Float[np.ndarray, " N"]) -> int:
    """Drafts at the largest rate of all, behind a drop too (the fewest where several are equal).

    Lossless only on confidences of earlier rounds: on the current ones, whether draft k is admitted would depend on
    the token at k, which c_{k+1} knows.
    """
    return int(rates_N.argmax())


def top_k_lengths(chances_BG: Float[np.ndarray, "B G"], budget: int) -> Integer[np.ndarray, " B"]:
    """Drafts per request when the `budget` largest chances of `present` are admitted.

    Equal chances: the earlier request first, then the earlier position. The counts are prefixes, because chances do
    not increase along a request. The same as `kernels.admission.admit_top_k`, to the last tie.
    """
    if budget < 0:
        raise ValueError(f"budget must be 0 or more, got {budget}")
    flat_N = chances_BG.reshape(-1)
    if budget == 0:
        return np.zeros(len(chances_BG), dtype=np.int64)
    if budget >= flat_N.size:
        return count_true(chances_BG >= 0)
    last = np.partition(flat_N, flat_N.size - budget)[flat_N.size - budget]
    return lengths_from(chances_BG, last, budget)


def lengths_from(chances_BG: Float[np.ndarray, "B G"], last: np.floating, budget: int) -> Integer[np.ndarray, " B"]:
    """`top_k_lengths` where the smallest admitted chance is known."""
    if last < 0:
        return count_true(chances_BG >= 0)
    kept_BG = chances_BG >= last
    surplus = int(np.count_nonzero(kept_BG)) - budget
    if surplus > 0:
        # the latest of the chances equal to `last` do not fit
        ties_N = np.flatnonzero(chances_BG.reshape(-1) == last)
        kept_BG.reshape(-1)[ties_N[len(ties_N) - surplus :]] = False
    return count_true(kept_BG)


def lone_rates(survival_1G: Float[np.ndarray, "1 G"], length: int, round_s_N: Float[np.ndarray, " M"]) -> list[float]:
    """`rates` of one request's first `length` drafts, number by number: quicker than a numpy call for each step."""
    gained, seconds = 0.0, round_s_N.tolist()
    found = [1 / seconds[0]]
    chances = survival_1G[0].astype(np.float32, copy=False).tolist()
    for chance, took in zip(chances[:length], seconds[1:], strict=False):
        gained += chance
        found.append((gained + 1) / took)
    return found


def count_true(flags_BG: np.ndarray) -> Integer[np.ndarray, " B"]:
    """Per row, how many flags are set: column by column, since rows are short."""
    found_B = flags_BG[:, 0].astype(np.int64)
    for k in range(1, flags_BG.shape[1]):
        found_B += flags_BG[:, k]
    return found_B
