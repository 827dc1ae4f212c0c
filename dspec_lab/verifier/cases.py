"""What the audit decodes: table targets with known laws, and drafters of each kind on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from dspec_lab.config import DecodeConfig, SamplingConfig
from dspec_lab.core.streams import Chooser, DraftDraws
from dspec_lab.core.types import Generation, Proposal
from dspec_lab.drafters.autoregressive import AutoregressiveDrafter
from dspec_lab.drafters.lookahead import LookaheadDrafter
from dspec_lab.drafters.prompt_lookup import PromptLookupDrafter
from dspec_lab.drafters.protocol import Commit, Drafter, DraftSession
from dspec_lab.models.decoder import LeanDecoder
from dspec_lab.models.protocol import Target
from dspec_lab.models.toy import TableTarget
from dspec_lab.verifier.decode import generate
from dspec_lab.verifier.known_law import Sequences, known_law
from dspec_lab.verifier.request import Decide, Request
from dspec_lab.verifier.tree import generate_tree

# how many drafts of a proposal are verified, from what is known before they are drawn; one that remembers rounds has
# `fresh()`, which gives it anew for each text
Policy = Callable[[Proposal], int]


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditCase:
    """One way to decode: everything `generate` needs, and where a fault can be planted."""

    target: Target
    drafter: Drafter | None
    prompt_ids: tuple[int, ...]
    config: DecodeConfig
    wrap_chooser: Callable[[Chooser], Chooser] | None = None
    decide_with: Decide | None = None
    policy: Policy | None = None
    width: int = 1  # candidates per drafted position; above 1 they are verified as a tree (lean decoders only)

    def generation(self, chooser: Chooser) -> Generation:
        """One run of the real loop."""
        if self.wrap_chooser is not None:
            chooser = self.wrap_chooser(chooser)
        if self.width > 1:
            return self._as_tree(chooser)
        if self.policy is not None:
            return self._limited(chooser, self.policy)
        return generate(
            self.target, self.drafter, self.prompt_ids, self.config, chooser=chooser, decide_with=self.decide_with
        )

    def _as_tree(self, chooser: Chooser) -> Generation:
        if not isinstance(self.target, LeanDecoder) or self.drafter is None or self.decide_with or self.policy:
            raise ValueError(
                f"a tree of width {self.width} needs a lean decoder, a drafter, and no other verdict or policy"
            )
        return generate_tree(self.target, self.drafter, self.prompt_ids, self.config, width=self.width, chooser=chooser)

    def _limited(self, chooser: Chooser, policy: Policy) -> Generation:
        # the loop of `generate` with the policy between drafting and verifying, as in a ragged batch
        request = Request(
            self.target, self.drafter, self.prompt_ids, self.config, chooser, decide_with=self.decide_with
        )
        policy = policy.fresh() if hasattr(policy, "fresh") else policy
        request.begin()
        while not request.ended:
            feed = request.next_rows()
            length = policy(request.proposal)
            request.limit(length)
            request.take(request.session.extend(feed[: 1 + length]))
        return request.result


Propose = Callable[[DraftSession, int, SamplingConfig, DraftDraws], Proposal]


class ChangedDrafter:
    """A drafter whose proposals come from `propose(session, gamma, sampling, draws)` on the inner drafter's session."""

    def __init__(self, inner: Drafter, propose: Propose, *, name: str) -> None:
        self._inner, self._propose = inner, propose
        self.name, self.taps, self.max_gamma = name, inner.taps, inner.max_gamma

    def start(self, target: Target, *, capacity: int) -> ChangedSession:
        """The inner drafter's session, wrapped."""
        return ChangedSession(self._inner.start(target, capacity=capacity), self._propose)


class ChangedSession:
    """One request of a `ChangedDrafter`."""

    def __init__(self, inner: DraftSession, propose: Propose) -> None:
        self._inner, self._propose = inner, propose

    def commit(self, commit: Commit) -> None:
        """Handed on."""
        self._inner.commit(commit)

    def propose(self, gamma: int, sampling: SamplingConfig, draws: DraftDraws) -> Proposal:
        """The changed proposal."""
        return self._propose(self._inner, gamma, sampling, draws)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """A target and a draft model with known laws. `core`: run under all samplers, not only the plainest."""

    name: str
    target: TableTarget
    draft: TableTarget
    gamma: int
    length: int
    prompt_ids: tuple[int, ...] = (0,)
    core: bool = True

    def case(self, drafter: Drafter | None, sampling: SamplingConfig, rule: str = "token", seed: int = 0) -> AuditCase:
        """The case of this scenario with one drafter, sampler and verification rule."""
        config = DecodeConfig(
            gamma=self.gamma, temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p,
            max_new_tokens=self.length, verification=rule, seed=seed,  # type: ignore[arg-type]
        )  # fmt: skip
        return AuditCase(target=self.target, drafter=drafter, prompt_ids=self.prompt_ids, config=config)

    def law(self, sampling: SamplingConfig) -> Sequences:
        """The law its output must have."""
        return known_law(self.target, self.prompt_ids, self.length, sampling)


def table(rows: list[list[int]], **options: object) -> TableTarget:
    """An order-1 table from rows of whole weights, each normalised."""
    weights_VV = torch.tensor(rows, dtype=torch.float64)
    return TableTarget(weights_VV / weights_VV.sum(-1, keepdim=True), **options)  # type: ignore[arg-type]


