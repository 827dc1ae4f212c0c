"""Prompt lookup and the autoregressive drafter: what they propose, what they keep, and that requests do not mix."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspec_lab.config import DecodeConfig, SamplingConfig
from dspec_lab.core.sampling import law
from dspec_lab.core.streams import DraftDraws, RandomStreams
from dspec_lab.drafters.autoregressive import AutoregressiveDrafter
from dspec_lab.drafters.prompt_lookup import PromptLookupDrafter
from dspec_lab.drafters.protocol import Commit
from dspec_lab.models.toy import TableTarget
from dspec_lab.verifier.decode import generate

GREEDY = SamplingConfig()
VOCAB = 11


def draws(round_index: int = 0) -> DraftDraws:
    return DraftDraws(RandomStreams(0), round_index)


def table(seed: int, **options) -> TableTarget:
    return TableTarget.random(VOCAB, order=2, sharpness=2.0, seed=seed, **options)


# prompt lookup


def looked_up(tokens: list[int], gamma: int = 4, **options) -> tuple[int, ...]:
    session = PromptLookupDrafter(**options).start(table(0), capacity=200)
    session.commit(Commit(tuple(tokens)))
    proposal = session.propose(gamma, GREEDY, draws())
    assert proposal.draft_probs_GV is None
    return proposal.token_ids


def test_the_latest_occurrence_is_copied():
    assert looked_up([1, 2, 9, 5, 1, 2, 8, 6, 1, 2], gamma=2) == (8, 6)


def test_the_longest_match_goes_before_a_later_one():
    assert looked_up([5, 1, 2, 7, 4, 1, 2, 8, 4, 5, 1, 2], gamma=1) == (7,)
    assert looked_up([5, 1, 2, 7, 4, 1, 2, 8, 4, 5, 1, 2], gamma=1, max_ngram=2) == (8,)


def test_a_copy_that_runs_into_the_end_repeats_itself():
    assert looked_up([1, 2, 3, 1, 2, 3], gamma=8) == (1, 2, 3, 1, 2, 3, 1, 2)
    assert looked_up([4, 4], gamma=5) == (4, 4, 4, 4, 4)


def test_nothing_to_propose():
    assert looked_up([1, 2, 3]) == ()
    assert looked_up([1]) == ()
    assert looked_up([1, 2, 3, 1], min_ngram=2) == ()
    assert looked_up([7, 1, 2, 3, 1, 2], min_ngram=2) == (3, 1, 2, 3)


def test_lengths_are_checked():
    for bad in (dict(max_ngram=2, min_ngram=3), dict(min_ngram=0), dict(max_ngram=0)):
        with pytest.raises(ValueError, match="min_ngram <= max_ngram"):
            PromptLookupDrafter(**bad)


def search(tokens: list[int], gamma: int, longest: int) -> list[int]:
    """The same by going through all places, backwards."""
    for size in range(min(longest, len(tokens) - 1), 0, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                grown = list(tokens)
                for offset in range(gamma):
                    grown.append(grown[end + offset])
                return grown[len(tokens) :]
    return []


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    pieces=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=8),
    gamma=st.integers(1, 9),
    longest=st.integers(1, 4),
)
def test_lookup_finds_what_a_search_finds_however_the_tokens_arrive(pieces, gamma, longest):
    session = PromptLookupDrafter(max_ngram=longest).start(table(0), capacity=200)
    tokens: list[int] = []
    for piece in pieces:
        session.commit(Commit(tuple(piece)))
        tokens += piece
        assert list(session.propose(gamma, GREEDY, draws()).token_ids) == search(tokens, gamma, longest)


# autoregressive


@pytest.mark.parametrize("sampling", [GREEDY, SamplingConfig(temperature=1.0)], ids=["greedy", "sampled"])
def test_the_draft_cache_holds_committed_tokens_only(sampling):
    """Whatever share of a draft is kept, between rounds the cache is a prefix of the committed tokens."""
    session = AutoregressiveDrafter(table(1)).start(table(0), capacity=300)
    committed = [3, 1, 4, 1, 5]
    session.commit(Commit(tuple(committed)))
    generator = torch.Generator().manual_seed(0)
    for index in range(30):
        gamma = 1 + index % 6
        proposal = session.propose(gamma, sampling, draws(index))
        assert proposal.gamma == gamma
        kept = int(torch.randint(0, gamma + 1, (), generator=generator))
        fresh = [*proposal.token_ids[:kept], int(torch.randint(0, VOCAB, (), generator=generator))]
        session.commit(Commit(tuple(fresh)))
        committed += fresh
        held = session._session._tokens
        assert held == committed[: len(held)] and len(held) < len(committed)
        # what was fed and kept is not fed again: only the last draft and the extra token are new
        assert len(held) >= len(committed) - 2
    # and it drafts as a session that only ever saw the committed tokens
    fresh_session = AutoregressiveDrafter(table(1)).start(table(0), capacity=300)
    fresh_session.commit(Commit(tuple(committed)))
    assert session.propose(5, sampling, draws(99)).token_ids == fresh_session.propose(5, sampling, draws(99)).token_ids


def test_a_greedy_draft_is_the_draft_models_own_text():
    model = table(1)
    session = AutoregressiveDrafter(model).start(table(0), capacity=50)
    session.commit(Commit((3, 1)))
    plain = generate(model, None, [3, 1], DecodeConfig(max_new_tokens=6))
    proposal = session.propose(6, GREEDY, draws())
    assert list(proposal.token_ids) == plain.token_ids and proposal.draft_probs_GV is None
    assert proposal.draft_logits_GV.shape == (6, VOCAB)


def test_a_sampled_draft_hands_over_the_law_it_was_drawn_from():
    sampling = SamplingConfig(temperature=0.7, top_k=3)
    model = table(1)
    session = AutoregressiveDrafter(model).start(table(0), capacity=50)
    session.commit(Commit((3, 1)))
    proposal = session.propose(5, sampling, draws())
    tokens = [3, 1]
    for token, probs_V in zip(proposal.token_ids, proposal.draft_probs_GV, strict=True):
        expected_V = law(model.law_after(tokens).log()[None], sampling)[0]
        torch.testing.assert_close(probs_V, expected_V)
        assert int((probs_V > 0).sum()) == 3 and probs_V[token] > 0
        tokens.append(token)


def test_a_draft_model_of_another_vocabulary_is_refused():
    drafter = AutoregressiveDrafter(TableTarget.random(VOCAB + 1, name="other"))
    with pytest.raises(ValueError, match=f"other has {VOCAB + 1} tokens, the target {VOCAB}"):
        generate(table(0), drafter, [1, 2], DecodeConfig())


# through the decoding loop


@pytest.mark.parametrize("gamma", [1, 3, 8])
@pytest.mark.parametrize("drafter", [AutoregressiveDrafter(table(1)), PromptLookupDrafter()], ids=lambda d: d.name)
def test_a_drafter_that_is_often_wrong_changes_no_greedy_text(drafter, gamma):
    target = table(0)
    proposed = accepted = 0
    for first in range(VOCAB):
        config = DecodeConfig(gamma=gamma, max_new_tokens=40)
        plain = generate(target, None, [first, 2], config)
        result = generate(target, drafter, [first, 2], config)
        assert result.token_ids == plain.token_ids and len(result.token_ids) == 40
        proposed, accepted = proposed + result.num_proposed, accepted + result.num_accepted
    assert 0 < accepted < proposed


def test_drafts_get_shorter_where_the_draft_models_context_ends():
    target = table(0)
    drafter = AutoregressiveDrafter(table(0, max_context=16))
    config = DecodeConfig(gamma=5, max_new_tokens=30)
    result = generate(target, drafter, [1, 2, 3], config)
    assert result.token_ids == generate(target, None, [1, 2, 3], config).token_ids
    lengths = [record.gamma for record in result.rounds]
    # the draft model is the target here, so rounds go 5, 5, then what is left of 16 places, then nothing
    assert lengths[0] == 5 and 0 in lengths and lengths == sorted(lengths, reverse=True)
    for record in result.rounds:
        assert record.gamma == max(0, min(5, 16 - record.context_tokens))
    # a prompt that alone is longer than the draft model's context
    long = generate(target, drafter, list(range(VOCAB)) * 2, config)
    assert long.token_ids == generate(target, None, list(range(VOCAB)) * 2, config).token_ids
    assert long.num_proposed == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "make", [lambda: AutoregressiveDrafter(table(1)), lambda: PromptLookupDrafter()], ids=["autoregressive", "lookup"]
)
def test_the_second_request_is_as_on_a_fresh_object(make, temperature):
    """Also after a request that broke off in the middle."""
    config = DecodeConfig(gamma=4, temperature=temperature, max_new_tokens=25, seed=3)
    expected = generate(table(0), make(), [4, 4, 2], config, request_id="second")
    drafter, target = make(), table(0)
    generate(target, drafter, [7, 1, 4, 4, 9, 4, 4, 8], config, request_id="first")

    class Stop(Exception):
        pass

    def stop(tokens, sources):
        if "draft" in sources or "replacement" in sources:
            raise Stop

    with pytest.raises(Stop):
        generate(target, drafter, [4, 4, 8, 4, 4], config, request_id="broken", on_tokens=stop)
    again = generate(target, drafter, [4, 4, 2], config, request_id="second")
    assert again.token_ids == expected.token_ids and again.sources == expected.sources
    assert [r.draft_ids for r in again.rounds] == [r.draft_ids for r in expected.rounds]
