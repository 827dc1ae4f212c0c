"""Whether to draft at all: requests whose drafts are not expected to pay for themselves skip drafting, or draft less.

Verification policies come after drafting, when its time is spent. This decision comes before, from earlier rounds
only, so it is lossless whatever it decides. (The DSpark paper leaves it open.)
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float, Integer

from dspec_lab.scheduler.admission import best_budget, falling, present, rates, top_k_lengths
from dspec_lab.scheduler.cost_table import CostTable

PROBE_EVERY = 16  # rounds after which a request that skips drafts again, to see whether that has changed


def draft_lengths(
    predicted_BG: Float[np.ndarray, "B G"],
    table: CostTable,
    *,
    context_tokens: float | None = None,
    probe_B: Bool[np.ndarray, " B"] | None = None,
) -> Integer[np.ndarray, " B"]:
    """Drafts to ask of each request's drafter, 0..G, that maximise expected tokens per second of the coming round.

    `predicted_BG` is the survival expected from earlier rounds. Requests are taken by falling gain; all numbers of
    drafting requests are compared, none included. Where drafted tokens cost nothing each (block drafters) a request
    drafts its whole block or nothing; otherwise only as far as verification would follow. `probe_B`: requests that
    draft in any case.
    """
    B, G = predicted_BG.shape
    draft = table.draft
    free_s = draft.seconds(B, B * G)
    chances_BG = present(predicted_BG, np.full(B, G))
    falling_N = falling(chances_BG)
    round_s_N = table.round_s_N(B, B * G, context_tokens=context_tokens)
    budget = best_budget(rates(falling_N, B, round_s_N[: len(falling_N) + 1] + free_s))
    wanted_B = top_k_lengths(chances_BG, budget)
    gain_B = np.where(np.arange(G) < wanted_B[:, None], predicted_BG, 0.0).sum(1)
    order_B = np.argsort(-gain_B, kind="stable")
    verified_B = np.cumsum(wanted_B[order_B])
    drafted_B = np.cumsum(np.where(wanted_B > 0, wanted_B if draft.per_token_s else G, 0)[order_B])
    drafting_B = np.arange(1, B + 1)
    draft_s_B = draft.fixed_s + draft.per_request_s * drafting_B + draft.per_token_s * drafted_B
    rate_B = (B + np.cumsum(gain_B[order_B])) / (round_s_N[verified_B] + draft_s_B)
    best = int(rate_B.argmax())
    found_B = np.zeros(B, dtype=np.int64)
    if rate_B[best] > B / round_s_N[0]:
        chosen_B = order_B[: best + 1]
        found_B[chosen_B] = wanted_B[chosen_B] if draft.per_token_s else np.where(wanted_B[chosen_B] > 0, G, 0)
    if probe_B is not None:
        found_B[probe_B] = np.maximum(found_B[probe_B], G)
    return found_B