def scenarios() -> tuple[Scenario, ...]:
    """Laws of order 1 and 2, soft and sharp, equal, disjoint, with zeros; end tokens inside a block; gamma 1 to 3."""
    random = TableTarget.random
    # where token 3 follows, the two laws share nothing; elsewhere they overlap in part
    holes_p = table([[2, 1, 0, 1], [0, 3, 1, 0], [1, 0, 2, 1], [1, 1, 0, 0]])
    holes_q = table([[1, 0, 2, 1], [0, 1, 3, 2], [3, 0, 1, 0], [0, 0, 1, 1]])
    apart_p, apart_q = table([[1, 2, 0, 0]] * 4), table([[0, 0, 2, 1]] * 4)
    same = random(3, order=1, sharpness=1.0, seed=11)
    # after the prompt only token 1 can come: a third of the paths, and a first round with one context
    second = random(3, order=2, seed=1).probs
    second[0, 0] = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    return (
        Scenario(name="order 2", target=TableTarget(second), draft=random(3, seed=2), gamma=2, length=4),
        Scenario(
            name="long block", target=random(2, order=2, seed=3), draft=random(2, order=2, seed=4),
            gamma=3, length=5, core=False,
        ),
        Scenario(
            name="end token in the block", target=random(3, seed=5, eos_ids=(2,)), draft=random(3, seed=6),
            gamma=2, length=4,
        ),
        Scenario(name="zeros in p and q", target=holes_p, draft=holes_q, gamma=2, length=4, prompt_ids=(3,)),
        Scenario(
            name="gamma 1, sharp", target=random(4, order=2, sharpness=3.0, seed=7),
            draft=random(4, sharpness=3.0, seed=8), gamma=1, length=3, prompt_ids=(1, 2), core=False,
        ),
        Scenario(
            name="flat", target=random(3, sharpness=0.2, seed=9), draft=random(3, sharpness=2.5, seed=10),
            gamma=2, length=4, core=False,
        ),
        Scenario(
            name="confidence varies", target=random(2, order=2, seed=3), draft=table([[5, 5], [9, 1]]),
            gamma=2, length=4, core=False,
        ),
        Scenario(name="p equals q", target=same, draft=same, gamma=2, length=4, core=False),
        Scenario(name="p and q disjoint", target=apart_p, draft=apart_q, gamma=2, length=4, core=False),
    )  # fmt: skip


SAMPLERS: Mapping[str, SamplingConfig] = {
    "T=1": SamplingConfig(temperature=1.0),
    "T=0.7": SamplingConfig(temperature=0.7),
    "top-k 2": SamplingConfig(temperature=1.0, top_k=2),
    "top-p 0.8": SamplingConfig(temperature=1.0, top_p=0.8),
    "T=1.3 top-k 3 top-p 0.9": SamplingConfig(temperature=1.3, top_k=3, top_p=0.9),
    "T=0": SamplingConfig(temperature=0.0),
}


def one_hot(session: DraftSession, gamma: int, sampling: SamplingConfig, draws: DraftDraws) -> Proposal:
    """A greedy draft at any temperature: the drafter does not sample, so q is one-hot."""
    return session.propose(gamma, SamplingConfig(temperature=0.0), draws)


def sampled_as_one_hot(session: DraftSession, gamma: int, sampling: SamplingConfig, draws: DraftDraws) -> Proposal:
    """A sampled draft handed over without its q. Lossless too: whatever the draft, one-hot q emits p."""
    return replace(session.propose(gamma, sampling, draws), draft_probs_GV=None)


def with_confidence(drafter: Drafter) -> Drafter:
    """The drafter with confidences: c_k is the largest chance in its law at k, which depends on earlier drafts only."""

    def propose(session: DraftSession, gamma: int, sampling: SamplingConfig, draws: DraftDraws) -> Proposal:
        proposal = session.propose(gamma, sampling, draws)
        if proposal.draft_probs_GV is None:
            return proposal
        return replace(proposal, confidence_G=tuple(proposal.draft_probs_GV.amax(-1).clamp(max=1).tolist()))

    return ChangedDrafter(drafter, propose, name=drafter.name)


# steps per second of a target for 1, 2, 3, 4 rows, against 1 row's
STEP_RATES = (1.0, 0.6, 0.52, 0.5)


def gains(proposal: Proposal) -> list[float]:
    """Tokens a second for 0, 1, ... verified drafts, as the confidences promise: (1 + sum of survival) x step rate."""
    survival, expected, found = 1.0, 1.0, [STEP_RATES[0]]
    for confidence, rate in zip(proposal.confidence_G or (), STEP_RATES[1:], strict=False):
        survival *= confidence
        expected += survival
        found.append(expected * rate)
    return found


TABLE_DRAFTERS: Mapping[str, Callable[[Scenario], Drafter]] = {
    "autoregressive": lambda s: AutoregressiveDrafter(s.draft),
    "one_hot": lambda s: ChangedDrafter(AutoregressiveDrafter(s.draft), one_hot, name="one_hot"),
    "sampled_as_one_hot": lambda s: ChangedDrafter(
        AutoregressiveDrafter(s.draft), sampled_as_one_hot, name="sampled_as_one_hot"
    ),
    "prompt_lookup": lambda s: PromptLookupDrafter(max_ngram=2),
    "lookahead": lambda s: LookaheadDrafter(window=2, ngram=2),
}
