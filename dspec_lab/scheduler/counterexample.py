"""The paper's counterexample: a search that looks behind a drop emits (0.85, 0.15) where the target says (0.7, 0.3).

Two tokens, A and B. p_t = (0.7, 0.3), p_d = (0.5, 0.5); a_1 = 0.8 whatever is drawn; c_2 = 0.9 after A and 0 after B.
Steps per second for 1, 2, 3 rows: 1, 0.5, 0.45. One draft alone does not pay (1.8 x 0.5 < 1), two pay after A only
(2.52 x 0.45 > 1). A search over all lengths therefore verifies x_1 when it is A, which is then always accepted, and
not when it is B, where the target draws anew: A comes out with chance 0.5 + 0.5 x 0.7.
Ref: DSpark (arXiv:2607.05147), appendix.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from dspec_lab.config import DecodeConfig, SamplingConfig
from dspec_lab.core.streams import Chooser, DraftDraws
from dspec_lab.core.types import Proposal
from dspec_lab.drafters.autoregressive import AutoregressiveDrafter
from dspec_lab.drafters.protocol import DraftSession
from dspec_lab.models.toy import TableTarget
from dspec_lab.scheduler.batch import ProposalPolicy
from dspec_lab.scheduler.cost_table import CostTable
from dspec_lab.scheduler.policies import Policy
from dspec_lab.verifier.cases import ChangedDrafter
from dspec_lab.verifier.enumerate import output_law
from dspec_lab.verifier.request import Request

TARGET_PROBS = (0.7, 0.3)
DRAFT_PROBS = (0.5, 0.5)
FIRST_CONFIDENCE = 0.8
SECOND_CONFIDENCE = (0.9, 0.0)  # after A, after B
TABLE = CostTable(rows=(1, 2, 3), seconds=(1.0, 1 / 0.5, 1 / 0.45), name="counterexample")


def first_token_law(policy: Policy) -> dict[str, float]:
    """The exact law of the first token of a round, by running the real loop along every path of draws."""
    rows = [torch.tensor([law] * 2, dtype=torch.float64) for law in (TARGET_PROBS, DRAFT_PROBS)]
    target, draft = TableTarget(rows[0]), TableTarget(rows[1])
    drafter = ChangedDrafter(AutoregressiveDrafter(draft), _told, name="told")
    config = DecodeConfig(gamma=2, temperature=1.0, max_new_tokens=4)

    def run(chooser: Chooser) -> str:
        request = Request(target, drafter, (0,), config, chooser)
        request.begin()
        feed = request.next_rows()
        length = ProposalPolicy(policy)(request.proposal)
        request.limit(length)
        request.take(request.session.extend(feed[: 1 + length]))
        return "AB"[request.result.token_ids[1]]

    return output_law(run)


def _told(session: DraftSession, gamma: int, sampling: SamplingConfig, draws: DraftDraws) -> Proposal:
    proposal = session.propose(gamma, sampling, draws)
    confidence = (FIRST_CONFIDENCE, SECOND_CONFIDENCE[proposal.token_ids[0]])
    return replace(proposal, confidence_G=confidence[: proposal.gamma])
