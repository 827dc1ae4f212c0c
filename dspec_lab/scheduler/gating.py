"""Whether to draft at all: requests whose drafts are not expected to pay for themselves skip drafting, or draft less.

Verification policies come after drafting, when its time is spent. This decision comes before, from earlier rounds
only, so it is lossless whatever it decides. (The DSpark paper leaves it open.)
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Integer

from dspec_lab.scheduler.admission import best_budget, falling, present, rates, top_k_lengths
from dspec_lab.scheduler.cost_table import CostTable
from dspec_lab.scheduler.policies import Policy, RoundView, spared_share

# Share of the expected gain that counts. The requests that look best are on average not as good as they look, and a
# cost table drifts with the machine: near break-even a wrong draft costs more than a missed one.
CAUTION = 0.95
PROBE_SHARE = 0.005  # of the time that may go into drafts of requests that skip, to see whether that has changed


def draft_lengths(
    predicted_BG: Float[np.ndarray, "B G"],
    table: CostTable,
    *,
    context_tokens: float | None = None,
    caution: float = CAUTION,
    spared: float = 0.0,
) -> Integer[np.ndarray, " B"]:
    """Drafts to ask of each request's drafter, 0..G, that maximise expected tokens per second of the coming round.

    `predicted_BG` is the survival expected from earlier rounds, of which the share `caution` counts. Requests are
    taken by falling gain; all numbers of drafting requests are compared, none included. Where drafted tokens cost
    nothing each a request drafts its whole block or nothing; otherwise only as far as verification would follow.

    `spared` is the share of drafts that would be rejected which the policy, knowing their confidences by then, is
    expected not to verify (`policies.spared_share`): more is worth drafting than would be worth verifying unseen.
    """
    if not 0 <= spared <= 1:
        raise ValueError(f"the share of spared rejections must lie in 0..1, got {spared}")
    predicted_BG = caution * predicted_BG
    if len(predicted_BG) == 1:
        return _for_one(predicted_BG[0], table, context_tokens, spared)
    return _for_many(predicted_BG, table, context_tokens, spared)


def asked_lengths(
    policy: Policy,
    hoped_BG: Float[np.ndarray, "B G"],
    table: CostTable,
    *,
    context_tokens: float | None = None,
    told: bool = True,
) -> Integer[np.ndarray, " B"]:
    """`draft_lengths` for what `policy` will make of the drafts.

    `hoped_BG` is the survival that is expected, `told` whether the drafter tells confidences. Early stopping halts at a
    step of the cost that no single draft pays for, and drafting behind it is lost time: where the policy would not even
    verify as many as are expected to be kept, only those it would verify are asked for, or none.
    """
    requests = len(hoped_BG)
    spared = spared_share(policy, requests) if told else 0.0
    lengths_B = draft_lengths(hoped_BG, table, context_tokens=context_tokens, spared=spared)
    if not lengths_B.any() or not policy.uses_table:
        return lengths_B
    draft_s = table.draft.seconds(int(np.count_nonzero(lengths_B)), int(lengths_B.sum()))
    view = RoundView(
        survival_BG=hoped_BG, lens_B=lengths_B, past_BG=hoped_BG, asked_B=lengths_B, draft_s=draft_s,
        context_tokens=context_tokens,
    )  # fmt: skip
    verified_B, places_G = policy.lengths(view), np.arange(hoped_BG.shape[1])
    if verified_B.sum() >= np.where(places_G < lengths_B[:, None], hoped_BG, 0.0).sum():
        return lengths_B
    gained = requests + CAUTION * float(np.where(places_G < verified_B[:, None], hoped_BG, 0.0).sum())
    draft_s = table.draft.seconds(int(np.count_nonzero(verified_B)), int(verified_B.sum()))
    round_s_N = table.round_s_N(requests, int(verified_B.sum()), context_tokens=context_tokens)
    pays = gained / (float(round_s_N[-1]) + draft_s) > requests / float(round_s_N[0])
    return verified_B if pays else np.zeros(requests, dtype=np.int64)


def _expected_s(round_s_N: np.ndarray, chance_X: np.ndarray, count_X: np.ndarray, spared: float) -> np.ndarray:
    """Seconds of rounds that hold `count_X` drafts whose chances add up to `chance_X`, as many verified as expected."""
    if not spared:
        return round_s_N[count_X]
    verified_X = count_X - spared * (count_X - np.minimum(chance_X, count_X))
    low_X = verified_X.astype(np.int64)
    low_s_X, high_s_X = round_s_N[low_X], round_s_N[np.minimum(low_X + 1, len(round_s_N) - 1)]
    with np.errstate(invalid="ignore"):
        between_X = low_s_X + (verified_X - low_X) * (high_s_X - low_s_X)
    # beyond the table's end nothing is known
    return np.where(verified_X == low_X, low_s_X, np.where(np.isfinite(round_s_N[count_X]), between_X, np.inf))


def _for_one(
    predicted_G: np.ndarray, table: CostTable, context_tokens: float | None, spared: float
) -> Integer[np.ndarray, " B"]:
    """`_for_many` of one request, where nothing is to be ranked: a quiet batch waits for this in each round."""
    G, draft = len(predicted_G), table.draft
    round_s_N = table.round_s_N(1, G, context_tokens=context_tokens)
    gained_N = np.ones(G + 1)
    gained_N[1:] += np.cumsum(predicted_G.astype(np.float32).astype(np.float64))
    count_N = np.arange(G + 1)
    verify_s_N = _expected_s(round_s_N, gained_N - 1, count_N, spared)
    paid_s = float(draft.by_requests_N(1)[1])
    wanted = best_budget(gained_N / (verify_s_N + (draft.per_token_s * count_N + paid_s)))
    drafted = wanted if draft.per_token_s or not wanted else G
    rate = float(gained_N[wanted]) / (float(verify_s_N[wanted]) + paid_s + draft.per_token_s * drafted)
    return np.array([drafted if rate > 1 / float(round_s_N[0]) else 0], dtype=np.int64)


def _for_many(
    predicted_BG: np.ndarray, table: CostTable, context_tokens: float | None, spared: float
) -> Integer[np.ndarray, " B"]:
    (B, G), draft = predicted_BG.shape, table.draft
    chances_BG = present(predicted_BG, np.full(B, G))
    falling_N = falling(chances_BG)
    round_s_N = table.round_s_N(B, B * G, context_tokens=context_tokens)
    count_N = np.arange(len(falling_N) + 1)
    chance_N = np.concatenate([[0.0], np.cumsum(falling_N.astype(np.float64))])
    ahead_s_N = _expected_s(round_s_N, chance_N, count_N, spared) + draft.per_token_s * count_N
    best_rate, found_B, drafting = B / round_s_N[0], np.zeros(B, dtype=np.int64), B
    drafting_s_N = draft.by_requests_N(B)
    # what the drafting pass takes depends on who drafts: first all, then those that are left
    for _ in range(2):
        paid_s = float(drafting_s_N[drafting])
        budget = best_budget(rates(falling_N, B, ahead_s_N + paid_s))
        wanted_B = top_k_lengths(chances_BG, budget)
        gain_B = np.where(np.arange(G) < wanted_B[:, None], predicted_BG, 0.0).sum(1)
        order_B = np.argsort(-gain_B, kind="stable")
        gained_B, count_B = np.cumsum(gain_B[order_B]), np.cumsum(wanted_B[order_B])
        drafted_B = np.cumsum(np.where(wanted_B > 0, wanted_B if draft.per_token_s else G, 0)[order_B])
        draft_s_B = drafting_s_N[1:] + draft.per_token_s * drafted_B
        rate_B = (B + gained_B) / (_expected_s(round_s_N, gained_B, count_B, spared) + draft_s_B)
        before, drafting = drafting, int(rate_B.argmax()) + 1
        if rate_B[drafting - 1] > best_rate:
            best_rate, found_B = float(rate_B[drafting - 1]), np.zeros(B, dtype=np.int64)
            chosen_B = order_B[:drafting]
            found_B[chosen_B] = wanted_B[chosen_B] if draft.per_token_s else np.where(wanted_B[chosen_B] > 0, G, 0)
        if drafting == before:
            break
    return found_B


class ProbePurse:
    """Lets requests that skip draft now and then, at a fixed share of the time whatever the load.

    A probe by the number of rounds would cost little on a quiet machine and a tenth of a busy one's throughput.
    """

    def __init__(self, share: float = PROBE_SHARE) -> None:
        if not 0 <= share < 1:
            raise ValueError(f"the share of time for probes must lie in 0..1, got {share}")
        self._share, self._saved_s = share, 0.0
        # requests, those that draft, table: their round, a probe's cost
        self._known: tuple[int, int, CostTable, float, float] | None = None

    def rest(self, requests: int, table: CostTable) -> bool:
        """Count a round in which none of `requests` is to draft, if no probe can be paid; else count nothing.

        What `add` would do then, without asking who waits.
        """
        round_s, cost_s = self._costs(requests, 0, table)
        if self._saved_s + self._share * round_s >= cost_s:
            return False
        self._saved_s += self._share * round_s
        return True

    def save(self, requests: int, table: CostTable) -> None:
        """Count a round in which all of `requests` draft: what `add` would do, where nobody waits."""
        round_s, cost_s = self._costs(requests, requests, table)
        self._saved_s = min(self._saved_s + self._share * round_s, cost_s)

    def _costs(self, requests: int, drafting: int, table: CostTable) -> tuple[float, float]:
        """Seconds of a plain round of `requests` and of a probe beside `drafting`, as they were for the last such."""
        known = self._known
        if known is None or known[0] != requests or known[1] != drafting or known[2] is not table:
            round_s_N = table.round_s_N(requests, 1)
            known = self._known = requests, drafting, table, float(round_s_N[0]), _probe_s(table, round_s_N, drafting)
        return known[3], known[4]

    def add(
        self,
        wanted_B: Integer[np.ndarray, " B"],
        skipped_B: Float[np.ndarray, " B"],
        may_B: Integer[np.ndarray, " B"],
        table: CostTable,
    ) -> Integer[np.ndarray, " B"]:
        """`wanted_B`, and where it can be paid the request that has skipped longest drafts 1.

        `skipped_B` are rounds since a request drafted (infinite: never); `may_B` the drafts it has room for.
        """
        round_s_N = table.round_s_N(len(wanted_B), 1)
        self._saved_s += self._share * float(round_s_N[0])
        waiting_B = np.flatnonzero((wanted_B == 0) & (may_B > 0))
        cost_s = _probe_s(table, round_s_N, int((wanted_B > 0).sum()))
        if not len(waiting_B) or self._saved_s < cost_s:
            # no more is saved up than one probe costs, or a long quiet time would be followed by many
            self._saved_s = min(self._saved_s, cost_s)
            return wanted_B
        self._saved_s -= cost_s
        probed_B = wanted_B.copy()
        probed_B[waiting_B[int(skipped_B[waiting_B].argmax())]] = 1
        return probed_B


def _probe_s(table: CostTable, round_s_N: np.ndarray, drafting: int) -> float:
    """What one draft more costs beside `drafting` requests that draft, whose pass it joins."""
    drafting_s_N = table.draft.by_requests_N(drafting + 1)
    draft_s = max(0.0, float(drafting_s_N[-1] - drafting_s_N[-2])) + table.draft.per_token_s
    return draft_s + float(round_s_N[1] - round_s_N[0])
