"""A batch gives each request what it gets alone, whatever its neighbours."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dspec_lab.config import DecodeConfig
from dspec_lab.core.sampling import NonFiniteLogitsError
from dspec_lab.drafters.autoregressive import AutoregressiveDrafter
from dspec_lab.drafters.prompt_lookup import PromptLookupDrafter
from dspec_lab.kernels.native_rows import MANY_ROWS
from dspec_lab.models.decoder import LeanDecoder
from dspec_lab.models.family import model_spec
from dspec_lab.models.weights import DecoderWeights, LayerWeights
from dspec_lab.verifier import ragged
from dspec_lab.verifier.decode import generate
from dspec_lab.verifier.ragged import BatchRequest, RaggedBatch, extend_ragged, generate_batch

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "vocab_size": 61,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


def tiny_decoder(seed: int = 0) -> LeanDecoder:
    spec = model_spec(CONFIG)
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.4

    layers = tuple(
        LayerWeights(
            qkv=draw(64, 32), qkv_bias=None, out=draw(32, 32), out_bias=None, gate_up=draw(96, 32), down=draw(32, 48),
            norm_in=1 + draw(32), norm_mid=1 + draw(32), norm_after_attention=None, norm_after_mlp=None,
            q_norm=None, k_norm=None, scalar=1.0,
        )
        for _ in range(3)
    )  # fmt: skip
    embedding = draw(61, 32)
    weights = DecoderWeights(embedding=embedding, head=embedding, norm=1 + draw(32), layers=layers)
    return LeanDecoder(weights, spec, name="tiny", eos_ids=[7])


def mixed_requests(target: LeanDecoder, count: int) -> list[BatchRequest]:
    """Requests that differ in prompt, length, drafter, draft length, temperature, filters, rule and seed."""
    drafters = [PromptLookupDrafter(), AutoregressiveDrafter(target.keep_layers([0, 1], name="shallow")), None]
    generator = torch.Generator().manual_seed(3)
    requests = []
    for i in range(count):
        length = int(torch.randint(1, 40, (1,), generator=generator))
        prompt = tuple(torch.randint(0, 61, (length,), generator=generator).tolist())
        config = DecodeConfig(
            gamma=1 + i % 6,
            temperature=(0.0, 1.0, 0.7)[i % 3],
            top_k=(0, 5)[i % 2],
            max_new_tokens=10 + 3 * (i % 5),
            seed=i // 2,
            verification=("token", "block")[i % 2],
        )
        drafter = drafters[(i // 2) % 3]
        requests.append(BatchRequest(request_id=f"r{i}", prompt_ids=prompt, config=config, drafter=drafter))
    return requests


@pytest.mark.parametrize("max_active", [1, 3, 16])
def test_each_request_gets_what_it_gets_alone(max_active: int) -> None:
    target = tiny_decoder()
    requests = mixed_requests(target, 16)
    together = generate_batch(target, requests, max_active=max_active)
    accepted = rejected = 0
    for wanted in requests:
        alone = generate(target, wanted.drafter, wanted.prompt_ids, wanted.config, request_id=wanted.request_id)
        got = together[wanted.request_id]
        assert got.token_ids == alone.token_ids
        assert got.sources == alone.sources
        assert got.finish_reason == alone.finish_reason
        assert [r.num_accepted for r in got.rounds] == [r.num_accepted for r in alone.rounds]
        accepted += got.num_accepted
        rejected += got.num_proposed - got.num_accepted
    assert accepted and rejected


def test_rows_of_a_pass_are_the_rows_of_single_passes() -> None:
    target = tiny_decoder(1)
    prompts, feeds = [[1, 2, 3], [4] * 40, [9]], [[5, 6], [8, 9, 10, 11], [12]]
    together, alone = [], []
    for prompt in prompts:
        together.append(target.session(capacity=64))
        alone.append(target.session(capacity=64))
        together[-1].extend(prompt)
        alone[-1].extend(prompt)
    rows = extend_ragged(together, feeds)
    for session, feed, got, shared in zip(alone, feeds, rows, together, strict=True):
        expected = session.extend(feed).logits_JV
        if target.ops.name == "native":
            assert torch.equal(got.logits_JV, expected)
        torch.testing.assert_close(got.logits_JV, expected)
        assert shared.length == session.length


def test_a_neighbour_that_leaves_changes_nothing() -> None:
    target = tiny_decoder(2)
    first, second = mixed_requests(target, 2)
    batch = RaggedBatch(target)
    assert batch.join(first) is None and batch.join(second) is None
    batch.step()
    partial = batch.leave(second.request_id)
    assert partial.token_ids
    results: dict = {}
    while len(batch):
        results |= batch.step()
    alone = generate(target, first.drafter, first.prompt_ids, first.config, request_id=first.request_id)
    assert results[first.request_id].token_ids == alone.token_ids


def test_a_policy_shortens_drafts_and_keeps_greedy_text() -> None:
    target = tiny_decoder()
    drafter = AutoregressiveDrafter(target.keep_layers([0, 1], name="shallow"))
    config = DecodeConfig(gamma=5, max_new_tokens=24, ignore_eos=True)
    requests = [
        BatchRequest(request_id=str(i), prompt_ids=(i + 1, 3), config=config, drafter=drafter) for i in range(4)
    ]
    seen: list[int] = []

    def policy(active: object) -> list[int]:
        lengths = [min(request.proposal.gamma, i % 3) for i, request in enumerate(active)]  # type: ignore[arg-type]
        seen.extend(lengths)
        return lengths

    results = generate_batch(target, requests, policy=policy)
    assert set(seen) == {0, 1, 2}
    for wanted in requests:
        plain = generate(target, None, wanted.prompt_ids, wanted.config)
        assert results[wanted.request_id].token_ids == plain.token_ids


@pytest.mark.parametrize("requests", [17, 33])
def test_more_rows_than_one_product_takes_change_nothing(requests: int) -> None:
    target = tiny_decoder(1)
    if target.ops.name != "native":
        pytest.skip("rows are the same bits on the compiled row ops only")
    feeds = [[(7 * i + 3 * j) % 61 for j in range(8)] for i in range(requests)]
    together, alone = [], []
    for i in range(requests):
        for held in (together, alone):
            held.append(target.session(capacity=64))
            held[-1].extend([(5 * i + j) % 61 for j in range(1 + i)])
    assert sum(map(len, feeds)) > MANY_ROWS
    for got, shared, session, feed in zip(extend_ragged(together, feeds), together, alone, feeds, strict=True):
        assert torch.equal(got.logits_JV, session.extend(feed).logits_JV)
        assert shared.length == session.length


def test_requests_may_leave_while_tokens_are_shown() -> None:
    target = tiny_decoder()
    config = DecodeConfig(max_new_tokens=6, ignore_eos=True)
    batch, left = RaggedBatch(target), {}

    def cancel(*names: str):  # type: ignore[no-untyped-def]
        # the batch is asked for whoever is in it: not yet while the prompt is read
        return lambda tokens, sources: left.update({n: batch.leave(n) for n in names if n not in left and batch.rounds})

    asked = {"itself": cancel("itself"), "other": cancel("victim"), "victim": None, "stays": None}
    for i, (name, on_tokens) in enumerate(asked.items()):
        wanted = BatchRequest(request_id=name, prompt_ids=(1 + i, 3), config=config, on_tokens=on_tokens)
        assert batch.join(wanted) is None
    results: dict = {}
    while len(batch):
        results |= batch.step()
    assert set(left) == {"itself", "victim"} and set(results) == {"other", "stays"}
    assert len(left["victim"].token_ids) == 2  # nothing was added after it left
    for name, prompt in (("other", (2, 3)), ("stays", (4, 3))):
        assert results[name].token_ids == generate(target, None, prompt, config).token_ids


def test_a_request_that_fails_takes_nothing_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_decoder(2)
    config = DecodeConfig(gamma=3, max_new_tokens=14, temperature=1.0, ignore_eos=True)
    drafter = AutoregressiveDrafter(target.keep_layers([0, 1], name="shallow"))
    requests = [
        BatchRequest(request_id=f"r{i}", prompt_ids=(1 + i, 3), config=config, drafter=drafter) for i in range(3)
    ]
    # the first ends in the very round in which the second fails
    requests[0] = replace(requests[0], config=replace(config, max_new_tokens=2))
    batch = RaggedBatch(target)
    assert [batch.join(wanted) for wanted in requests] == [None] * 3
    real = ragged.extend_ragged

    def broken(sessions, feeds):  # type: ignore[no-untyped-def]
        rows = real(sessions, feeds)
        return [rows[0], replace(rows[1], logits_JV=rows[1].logits_JV * float("nan")), *rows[2:]]

    monkeypatch.setattr(ragged, "extend_ragged", broken)
    with pytest.raises(NonFiniteLogitsError) as caught:
        batch.step()
    assert caught.value.__notes__ == ["in 'r1' of the batch"]
    monkeypatch.setattr(ragged, "extend_ragged", real)
    results: dict = {}
    while len(batch):
        results |= batch.step()
    assert set(results) == {"r0", "r2"}
    for wanted in (requests[0], requests[2]):
        alone = generate(target, drafter, wanted.prompt_ids, wanted.config, request_id=wanted.request_id)
        assert results[wanted.request_id].token_ids == alone.token_ids


def test_bad_batches_are_refused_by_name() -> None:
    target = tiny_decoder()
    first, second = mixed_requests(target, 2)
    with pytest.raises(ValueError, match="ids must differ"):
        generate_batch(target, [first, replace(second, request_id=first.request_id)])
    with pytest.raises(ValueError, match="max_active must be at least 1, got 0"):
        generate_batch(target, [first], max_active=0)
    with pytest.raises(ValueError, match="'x' is not in the batch"):
        RaggedBatch(target).leave("x")
    small = target.session(capacity=4)
    with pytest.raises(ValueError, match="33 tokens after 0 do not fit a cache of 32"):
        extend_ragged([small], [[1] * 33])
    with pytest.raises(ValueError, match="0 tokens after 0 do not fit"):
        extend_ragged([small], [[]])
    with pytest.raises(ValueError, match="2 sessions share 1 caches"):
        extend_ragged([small, small], [[1], [2]])
    assert small.length == 0
