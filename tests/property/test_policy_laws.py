"""Scheduling is lossless: no policy looks at the token it decides on, and the output law is exactly the target's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from dspec_lab.config import DecodeConfig, SamplingConfig
from dspec_lab.core.streams import Chooser
from dspec_lab.drafters.autoregressive import AutoregressiveDrafter
from dspec_lab.models.toy import TableTarget
from dspec_lab.scheduler.batch import BatchScheduler, audit_policies
from dspec_lab.scheduler.bellman import ConfidenceChain, solve
from dspec_lab.scheduler.cost_table import CostTable, DraftCost
from dspec_lab.scheduler.counterexample import TABLE as COUNTEREXAMPLE
from dspec_lab.scheduler.counterexample import first_token_law
from dspec_lab.scheduler.policies import (
    Delayed,
    EarlyStop,
    FixedLength,
    FullBlock,
    Oracle,
    Retrospective,
    RoundView,
    StaticThreshold,
)
from dspec_lab.verifier.cases import with_confidence
from dspec_lab.verifier.enumerate import max_deviation, output_law
from dspec_lab.verifier.exact_audit import SAMPLERS, exact_law, scenario_named
from dspec_lab.verifier.known_law import known_law
from dspec_lab.verifier.request import Request

JAGGED = CostTable(rows=(1, 3, 4, 6, 7, 40), seconds=(0.010, 0.012, 0.020, 0.021, 0.030, 0.060))
CHAIN = ConfidenceChain(np.array([0.4, 0.9]), np.array([0.3, 0.7]), np.tile([[0.6, 0.4], [0.2, 0.8]], (3, 1, 1)))
LEGAL = {
    policy.name: policy
    for policy in (
        FullBlock(), FixedLength(0), FixedLength(2), StaticThreshold(0.5), StaticThreshold(0.6, on="confidence"),
        EarlyStop(JAGGED), Delayed(JAGGED),
    )
}  # fmt: skip
BELLMAN = solve(CHAIN, JAGGED.round_s_N(1, 4))
LEAKING = {"retrospective": Retrospective(JAGGED), "oracle": Oracle()}
# few levels, so that ties and certain drafts are common
CHANCES = np.array([0.0, 0.5, 0.8, 0.95, 1.0])
CASES = 600


def two_rounds(rng: np.random.Generator, B: int) -> tuple[RoundView, RoundView, int, int]:
    """A round, the same with another outcome behind draft k of one request, that request, and k."""
    G = 4
    request, k = int(rng.integers(B)), int(rng.integers(1, G + 1))
    now_BG, past_BG, later_BG = rng.choice(CHANCES, (3, B, G), p=[0.1, 0.2, 0.2, 0.3, 0.2])
    # what the token at k decides: the confidences behind it, whether the drafter goes on, what is accepted
    changed_BG = now_BG.copy()
    changed_BG[request, k:] = later_BG[request, k:]
    lens_B, accepted_B = rng.integers(1, G + 1, B), rng.integers(0, G + 1, B)
    lens_B[request] = rng.integers(k, G + 1)
    other_lens_B, other_accepted_B = lens_B.copy(), accepted_B.copy()
    other_lens_B[request], other_accepted_B[request] = rng.integers(k, G + 1), rng.integers(0, G + 1)
    view = RoundView(survival_BG=now_BG.cumprod(1), lens_B=lens_B, past_BG=past_BG.cumprod(1), accepted_B=accepted_B)
    other = replace(view, survival_BG=changed_BG.cumprod(1), lens_B=other_lens_B, accepted_B=other_accepted_B)
    return view, other, request, k


def count_leaks(policy, *, most_requests: int) -> int:
    """Cases in which the decision on a draft changes with what lies behind it."""
    rng, found = np.random.default_rng(0), 0
    for _ in range(CASES):
        view, other, request, k = two_rounds(rng, int(rng.integers(1, most_requests + 1)))
        found += bool((policy.lengths(view)[request] >= k) != (policy.lengths(other)[request] >= k))
    return found


@pytest.mark.parametrize("name", LEGAL)
def test_no_decision_depends_on_what_lies_behind_the_draft(name):
    assert LEGAL[name].lossless
    assert count_leaks(LEGAL[name], most_requests=4) == 0


def test_the_bellman_rule_does_not_either():
    assert BELLMAN.lossless and count_leaks(BELLMAN, most_requests=1) == 0


@pytest.mark.parametrize("name", LEAKING)
def test_the_check_sees_policies_that_leak(name):
    assert not LEAKING[name].lossless
    assert count_leaks(LEAKING[name], most_requests=4) > CASES / 100


@pytest.mark.parametrize("name", audit_policies())
def test_texts_have_exactly_the_targets_law(name):
    scenario, sampling = scenario_named("confidence varies"), SAMPLERS["T=1"]
    drafter = with_confidence(AutoregressiveDrafter(scenario.draft))
    found, seen = exact_law(replace(scenario.case(drafter, sampling), policy=audit_policies()[name]))
    assert max_deviation(found, scenario.law(sampling))[0] < 1e-12
    assert seen.missing is None


def test_the_papers_counterexample():
    wrong, right = first_token_law(Retrospective(COUNTEREXAMPLE)), first_token_law(EarlyStop(COUNTEREXAMPLE))
    assert wrong == pytest.approx({"A": 0.85, "B": 0.15}, abs=1e-12)
    assert right == pytest.approx({"A": 0.7, "B": 0.3}, abs=1e-12)
    assert first_token_law(Delayed(COUNTEREXAMPLE)) == pytest.approx({"A": 0.7, "B": 0.3}, abs=1e-12)
    # and without the real loop: x_1 = A is always accepted; after x_1 = B nothing is verified, the target draws anew
    view = RoundView(survival_BG=np.array([[0.8, 0.72]]), lens_B=np.array([2]))
    other = RoundView(survival_BG=np.array([[0.8, 0.0]]), lens_B=np.array([2]))
    assert Retrospective(COUNTEREXAMPLE).lengths(view).tolist() == [2]
    assert Retrospective(COUNTEREXAMPLE).lengths(other).tolist() == [0]
    assert 0.5 + 0.5 * 0.7 == pytest.approx(0.85)
    assert [COUNTEREXAMPLE.steps_per_s(rows) for rows in (1, 2, 3)] == pytest.approx([1, 0.5, 0.45])


class _Numbered:
    """One request's part of a shared chooser: its rounds are set apart from the other requests'."""

    def __init__(self, inner: Chooser, request: int) -> None:
        self._inner, self._base = inner, request * 2**50

    def categorical(self, purpose, round_index, slot, probs_V):
        return self._inner.categorical(purpose, self._base + round_index, slot, probs_V)

    def bernoulli(self, purpose, round_index, slot, prob):
        return self._inner.bernoulli(purpose, self._base + round_index, slot, prob)


# 2 rows for two requests, up to 6 with their drafts: dear at first, then nearly free
SHARED = CostTable(
    rows=(1, 2, 3, 4, 5, 6), seconds=(0.7, 1.0, 1.37, 1.9, 1.95, 2.0), draft=DraftCost(per_request_s=0.001)
)


def joint_deviation(policy, *, gate: bool) -> tuple[float, set[tuple[int, ...]]]:
    """How far the joint law of two requests' texts is from the product of the target's laws; the lengths met."""
    probs = TableTarget.random(2, order=2, seed=3).probs
    probs[0] = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)  # the first token is certain: fewer paths
    target = TableTarget(probs)
    weights = torch.tensor([[5.0, 5.0], [9.0, 1.0]], dtype=torch.float64)
    drafter = with_confidence(AutoregressiveDrafter(TableTarget(weights / weights.sum(-1, keepdim=True))))
    config = DecodeConfig(gamma=2, temperature=1.0, max_new_tokens=4)
    met = set()

    def run(chooser: Chooser) -> tuple[tuple[int, ...], tuple[int, ...]]:
        scheduler = BatchScheduler(policy, gamma=2, table=SHARED, gate=gate)
        requests = [Request(target, drafter, (i,), config, _Numbered(chooser, i)) for i in range(2)]
        for request in requests:
            request.begin()
        while active := [request for request in requests if not request.ended]:
            if gate:
                for request, wanted in zip(active, scheduler.draft_lengths(active), strict=True):
                    request.gamma = wanted
            feeds = [request.next_rows() for request in active]
            lengths = scheduler(active)
            met.add(tuple(lengths))
            for request, feed, length in zip(active, feeds, lengths, strict=True):
                request.limit(length)
                request.take(request.session.extend(feed[: 1 + length]))
        return tuple(tuple(request.result.token_ids) for request in requests)

    found = output_law(run)
    laws = [known_law(target, (i,), 4, SamplingConfig(temperature=1.0)) for i in range(2)]
    wanted = {(a, b): laws[0][a] * laws[1][b] for a in laws[0] for b in laws[1]}
    return max_deviation(found, wanted)[0], met


@pytest.mark.parametrize(
    ("policy", "gate", "hoped"),
    [(EarlyStop(SHARED), False, 0.7), (EarlyStop(SHARED), True, 0.9), (Delayed(SHARED), True, 0.7)],
    ids=["early-stop", "early-stop, gated", "delayed, gated"],
)
def test_two_requests_that_share_a_budget_keep_the_product_of_their_laws(policy, gate, hoped, monkeypatch):
    # so much is expected of the drafter that the gate lets it draft, at first
    monkeypatch.setattr("dspec_lab.scheduler.history.PRIOR", hoped)
    gap, met = joint_deviation(policy, gate=gate)
    assert gap < 1e-12 and len(met) > 2, met


def test_the_joint_check_sees_a_leak():
    gap, _ = joint_deviation(replace(Retrospective(SHARED), lossless=True), gate=False)
    assert gap > 1e-3


class _Stopping:
    """A drafter that proposes nothing behind the token 1, as chain drafters do behind an end token."""

    def __init__(self, inner) -> None:
        self._inner = inner

    def start(self, *args, **options):
        return _StoppingSession(self._inner.start(*args, **options))

    def __getattr__(self, name):
        return getattr(self._inner, name)


class _StoppingSession(_Stopping):
    def propose(self, *args, **options):
        proposal = self._inner.propose(*args, **options)
        return proposal.prefix(next((k + 1 for k, t in enumerate(proposal.token_ids) if t == 1), proposal.gamma))


TOKENS = 6
# one more row pays only in a round that takes long anyway
LONG = CostTable(rows=(1, 2, 3), seconds=(1.0, 2.3, 3.2), draft=DraftCost(joint=True, per_token_s=1.0))


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("policy", [EarlyStop(LONG), Delayed(LONG)], ids=["early-stop", "delayed"])
def test_what_drafting_took_does_not_tell_what_was_drafted(policy, stops):
    """Fewer drafts than were asked for take less time, and that must not decide on the draft behind which they end."""
    target = TableTarget(TableTarget.random(2, order=2, seed=3).probs)
    weights = torch.tensor([[5.0, 5.0], [6.0, 4.0]], dtype=torch.float64)
    drafter = AutoregressiveDrafter(TableTarget(weights / weights.sum(-1, keepdim=True)))
    # rounds enough for a capacity that rests on chances of two rounds ago
    config, met = DecodeConfig(gamma=2, temperature=1.0, max_new_tokens=TOKENS), set()

    def run(chooser: Chooser) -> tuple[int, ...]:
        scheduler = BatchScheduler(policy, gamma=2, table=LONG)
        request = Request(target, _Stopping(drafter) if stops else drafter, (0,), config, chooser)
        request.begin()
        while not request.ended:
            feed = request.next_rows()
            (length,) = scheduler([request])
            met.add((len(feed) - 1, length))
            request.limit(length)
            request.take(request.session.extend(feed[: 1 + length]))
        return tuple(request.result.token_ids)

    gap, _ = max_deviation(output_law(run), known_law(target, (0,), TOKENS, SamplingConfig(temperature=1.0)))
    assert gap < 1e-12 and any(0 < verified for _, verified in met), met
