"""Distance terms, the teacher's laws, and the sampled vocabulary."""

from __future__ import annotations

import math

import pytest
import torch

from dspec_lab.checkpoints.layout import build_model
from dspec_lab.drafters.architecture import MedusaArchitecture
from dspec_lab.training.fused_terms import NO_HIT, distance_terms
from dspec_lab.training.teacher import Teacher
from dspec_lab.training.terms import model_row_terms, row_terms
from dspec_lab.training.vocabulary_sample import sample_vocabulary


def laws(rows=6, width=11, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draft = torch.randn(rows, width, generator=generator, dtype=torch.float64) * 2
    teacher = torch.randn(rows, width, generator=generator, dtype=torch.float64) * 2
    return draft, torch.softmax(teacher, -1), torch.tensor([0, 3, -1, 10, 5, -1])


def test_hand_written_gradient_is_that_of_the_terms():
    draft, p, labels = laws()
    missed = torch.zeros(6, dtype=torch.float64)
    weights = torch.arange(1.0, 7.0, dtype=torch.float64)

    def mixed(logits):
        ce, soft, l1, _ = distance_terms(logits, p, missed, labels)
        return 0.3 * (weights * ce).sum() + 0.5 * (weights * soft).sum() + 0.7 * (weights * l1).sum()

    assert torch.autograd.gradcheck(mixed, (draft.requires_grad_(True),), eps=1e-7, atol=1e-5)


def test_values_are_those_of_the_formula():
    draft, p, labels = laws()
    expected = row_terms(draft.float(), p.float().log(), labels)
    ce, soft, l1, best = distance_terms(draft, p, torch.zeros(6, dtype=torch.float64), labels)
    for got, want in ((ce, expected.cross_entropy_N), (soft, expected.soft_cross_entropy_N), (l1, expected.l1_N)):
        torch.testing.assert_close(got.float(), want, rtol=0, atol=1e-5)
    assert (best == draft.argmax(-1)).all()
    far = distance_terms(draft * 200, p, torch.zeros(6, dtype=torch.float64), labels)
    assert all(torch.isfinite(part).all() for part in far), "large logits must not overflow"


def reduced_model(target, kept=60):
    arch = MedusaArchitecture(
        spec=target.spec, num_target_layers=target.num_layers, medusa_num_heads=1, draft_vocab_size=kept
    )
    model = build_model(arch)
    model.keep_tokens(torch.arange(3, 3 + kept))
    model.share(embedding=target.embedding, head=target.head)
    return model


def test_the_normaliser_spares_the_tokens_that_are_not_kept(tiny_target):
    model = reduced_model(tiny_target)
    hidden = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(2))
    # the likeliest token of position 3 is one that is not kept, of position 9 one that is
    hidden[0, 3], hidden[1, 4] = 5 * tiny_target.head()[1], 5 * tiny_target.head()[40]
    lse = (hidden @ tiny_target.head().T).logsumexp(-1)
    index = torch.tensor([0, 3, 3, 9])
    whole, sparing = Teacher(model, hidden).law(index), Teacher(model, hidden, lse).law(index)
    torch.testing.assert_close(whole.probs_NW, sparing.probs_NW, rtol=0, atol=1e-6)
    torch.testing.assert_close(whole.missed_N, sparing.missed_N, rtol=0, atol=1e-6)
    full = torch.softmax(hidden.flatten(0, 1)[index] @ tiny_target.head().T, -1)
    torch.testing.assert_close(whole.probs_NW, full[:, 3:63], rtol=0, atol=1e-6)
    torch.testing.assert_close(whole.missed_N, 1 - full[:, 3:63].sum(-1), rtol=0, atol=1e-6)
    assert sparing.top_N.tolist()[1:] == [NO_HIT, NO_HIT, 40 - 3]
    kept = full.argmax(-1) - 3
    assert whole.top_N.tolist() == [int(k) if 0 <= k < 60 else NO_HIT for k in kept]
    prepared = Teacher(model, hidden, lse)
    prepared.prepare(index)
    torch.testing.assert_close(prepared.law(index).probs_NW, sparing.probs_NW)


def test_rows_in_chunks_and_rows_made_again_agree(tiny_target):
    model = reduced_model(tiny_target)
    generator = torch.Generator().manual_seed(4)
    last = torch.randn(1, 30, 32, generator=generator)
    index, labels = torch.arange(30), torch.randint(0, 89, (30,), generator=generator)
    grads = []
    for chunk, keep in ((30, 2**30), (7, 2**30), (7, 0)):
        hidden = torch.randn(30, 32, generator=torch.Generator().manual_seed(5)).requires_grad_(True)
        terms = model_row_terms(
            model, hidden, None, Teacher(model, last), index, labels, rows_per_chunk=chunk, keep_bytes=keep
        )
        (terms.l1_N.sum() + terms.cross_entropy_N.sum()).backward()
        grads.append(hidden.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=1e-6)
    torch.testing.assert_close(grads[1], grads[2], rtol=0, atol=1e-6)


def test_sampled_tokens_stand_for_the_rest():
    certain = torch.tensor([1, 4, 4, -1, 9])
    sample = sample_vocabulary(40, certain, 6, torch.Generator().manual_seed(0))
    assert len(sample.index_S) == 3 + 6 and sample.index_S.tolist() == sorted(sample.index_S.tolist())
    assert {1, 4, 9} <= set(sample.index_S.tolist())
    weights = sample.log_weight_S.exp()
    assert math.isclose(float(weights.sum()), 40, rel_tol=1e-5)
    assert weights[sample.place(torch.tensor([1, 4, 9]))].tolist() == [1, 1, 1]
    assert sample.place(torch.tensor([-1])).tolist() == [-1]
    whole = sample_vocabulary(40, certain, 100, torch.Generator())
    assert len(whole.index_S) == 40 and not whole.log_weight_S.any()
    with pytest.raises(ValueError, match="0"):
        sample_vocabulary(40, certain, 0, torch.Generator())


def test_sums_over_the_sample_are_unbiased():
    logits = torch.randn(40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    generator, total, count = torch.Generator().manual_seed(2), 0.0, 4000
    for _ in range(count):
        sample = sample_vocabulary(40, torch.tensor([0, 1, 2]), 5, generator)
        total += float((logits[sample.index_S] + sample.log_weight_S).exp().sum())
    assert math.isclose(total / count, float(logits.exp().sum()), rel_tol=0.02)
