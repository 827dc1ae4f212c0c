"""Greedy speculative generation with the reference's fitted drafters, through the generic decoding loop.

Token ids, rounds, accepted and proposed lengths must be those of the reference, exactly.
"""

from __future__ import annotations

import torch

from dspec_lab.checkpoints.drafters import open_drafter
from dspec_lab.config import DecodeConfig
from dspec_lab.models.decoder import LeanDecoder
from dspec_lab.verifier.decode import generate

# the reference's last round may overshoot its length cap, ours is cut to it: decode further and compare the rounds
# that the reference ran
OVERSHOOT = 16


class ThresholdDrafter:
    """Cuts a proposal before the first slot whose own confidence is below the threshold."""

    def __init__(self, drafter, threshold):
        self.drafter, self.threshold = drafter, threshold
        self.name, self.taps, self.max_gamma = drafter.name, drafter.taps, drafter.max_gamma

    def start(self, target, *, capacity):
        session, threshold = self.drafter.start(target, capacity=capacity), self.threshold

        class Cut:
            commit = staticmethod(session.commit)

            @staticmethod
            def propose(gamma, sampling, draws):
                proposal = session.propose(gamma, sampling, draws)
                low = [k for k, c in enumerate(proposal.confidence_G) if c < threshold]
                return proposal.prefix(low[0] if low else proposal.gamma)

        return Cut()


def draft_logit(confidence):
    return torch.logit(torch.tensor(confidence, dtype=torch.float64))


def test_rounds_and_tokens(e2e_case, assert_near):
    manifest = e2e_case.manifest()
    limit = manifest["max_new_tokens"]
    target = LeanDecoder.from_folder(e2e_case.folder / "target")
    drafters = {}
    for run in manifest["runs"]:
        assert run["same_result_in_float64"]
        if run["draft"] not in drafters:
            drafters[run["draft"]] = open_drafter(e2e_case.folder / run["draft"], target)
        drafter = drafters[run["draft"]]
        target.eos_ids = frozenset(run["stop_token_ids"] or ())
        if run["confidence_threshold"] > 0:
            drafter = ThresholdDrafter(drafter, run["confidence_threshold"])
        prompt = manifest["prompts"][run["prompt"]]
        config = DecodeConfig(gamma=drafter.max_gamma, max_new_tokens=limit + OVERSHOOT)
        generation = generate(target, drafter, prompt, config)
        rounds = [r for r in generation.rounds if r.context_tokens - 1 < len(prompt) + limit]
        assert generation.token_ids[:limit] == run["new_token_ids"]
        assert [r.num_committed for r in rounds] == run["acceptance_lengths"]
        assert [r.gamma for r in rounds] == run["proposal_lengths"]
        assert [r.num_accepted for r in rounds] == run["accepted_draft_lengths"]
        for got, expected in zip(rounds, run["rounds"], strict=True):
            assert got.context_tokens - 1 == expected["start"]
            assert list(got.draft_ids) == expected["draft_tokens"][: got.gamma]
            if expected.get("confidence_logits") and got.gamma:
                assert_near(draft_logit(got.confidence), torch.tensor(expected["confidence_logits"])[: got.gamma], 1e-4)
