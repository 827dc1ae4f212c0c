"""Trees keep the target's law, exactly; one branch is the chain; a pass over a tree gives the rows of its paths."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspec_lab.config import DecodeConfig, SamplingConfig
from dspec_lab.core.sampling import law
from dspec_lab.core.streams import Chooser, DraftDraws, RandomStreams
from dspec_lab.core.types import Proposal
from dspec_lab.drafters.autoregressive import AutoregressiveDrafter
from dspec_lab.models.toy import TableTarget
from dspec_lab.verifier.decode import generate
from dspec_lab.verifier.enumerate import output_law
from dspec_lab.verifier.tiny import NEURAL_DRAFTERS, tiny_decoder
from dspec_lab.verifier.tree import DraftTree, extend_tree, generate_tree, keep_path, verify_tree, widen

PROMPT = [0]
LENGTH = 2


def emitted(chooser: Chooser, target: TableTarget, drafter: TableTarget, width: int, greedy: bool) -> tuple[int, ...]:
    """The first two tokens of one tree round; what the round leaves open is drawn from the target."""
    sampling = SamplingConfig(temperature=0.0 if greedy else 1.0)
    draws, ids, rows, raw = DraftDraws(chooser, 0), [], [], []
    for k in range(2):
        logits_1V = drafter.logits_after([*PROMPT, *ids])[None]
        raw.append(logits_1V[0])
        probs_V = law(logits_1V, sampling)[0]
        rows.append(probs_V)
        ids.append(int(probs_V.argmax()) if greedy else draws.categorical(k, probs_V))
    proposal = Proposal(tuple(ids), None if greedy else torch.stack(rows), torch.stack(raw))
    tree = widen(proposal, width, target.vocab_size, draws)
    prefix = [[]]
    for token, parent in zip(tree.token_ids, tree.parents, strict=True):
        prefix.append([*prefix[parent], token])
    laws_NV = torch.stack([target.law_after([*PROMPT, *tokens]) for tokens in prefix])
    path, extra = verify_tree(laws_NV, tree, chooser, 0)
    tokens = [*(tree.token_ids[node - 1] for node in path), extra]
    while len(tokens) < LENGTH:
        tokens.append(chooser.categorical("plain", len(tokens), 0, target.law_after([*PROMPT, *tokens])))
    return tuple(tokens[:LENGTH])


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10_000), width=st.integers(1, 3), sharpness=st.sampled_from([0.5, 2.0, 6.0]))
def test_sampled_trees_have_the_targets_law(seed: int, width: int, sharpness: float) -> None:
    target = TableTarget.random(3, order=2, seed=seed, sharpness=sharpness)
    drafter = TableTarget.random(3, order=1, seed=seed + 1, sharpness=sharpness)
    found = output_law(lambda chooser: emitted(chooser, target, drafter, width, greedy=False))
    for tokens, chance in target.sequence_law(PROMPT, LENGTH).items():
        assert found.get(tokens, 0.0) == pytest.approx(chance, abs=1e-9)


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10_000), width=st.integers(1, 3))
def test_unsampled_candidates_keep_the_law_too(seed: int, width: int) -> None:
    target = TableTarget.random(3, order=2, seed=seed, sharpness=2.0)
    drafter = TableTarget.random(3, order=1, seed=seed + 1, sharpness=2.0)
    found = output_law(lambda chooser: emitted(chooser, target, drafter, width, greedy=True))
    for tokens, chance in target.sequence_law(PROMPT, LENGTH).items():
        assert found.get(tokens, 0.0) == pytest.approx(chance, abs=1e-9)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_width_one_is_the_chain(temperature: float) -> None:
    target = tiny_decoder(40, seed=3)
    drafter = AutoregressiveDrafter(target.keep_layers([0], name="shallow"))
    config = DecodeConfig(gamma=4, max_new_tokens=30, temperature=temperature, ignore_eos=True)
    chain = generate(target, drafter, [1, 2, 3], config)
    tree = generate_tree(target, drafter, [1, 2, 3], config, width=1)
    assert tree.token_ids == chain.token_ids
    assert tree.sources == chain.sources
    assert [r.num_accepted for r in tree.rounds] == [r.num_accepted for r in chain.rounds]


def test_a_tree_of_width_one_needs_no_more_room_than_the_chain() -> None:
    target = tiny_decoder(40, seed=3)
    drafter = AutoregressiveDrafter(target.keep_layers([0], name="shallow"))
    config = DecodeConfig(gamma=4, max_new_tokens=10, ignore_eos=True)
    fits = target.max_context - config.max_new_tokens
    prompt = [(3 * i) % 40 for i in range(fits)]
    for width, room in ((1, 0), (2, 4), (3, 8)):
        found = generate_tree(target, drafter, prompt[room:], config, width=width)
        assert found.token_ids == generate(target, None, prompt[room:], config).token_ids
        with pytest.raises(ValueError, match="64"):
            generate_tree(target, drafter, [1, *prompt[room:]], config, width=width)


@pytest.mark.parametrize("width", [2, 3, 5])
def test_greedy_text_is_plain_text_and_wider_trees_accept_no_less(width: int) -> None:
    target = tiny_decoder(40, seed=5)
    drafter = AutoregressiveDrafter(target.keep_layers([0], name="shallow"))
    config = DecodeConfig(gamma=3, max_new_tokens=36, ignore_eos=True)
    plain = generate(target, None, [4, 9], config)
    chain = generate(target, drafter, [4, 9], config)
    tree = generate_tree(target, drafter, [4, 9], config, width=width)
    assert tree.token_ids == plain.token_ids
    assert 0 < tree.num_accepted < tree.num_proposed
    assert len(tree.rounds) <= len(chain.rounds)
    assert all(r.verified_rows == 1 + width * r.gamma for r in tree.rounds)
    at = 1
    for r in tree.rounds:
        # the accepted drafts are those of the path, also where it left the chain
        assert list(r.draft_ids[: r.num_accepted]) == tree.token_ids[at : at + r.num_accepted]
        at += r.num_committed


def test_a_tree_pass_gives_the_rows_of_its_paths_and_keeps_one() -> None:
    target = tiny_decoder(40, seed=7)
    #        0 -> 1 -> 3 -> 5        0 -> 2 -> 4
    tree = DraftTree(token_ids=(11, 12, 13, 14, 15), parents=(0, 0, 1, 2, 3))
    context, anchor = [3, 1, 4, 1, 5], 9
    session = target.session(capacity=64)
    session.extend(context)
    rows = extend_tree(session, anchor, tree).logits_JV
    for path in ((1, 3, 5), (2, 4)):
        alone = target.session(capacity=64)
        alone.extend(context)
        expected = alone.extend([anchor, *(tree.token_ids[node - 1] for node in path)]).logits_JV
        torch.testing.assert_close(rows[[0, *path]], expected, rtol=1e-5, atol=1e-5)
    keep_path(session, 6, (2, 4))
    fresh = target.session(capacity=64)
    fresh.extend([*context, anchor, 12, 14])
    torch.testing.assert_close(session.extend([2]).logits_JV, fresh.extend([2]).logits_JV, rtol=1e-5, atol=1e-5)


def test_bad_trees_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="parent of node 1 must lie in 0..0, got 1"):
        DraftTree((5,), (1,))
    with pytest.raises(ValueError, match="node 0 has two children with the token 5"):
        DraftTree((5, 5), (0, 0))
    with pytest.raises(ValueError, match="at most 63 drafts, got 64"):
        DraftTree(tuple(range(64)), tuple(range(64)))
    target = tiny_decoder()
    with pytest.raises(ValueError, match="token-wise, not by the rule 'block'"):
        generate_tree(target, AutoregressiveDrafter(target), [1], DecodeConfig(verification="block"))
    for gamma, width in ((7, 0), (7, 10), (64, 1)):
        with pytest.raises(ValueError, match=f"gamma {gamma} and width {width} ask for {gamma * width}"):
            generate_tree(target, AutoregressiveDrafter(target), [1], DecodeConfig(gamma=gamma), width=width)


def test_candidates_from_a_reduced_vocabulary_are_target_tokens() -> None:
    proposal = Proposal((30,), None, torch.tensor([[0.5, 2.0, 1.0, -1.0]]), torch.tensor([7, 30, 12, 3]))
    draws = DraftDraws(RandomStreams(0, "0"), 0)
    assert widen(proposal, 3, 40, draws).token_ids == (30, 12, 7)
    assert widen(replace(proposal, logit_ids_V=None), 3, 4, draws).token_ids[1:] == (1, 2)
    with pytest.raises(ValueError, match="4 logits a position for 40 tokens"):
        widen(replace(proposal, logit_ids_V=None), 3, 40, draws)
    assert proposal.prefix(0).logit_ids_V is proposal.logit_ids_V


@pytest.mark.parametrize("name", ["dspark", "medusa"])
def test_greedy_trees_of_neural_drafters_are_plain_text(name: str) -> None:
    target = tiny_decoder(40, seed=5)
    drafter = NEURAL_DRAFTERS[name](target)
    config = DecodeConfig(gamma=3, max_new_tokens=24, ignore_eos=True)
    tree = generate_tree(target, drafter, [4, 9], config, width=3)
    assert tree.token_ids == generate(target, None, [4, 9], config).token_ids
    assert max(r.verified_rows for r in tree.rounds) > 1 + config.gamma
