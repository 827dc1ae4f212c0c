"""Random streams: addressed, independent by purpose and request, 53 bits, never 0 or 1; draws by inverse CDF."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspec_lab.core.streams import PURPOSES, RandomStreams, inverse_cdf

SMALLEST = 2.0**-54  # half a cell of 2^-53


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**40),
    purpose=st.sampled_from(PURPOSES),
    round_index=st.integers(0, 2**41),
    slot=st.integers(0, 40),
    before=st.lists(st.tuples(st.sampled_from(PURPOSES), st.integers(0, 50), st.integers(1, 40)), max_size=30),
)
def test_an_address_gives_its_number_whatever_was_drawn_before(
    seed: int, purpose: str, round_index: int, slot: int, before: list[tuple[str, int, int]]
) -> None:
    fresh = RandomStreams(seed, "r").uniforms(purpose, round_index, slot + 1)[slot]
    used = RandomStreams(seed, "r")
    for other_purpose, other_round, count in before:
        used.uniforms(other_purpose, other_round, count)
    torch.rand(3), np.random.random(3)
    assert used.uniforms(purpose, round_index, slot + 1)[slot] == fresh
    assert used.uniforms(purpose, round_index, slot + 9)[slot] == fresh
    assert 0 < fresh < 1


def test_addresses_do_not_share_numbers() -> None:
    numbers = [
        number
        for seed, request, purpose, round_index in itertools.product((0, 1), ("a", "b"), PURPOSES, (0, 1, 2, 2**40))
        for number in RandomStreams(seed, request).uniforms(purpose, round_index, 64)
    ]
    assert len(set(numbers)) == len(numbers)


def test_seed_request_and_purpose_are_kept_apart_in_the_key() -> None:
    # "1" + "23" and "12" + "3" must not be one key
    assert RandomStreams(1, "23").uniforms("draft", 0, 4) != RandomStreams(12, "3").uniforms("draft", 0, 4)
    assert RandomStreams(1, "0/draft").uniforms("draft", 0, 4) != RandomStreams(1, "0").uniforms("draft", 0, 4)


def test_purposes_slots_and_rounds_are_independent() -> None:
    rounds, slots = 4000, 4
    streams = RandomStreams(3, "x")
    columns = np.array(
        [
            [number for purpose in PURPOSES for number in streams.uniforms(purpose, index, slots)]
            for index in range(rounds)
        ]
    )
    columns = np.hstack([columns, np.roll(columns, 1, axis=0)])  # and the round before
    correlation = np.corrcoef(columns, rowvar=False)
    off = correlation[~np.eye(correlation.shape[0], dtype=bool)]
    # 780 pairs, standard error 1 / sqrt(4000): five of it are passed by chance once in 2000 such tests
    assert float(np.abs(off).max()) < 5 / rounds**0.5
    cells = np.histogram(columns, bins=20, range=(0, 1))[0]
    expected = columns.size / 20
    assert float(((cells - expected) ** 2 / expected).sum()) < 80  # 19 degrees of freedom, and every number twice


def test_numbers_have_53_bits_and_are_centred() -> None:
    numbers = np.array([n for index in range(200) for n in RandomStreams(0).uniforms("accept", index, 64)])
    cells = numbers * 2.0**53 - 0.5
    assert np.array_equal(cells, np.floor(cells)), "a number lies off the centre of its cell"
    low_bits = cells.astype(np.uint64) & np.uint64(2**29 - 1)
    # numbers made from 24 bits would have none of these
    assert len(np.unique(low_bits)) > 0.99 * len(numbers)
    assert numbers.min() >= SMALLEST and numbers.max() <= 1 - SMALLEST


def test_bernoulli_is_certain_at_0_and_1() -> None:
    streams = RandomStreams(5)
    for slot in range(500):
        assert streams.bernoulli("accept", 0, slot, 1.0) is True
        assert streams.bernoulli("accept", 0, slot, 0.0) is False


def test_negative_seeds_are_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        RandomStreams(-1)


@settings(max_examples=200, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.0, 0.0, 1e-9, 0.3, 1.0, 7.0]), min_size=1, max_size=8).filter(any),
    uniform=st.floats(SMALLEST, 1 - SMALLEST),
)
def test_inverse_cdf_gives_the_token_whose_interval_holds_the_number(weights: list[float], uniform: float) -> None:
    token = inverse_cdf(torch.tensor(weights, dtype=torch.float64), uniform)
    assert weights[token] > 0
    total = sum(weights)
    below, above = sum(weights[:token]) / total, sum(weights[: token + 1]) / total
    assert below - 1e-12 <= uniform <= above + 1e-12


def test_extremes_of_the_number_reach_the_first_and_last_token_with_mass() -> None:
    weights_V = torch.tensor([0.0, 2.0, 1.0, 3.0, 0.0, 0.0])
    assert inverse_cdf(weights_V, SMALLEST) == 1
    assert inverse_cdf(weights_V, 1 - SMALLEST) == 3
    # u times the total rounds up to the total here; no token without mass may come of it
    thirds_V = torch.tensor([1 / 3, 1 / 3, 1 / 3, 0.0])
    assert inverse_cdf(thirds_V, 1 - 2.0**-53) == 2


def test_weights_without_a_sum_are_refused() -> None:
    for weights in ([0.0, 0.0], [float("nan"), 1.0], [float("inf"), 1.0]):
        with pytest.raises(ValueError, match="sum to"):
            inverse_cdf(torch.tensor(weights), 0.5)


def test_rare_tokens_of_a_large_vocabulary_come_as_often_as_they_should() -> None:
    vocab, rare = 262_144, 1e-9
    probs_V = torch.full((vocab,), rare, dtype=torch.float32)
    probs_V[0] = 1 - rare * (vocab - 1)
    total = float(probs_V.double().sum())
    cdf = probs_V.double().cumsum(0)
    # the middle and both edges of a rare token's interval: it is found, its neighbours beyond the edges
    for token in (1, 2, 1000, 131_072, vocab - 2):
        low, high = float(cdf[token - 1]) / total, float(cdf[token]) / total
        width = high - low
        assert width == pytest.approx(rare, rel=1e-3)
        assert inverse_cdf(probs_V, low + 0.5 * width) == token
        assert inverse_cdf(probs_V, low - 0.01 * width) == token - 1
        assert inverse_cdf(probs_V, high + 0.01 * width) == token + 1
    # equally spaced numbers through 2000 tokens' worth of mass: each token once
    start = float(cdf[5000]) / total
    hits = [inverse_cdf(probs_V, start + (index + 0.5) * rare / total) for index in range(0, 2000, 50)]
    assert hits == [5001 + index for index in range(0, 2000, 50)]


@pytest.mark.parametrize("vocab", [1, 255, 256, 257, 1000, 4096])
def test_blocks_of_the_cdf_change_no_draw(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    probs_V = torch.rand(vocab, generator=generator)
    probs_V[torch.rand(vocab, generator=generator) < 0.6] = 0.0
    probs_V[-1 - vocab // 3 :] = 0.0
    probs_V[0] = 0.25
    cdf_V = probs_V.double().cumsum(0)
    for uniform in torch.rand(60, generator=generator, dtype=torch.float64).tolist():
        expected = int(torch.searchsorted(cdf_V, uniform * float(cdf_V[-1]), right=True))
        assert inverse_cdf(probs_V, uniform) == expected
    last = int(probs_V.nonzero()[-1])
    assert inverse_cdf(probs_V, 1 - 2.0**-53) == last
    # the edges of each token's own interval, those at the borders of blocks too
    for token in probs_V.nonzero()[:, 0].tolist()[:: max(1, vocab // 50)]:
        middle = float(cdf_V[token] - probs_V[token].double() / 2) / float(cdf_V[-1])
        assert inverse_cdf(probs_V, middle) == token


def test_the_thread_count_changes_no_draw() -> None:
    probs_V = torch.rand(49_152, generator=torch.Generator().manual_seed(1)) ** 8
    numbers, before = [(i + 0.5) / 60 for i in range(60)], torch.get_num_threads()
    draws = {}
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            draws[threads] = [inverse_cdf(probs_V, number) for number in numbers]
    finally:
        torch.set_num_threads(before)
    assert draws[1] == draws[2] == draws[3]


def test_a_round_draws_the_same_whatever_was_drawn_before_it() -> None:
    first, second = RandomStreams(3, "a"), RandomStreams(3, "a")
    wanted = {(purpose, r): first.uniforms(purpose, r, 20) for r in range(40) for purpose in PURPOSES}
    for r in (39, 0, 2**40, 17, 5):  # another order, and widths that leave numbers over
        for purpose in PURPOSES:
            got = second.uniforms(purpose, r, 3)
            assert r == 2**40 or got == wanted[purpose, r][:3]
