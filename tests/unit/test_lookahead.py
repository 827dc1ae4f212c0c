"""Lookahead: lossless, its first proposal is the target's own choice, its pool is bounded and its cache restored."""

from __future__ import annotations

import pytest
import torch

from dspec_lab.config import DecodeConfig, SamplingConfig
from dspec_lab.core.streams import DraftDraws, RandomStreams
from dspec_lab.drafters.lookahead import LookaheadDrafter, NgramPool
from dspec_lab.drafters.protocol import Commit
from dspec_lab.models.toy import TableTarget
from dspec_lab.verifier.decode import generate
from dspec_lab.verifier.enumerate import max_deviation, output_law


def cyclic_target(vocab=12):
    """Token t is nearly always followed by t + 1."""
    probs = torch.full((vocab, vocab), 0.01 / (vocab - 1), dtype=torch.float64)
    for token in range(vocab):
        probs[token, (token + 1) % vocab] = 0.99
    return TableTarget(probs)


@pytest.mark.parametrize("seed", range(4))
def test_greedy_text_is_the_targets(seed):
    target = TableTarget.random(9, order=2, sharpness=2.0, seed=seed)
    plain = generate(target, None, [1, 4, 2], DecodeConfig(max_new_tokens=40))
    spec = generate(target, LookaheadDrafter(window=5, ngram=3), [1, 4, 2], DecodeConfig(gamma=4, max_new_tokens=40))
    assert spec.token_ids == plain.token_ids
    # the first proposal is the target's own choice, so every round but a cut last one gains two tokens or more
    assert all(record.num_accepted >= 1 for record in spec.rounds if record.gamma)


def test_each_pass_refines_the_guesses_of_the_last():
    """One Jacobi step: the guess for a place becomes the target's choice after the guess before it."""
    target = TableTarget.random(9, order=1, sharpness=3.0, seed=2)
    choice = target.probs.argmax(-1).tolist()
    session = LookaheadDrafter(window=4).start(target, capacity=40)
    session.commit(Commit((1, 2, 3)))
    first = session._jacobi_pass()
    # an empty window starts with earlier text
    start = [session._tokens[(2 - 4 + i) % 3] for i in range(4)]
    assert first == [choice[token] for token in [3, *start]]
    session.commit(Commit((first[0], 7)))
    second = session._jacobi_pass()
    # the anchor moved on by two, so the guesses for the places behind it are the last pass's from its third on
    assert second[: 1 + len(first[2:])] == [choice[token] for token in [7, *first[2:]]]
    assert len(second) == 5 and session._target.length == 5


def test_repeating_text_is_drafted_whole():
    spec = generate(cyclic_target(), LookaheadDrafter(), [0], DecodeConfig(gamma=6, max_new_tokens=60))
    assert spec.token_ids == [(1 + i) % 12 for i in range(60)]
    assert [record.num_accepted for record in spec.rounds[-4:-1]] == [6, 6, 6]


def test_ngrams_of_the_text_are_reused():
    session = LookaheadDrafter(window=1, ngram=4).start(TableTarget.random(30, order=2, seed=1), capacity=60)
    session.commit(Commit((5, 6, 7, 8, 20, 21, 22)))
    first = session.propose(1, SamplingConfig(), DraftDraws(RandomStreams(0), 0)).token_ids[0]
    session.commit(Commit((first, 9, 10, 11, 22)))
    draft = session.propose(4, SamplingConfig(), DraftDraws(RandomStreams(0), 1)).token_ids
    if draft[0] == first:
        assert draft[1:4] == (9, 10, 11)
    assert session._pool.newest(5) == (6, 7, 8) and session._pool.newest(first) == (9, 10, 11)


def test_diagonal_ngrams_join_tokens_of_successive_passes():
    session = LookaheadDrafter(window=3, ngram=3).start(cyclic_target(), capacity=60)
    session._passes.append({4: (40, False), 5: (50, True), 6: (60, True), 7: (70, False)})
    session._passes.append({5: (51, True), 6: (61, True), 7: (71, True), 8: (81, False)})
    session._collect(5, [62, 72, 82, 92])
    # (place 4 two passes ago, place 5 one pass ago, place 6 now), and so on
    assert session._pool.newest(40) == (51, 62)
    assert session._pool.newest(50) == (61, 72)
    assert session._pool.newest(60) == (71, 82)
    # place 8 was filled from earlier text, not chosen after place 7
    assert session._pool.newest(70) == ()


def test_the_draft_depends_on_committed_tokens_alone():
    target = TableTarget.random(9, order=1, sharpness=1.0, seed=5)

    def proposals(temperature, seed):
        session = LookaheadDrafter(window=4).start(target, capacity=40)
        session.commit(Commit((1, 2, 3)))
        got = [session.propose(3, SamplingConfig(temperature=temperature), DraftDraws(RandomStreams(seed), 0))]
        session.commit(Commit((8, 8)))
        got.append(session.propose(3, SamplingConfig(temperature=temperature), DraftDraws(RandomStreams(seed), 1)))
        assert session._target.length == 5
        return [(p.kind, p.token_ids) for p in got]

    assert proposals(1.0, 0) == proposals(0.3, 7) and proposals(1.0, 0)[0][0] == "one_hot"


def test_output_law_is_the_targets_exactly():
    target = TableTarget.random(3, order=2, sharpness=1.5, seed=8)
    config = DecodeConfig(gamma=2, max_new_tokens=5, temperature=1.0)

    def run(chooser):
        return tuple(generate(target, LookaheadDrafter(window=2, ngram=2), [0, 2], config, chooser=chooser).token_ids)

    gap, _ = max_deviation(output_law(run), target.sequence_law([0, 2], 5))
    # float64 products of a few numbers
    assert gap < 1e-12


def test_pool_is_bounded_and_forgets_the_longest_unused():
    pool = NgramPool(max_tokens=2, per_token=2)
    for ngram in ((1, 10), (2, 20), (1, 11), (1, 12)):
        pool.add(ngram)
    assert pool.newest(1) == (12,) and pool._found[1] == [(12,), (11,)]
    pool.newest(2)
    pool.add((3, 30))
    assert len(pool) == 2 and pool.newest(1) == () and pool.newest(2) == (20,)


def test_room_at_the_end_of_the_context():
    target = TableTarget.random(9, order=1, seed=3, max_context=20)
    spec = generate(target, LookaheadDrafter(window=8), [1, 2], DecodeConfig(gamma=4, max_new_tokens=18))
    assert spec.token_ids == generate(target, None, [1, 2], DecodeConfig(max_new_tokens=18)).token_ids


def test_bad_settings():
    with pytest.raises(ValueError, match="got 0, 4"):
        LookaheadDrafter(window=0)
    session = LookaheadDrafter().start(cyclic_target(), capacity=20)
    with pytest.raises(ValueError, match="before the prompt was committed"):
        session.propose(2, SamplingConfig(), DraftDraws(RandomStreams(0), 0))
