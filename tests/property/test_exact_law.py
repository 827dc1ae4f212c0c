"""The output law of the real loop and of the verifier's rules, rebuilt by enumeration in float64, on random tables."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspec_lab.config import DecodeConfig, SamplingConfig
from dspec_lab.core.acceptance import accept_rate
from dspec_lab.core.rejection import (
    accept_chance,
    accept_probs,
    residual_probs,
    residual_weights,
    verify,
    verify_greedy,
)
from dspec_lab.core.streams import Chooser
from dspec_lab.core.types import Proposal
from dspec_lab.drafters.autoregressive import AutoregressiveDrafter
from dspec_lab.models.toy import TableTarget
from dspec_lab.verifier.decode import generate
from dspec_lab.verifier.enumerate import max_deviation, output_law
from dspec_lab.verifier.known_law import known_law

LIMIT = 1e-12
# small whole weights: zeros, ties and equal rows are common
WEIGHTS = st.integers(0, 4)


def _row(vocab: int) -> st.SearchStrategy[list[int]]:
    return st.lists(WEIGHTS, min_size=vocab, max_size=vocab).filter(any)


@st.composite
def weights_of(draw: st.DrawFn, vocab: int, order: int) -> list[list[int]]:
    return [draw(_row(vocab)) for _ in range(vocab**order)]


def _table(rows: list[list[int]], eos_ids: tuple[int, ...] = ()) -> TableTarget:
    vocab = len(rows[0])
    weights = torch.tensor(rows, dtype=torch.float64).view(*[vocab] * (1 if len(rows) == vocab else 2), vocab)
    return TableTarget(weights / weights.sum(-1, keepdim=True), eos_ids=eos_ids)


@st.composite
def rows_of_laws(draw: st.DrawFn, gamma: int, vocab: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """p as a table over all draft prefixes [prefixes, V] in order of length, and q alike: laws that know the prefix."""
    prefixes = sum(vocab**length for length in range(gamma + 1))
    both = []
    for _ in range(2):
        weights = torch.tensor([draw(_row(vocab)) for _ in range(prefixes)], dtype=torch.float64)
        both.append(weights / weights.sum(-1, keepdim=True))
    return both[0], both[1]


def _place(prefix: tuple[int, ...], vocab: int) -> int:
    before = sum(vocab**length for length in range(len(prefix)))
    return before + sum(token * vocab**i for i, token in enumerate(reversed(prefix)))


def one_round(p: torch.Tensor, q: torch.Tensor, gamma: int, rule: str, chooser: Chooser) -> tuple[int, tuple[int, ...]]:
    """(accepted, tokens gained) of one draft and verdict."""
    vocab, ids, rows = p.shape[-1], [], []
    for k in range(gamma):
        rows.append(q[_place(tuple(ids), vocab)])
        ids.append(chooser.categorical("draft", 0, k, rows[-1]))
    target_JV = torch.stack([p[_place(tuple(ids[:k]), vocab)] for k in range(gamma + 1)])
    verdict = verify(target_JV, Proposal(tuple(ids), draft_probs_GV=torch.stack(rows)), chooser, 0, rule)
    return verdict.num_accepted, (*ids[: verdict.num_accepted], verdict.next_token)


@pytest.mark.parametrize("rule", ["token", "block"])
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_the_loop_has_the_targets_law(rule: str, data: st.DataObject) -> None:
    vocab, order, gamma = data.draw(st.sampled_from([(2, 1, 2), (2, 2, 2), (3, 1, 1), (3, 2, 1), (2, 2, 3)]))
    eos_ids = data.draw(st.sampled_from([(), (vocab - 1,)]))
    target = _table(data.draw(weights_of(vocab, order)), eos_ids)
    drafter = AutoregressiveDrafter(_table(data.draw(weights_of(vocab, 1))))
    sampling = data.draw(
        st.sampled_from(
            [
                SamplingConfig(temperature=1.0),
                SamplingConfig(temperature=0.6),
                SamplingConfig(temperature=1.0, top_k=2),
                SamplingConfig(temperature=1.0, top_p=0.77),
            ]
        )
    )
    length = gamma + 2
    config = DecodeConfig(
        gamma=gamma, temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p,
        max_new_tokens=length, verification=rule,
    )  # fmt: skip
    found = output_law(lambda chooser: tuple(generate(target, drafter, [0], config, chooser=chooser).token_ids))
    wanted = known_law(target, [0], length, sampling)
    assert sum(found.values()) == pytest.approx(1, abs=LIMIT)
    assert max_deviation(found, wanted)[0] < LIMIT


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_block_accepts_at_least_as_much_and_both_rules_emit_p(data: st.DataObject) -> None:
    gamma = data.draw(st.sampled_from([1, 2]))
    p, q = data.draw(rows_of_laws(gamma))
    vocab, accepted = p.shape[-1], {}
    for rule in ("token", "block"):
        outcomes = output_law(lambda chooser, r=rule: one_round(p, q, gamma, r, chooser))
        accepted[rule] = sum(number * chance for (number, _), chance in outcomes.items())
        # what a round gains, filled up by the target, is a text of gamma + 1 tokens with p's law
        texts = dict.fromkeys(itertools.product(range(vocab), repeat=gamma + 1), 0.0)
        for (_, gained), chance in outcomes.items():
            for rest in itertools.product(range(vocab), repeat=gamma + 1 - len(gained)):
                text = (*gained, *rest)
                fill = [float(p[_place(text[:k], vocab), text[k]]) for k in range(len(gained), gamma + 1)]
                texts[text] += chance * float(torch.tensor(fill, dtype=torch.float64).prod())
        for text, chance in texts.items():
            wanted = 1.0
            for k, token in enumerate(text):
                wanted *= float(p[_place(text[:k], vocab), token])
            assert chance == pytest.approx(wanted, abs=LIMIT), (rule, text)
    assert accepted["block"] >= accepted["token"] - LIMIT


def test_block_can_accept_more() -> None:
    # after token 0, which q has too often, the second draft wins back what the first lost
    half = [0.5, 0.5]
    p = torch.tensor([half, [0.9, 0.1], half, half, half, half, half], dtype=torch.float64)
    q = torch.tensor([[0.8, 0.2], [0.1, 0.9], half, half, half, half, half], dtype=torch.float64)
    means = {}
    for rule in ("token", "block"):
        outcomes = output_law(lambda chooser, r=rule: one_round(p, q, 2, r, chooser))
        means[rule] = sum(number * chance for (number, _), chance in outcomes.items())
    assert means["token"] == pytest.approx(0.7 + (0.5 * 0.2 + 0.2 * 1.0), abs=LIMIT)
    assert means["block"] == pytest.approx(1.03, abs=LIMIT)


@pytest.mark.parametrize("rule", ["token", "block"])
@settings(max_examples=40, deadline=None)
@given(laws=rows_of_laws(1))
def test_one_draft_is_accepted_with_one_minus_tv(rule: str, laws: tuple[torch.Tensor, torch.Tensor]) -> None:
    p, q = laws
    outcomes = output_law(lambda chooser: one_round(p, q, 1, rule, chooser)[0])
    assert outcomes.get(1, 0.0) == pytest.approx(float(accept_rate(p[:1], q[:1])), abs=LIMIT)


@settings(max_examples=60, deadline=None)
@given(laws=rows_of_laws(1, vocab=5))
def test_accept_and_residual_emit_the_target(laws: tuple[torch.Tensor, torch.Tensor]) -> None:
    target_V, draft_V = laws[0][0], laws[1][0]
    all_ids_1V = torch.arange(5)[None]
    accept_V = accept_probs(target_V.expand(1, 5, 5), draft_V.expand(1, 5, 5), all_ids_1V)[0]
    kept_V = draft_V * accept_V
    emitted_V = kept_V + (1 - kept_V.sum()) * residual_probs(target_V[None], draft_V[None])[0]
    torch.testing.assert_close(emitted_V, target_V, rtol=0, atol=LIMIT)


def test_the_tail_of_a_large_vocabulary_keeps_its_mass() -> None:
    """Tokens below 1e-8 are most of a large vocabulary; a floor under p_d that they can reach would starve them."""
    vocab, tail = 262_144, 2e-9
    target_V = torch.full((vocab,), tail, dtype=torch.float64)
    target_V[0] = 1 - target_V[1:].sum()
    draft_V = target_V.roll(1).clone()
    draft_V[:2] = target_V[:2]
    accept_V = accept_probs(target_V[None, None].expand(1, vocab, vocab), draft_V[None, None].expand(1, vocab, vocab),
                            torch.arange(vocab)[None])[0]  # fmt: skip
    kept_V = draft_V * accept_V
    emitted_V = kept_V + (1 - kept_V.sum()) * residual_probs(target_V[None], draft_V[None])[0]
    assert float((emitted_V - target_V).abs().sum()) < 1e-9


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_at_temperature_0_all_rules_agree(data: st.DataObject) -> None:
    gamma, vocab = data.draw(st.integers(0, 3)), 4
    logits_JV = torch.tensor(
        [data.draw(st.lists(st.integers(0, 2), min_size=vocab, max_size=vocab)) for _ in range(gamma + 1)],
        dtype=torch.float64,
    )
    proposal = Proposal(tuple(data.draw(st.lists(st.integers(0, vocab - 1), min_size=gamma, max_size=gamma))))
    greedy = verify_greedy(logits_JV, proposal)
    one_hot_JV = torch.nn.functional.one_hot(logits_JV.argmax(-1), vocab).double()
    for rule in ("token", "block"):
        verdicts = output_law(lambda chooser, r=rule: verify(one_hot_JV, proposal, chooser, 0, r))
        assert verdicts == {greedy: 1.0}


@given(weights=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=6))
def test_the_forms_for_one_row_are_those_for_many(weights: list[tuple[float, float]]) -> None:
    p_V, q_V = (torch.tensor(column, dtype=torch.float64) + 1e-3 for column in zip(*weights, strict=True))
    p_V, q_V = p_V / p_V.sum(), q_V / q_V.sum()
    ids = torch.arange(len(weights))[None]
    many_V = accept_probs(p_V.expand(1, len(weights), -1), q_V.expand(1, len(weights), -1), ids)[0]
    one = [accept_chance(p, q) for p, q in zip(p_V.tolist(), q_V.tolist(), strict=True)]
    torch.testing.assert_close(torch.tensor(one, dtype=torch.float64), many_V, rtol=1e-15, atol=0)
    left_V = residual_weights(p_V, q_V)
    torch.testing.assert_close(left_V / left_V.sum(), residual_probs(p_V[None], q_V[None])[0])
