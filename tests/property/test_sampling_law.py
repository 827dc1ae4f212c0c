"""Temperature, top-k, top-p: order, ties, sizes, the same for p and q; rows without a law raise and are named."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspec_lab.config import SamplingConfig
from dspec_lab.core.sampling import NUCLEUS_SEARCH, NonFiniteLogitsError, entropy_bits, greedy_ids, law
from dspec_lab.core.streams import DraftDraws, RandomStreams
from dspec_lab.drafters.autoregressive import AutoregressiveDrafter
from dspec_lab.drafters.protocol import Commit
from dspec_lab.models.toy import TableTarget
from dspec_lab.verifier.known_law import filtered

# ties are common
LOGITS = st.lists(st.integers(-3, 3), min_size=2, max_size=9)
SAMPLING = st.builds(
    SamplingConfig,
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.9]),
    top_k=st.integers(0, 9),
    # never at the border of a nucleus of such rows, where rounding decides
    top_p=st.sampled_from([0.11, 0.37, 0.613, 0.871, 1.0]),
)


@settings(max_examples=200, deadline=None)
@given(row=LOGITS, sampling=SAMPLING)
def test_the_law_is_the_plain_definition(row: list[int], sampling: SamplingConfig) -> None:
    weights = [math.exp(value) for value in row]
    wanted = filtered([weight / sum(weights) for weight in weights], sampling)
    got_1V = law(torch.tensor([row], dtype=torch.float64), sampling)
    torch.testing.assert_close(got_1V[0], torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-12)


@settings(max_examples=100, deadline=None)
@given(rows=st.lists(LOGITS, min_size=1, max_size=4), k=st.integers(1, 9))
def test_top_k_keeps_exactly_k_lowest_ids_of_a_tie(rows: list[list[int]], k: int) -> None:
    for row in rows:
        kept = law(torch.tensor([row], dtype=torch.float32), SamplingConfig(temperature=1.0, top_k=k))[0] > 0
        order = sorted(range(len(row)), key=lambda token: (-row[token], token))
        assert kept.nonzero().flatten().tolist() == sorted(order[:k])


@settings(max_examples=100, deadline=None)
@given(row=LOGITS, top_p=st.floats(0.05, 0.99))
def test_the_nucleus_is_the_smallest_set_that_reaches_top_p(row: list[int], top_p: float) -> None:
    plain_V = torch.softmax(torch.tensor(row, dtype=torch.float64), -1)
    kept_V = law(torch.tensor([row], dtype=torch.float64), SamplingConfig(temperature=1.0, top_p=top_p))[0] > 0
    mass, smallest = float(plain_V[kept_V].sum()), float(plain_V[kept_V].min())
    assert mass >= top_p - 1e-9
    assert mass - smallest < top_p + 1e-9
    # nothing likelier was left out
    assert float(plain_V[~kept_V].max() if (~kept_V).any() else 0.0) <= smallest


def test_the_order_is_temperature_then_top_k_then_top_p() -> None:
    probs_V = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    logits_1V = probs_V.log()[None]
    # top-k 2 leaves 4/7 and 3/7: a nucleus of 0.5 is then one token, of all four it would be two
    assert law(logits_1V, SamplingConfig(temperature=1.0, top_k=2, top_p=0.5))[0].tolist() == [1, 0, 0, 0]
    # temperature 0.5 squares the weights first: 16/30 reaches 0.5 alone
    assert law(logits_1V, SamplingConfig(temperature=0.5, top_p=0.5))[0].tolist() == [1, 0, 0, 0]
    assert (law(logits_1V, SamplingConfig(temperature=1.0, top_p=0.5))[0] > 0).tolist() == [True, True, False, False]


def test_a_nucleus_wider_than_the_search_is_found() -> None:
    vocab = 4 * NUCLEUS_SEARCH
    probs_1V = law(torch.zeros(1, vocab), SamplingConfig(temperature=1.0, top_p=0.75))
    kept = probs_1V[0] > 0
    assert int(kept.sum()) == 3 * NUCLEUS_SEARCH
    assert bool(kept[: 3 * NUCLEUS_SEARCH].all())
    torch.testing.assert_close(float(probs_1V.double().sum()), 1.0, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_laws_are_fp32_or_wider(dtype: torch.dtype) -> None:
    logits_NV = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    wanted = torch.float64 if dtype == torch.float64 else torch.float32
    for sampling in (
        SamplingConfig(temperature=0.0),
        SamplingConfig(temperature=0.7),
        SamplingConfig(temperature=1.3, top_k=7, top_p=0.9),
    ):
        probs_NV = law(logits_NV, sampling)
        assert probs_NV.dtype == wanted
        torch.testing.assert_close(probs_NV.sum(-1), torch.ones(3, dtype=wanted), rtol=0, atol=1e-6)
    if dtype == torch.float64:
        # float64 in name only would show here
        exact_NV = torch.softmax(logits_NV, -1)
        assert float((law(logits_NV, SamplingConfig(temperature=1.0)) - exact_NV).abs().max()) < 1e-15


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("sampling", [SamplingConfig(temperature=0.0), SamplingConfig(temperature=1.0, top_k=2)])
def test_a_row_with_nan_or_inf_raises_and_is_named(bad: float, sampling: SamplingConfig) -> None:
    logits_NV = torch.zeros(4, 6)
    logits_NV[2, 5] = bad
    with pytest.raises(NonFiniteLogitsError, match=r"draft logits of row 2 are not finite"):
        law(logits_NV, sampling, what="draft")


def test_a_row_of_nothing_but_minus_inf_raises_and_single_entries_are_fine() -> None:
    logits_NV = torch.zeros(2, 3)
    logits_NV[0, 0] = float("-inf")
    assert law(logits_NV, SamplingConfig(temperature=1.0))[0].tolist() == [0.0, 0.5, 0.5]
    logits_NV[1] = float("-inf")
    with pytest.raises(NonFiniteLogitsError, match="row 1"):
        law(logits_NV, SamplingConfig(temperature=1.0))
    with pytest.raises(NonFiniteLogitsError, match="row 1"):
        greedy_ids(logits_NV)


@settings(max_examples=60, deadline=None)
@given(row=LOGITS)
def test_greedy_takes_the_first_largest(row: list[int]) -> None:
    assert greedy_ids(torch.tensor([row], dtype=torch.float32)) == [row.index(max(row))]
    one_hot_V = law(torch.tensor([row], dtype=torch.float32), SamplingConfig(temperature=0.0))[0]
    assert one_hot_V.tolist() == [float(token == row.index(max(row))) for token in range(len(row))]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 99), sampling=SAMPLING.filter(lambda s: not s.greedy))
def test_the_filters_of_the_request_apply_to_q(seed: int, sampling: SamplingConfig) -> None:
    draft = TableTarget.random(6, seed=seed)
    session = AutoregressiveDrafter(draft).start(TableTarget.random(6, seed=seed + 1), capacity=16)
    session.commit(Commit((2, 4)))
    proposal = session.propose(3, sampling, DraftDraws(RandomStreams(seed), 0))
    assert proposal.draft_probs_GV is not None
    context = 4
    for token, row_V in zip(proposal.token_ids, proposal.draft_probs_GV, strict=True):
        wanted = filtered(draft.law_after([context]).tolist(), sampling)
        torch.testing.assert_close(row_V, torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-9)
        assert row_V[token] > 0
        context = token


def test_entropy_in_bits() -> None:
    tenth_1V = torch.zeros(1, 10)
    assert float(entropy_bits(tenth_1V)[0]) == pytest.approx(3.3219, abs=1e-4)
    nine_to_one = torch.tensor([[0.9, 0.1]]).log()
    assert float(entropy_bits(nine_to_one)[0]) == pytest.approx(0.469, abs=1e-3)
    certain = torch.tensor([[0.0, float("-inf")]])
    assert float(entropy_bits(certain)[0]) == 0.0


@pytest.mark.parametrize("vocab", [5, 1000, 49_152])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), None])
def test_one_bad_entry_anywhere_makes_the_row_raise(vocab: int, bad: float | None) -> None:
    for where in (0, vocab // 2, vocab - 1):
        logits_NV = torch.randn(3, vocab, generator=torch.Generator().manual_seed(0))
        logits_NV[1] = logits_NV[1].index_fill(0, torch.tensor([where]), bad) if bad is not None else float("-inf")
        for sampling in (SamplingConfig(temperature=1.0), SamplingConfig(temperature=0.5, top_k=2)):
            with pytest.raises(NonFiniteLogitsError, match="row 1 are not finite"):
                law(logits_NV, sampling)
        with pytest.raises(NonFiniteLogitsError, match="row 1 are not finite"):
            greedy_ids(logits_NV)
    # a probability of 0 in the first place is no fault
    assert float(law(torch.tensor([[float("-inf"), 0.0]]), SamplingConfig(temperature=1.0))[0, 1]) == 1.0
