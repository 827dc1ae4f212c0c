"""Batched answers: what single decoding gives, whatever the batch, and a production that can be interrupted."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from dspec_lab.config import DecodeConfig, SamplingConfig
from dspec_lab.core.sampling import law
from dspec_lab.kernels.rows import native_status
from dspec_lab.models.decoder import LeanDecoder
from dspec_lab.training import produce as production
from dspec_lab.training.data import build_sequences
from dspec_lab.training.feature_source import CachedFeatures
from dspec_lab.training.feature_store import FeatureStore
from dspec_lab.training.produce import ResponseConfig, join_parts, parts_folder, produce
from dspec_lab.training.prompts.record import TrainPrompt
from dspec_lab.training.responses import read_responses
from dspec_lab.training.sampler import BatchSampler, Request
from dspec_lab.training.target_reader import TargetReader
from dspec_lab.verifier.decode import generate

PROMPTS = [[5, 9, 30, 41], [7], [3, 3, 8, 61, 62, 10, 11], [44, 45], [70, 12, 5], [33, 34, 35, 36, 37]]


def requests(temperature, prompts=PROMPTS):
    return [
        Request(request_id=f"r{i}", prompt_ids=tuple(prompt), temperature=temperature)
        for i, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("num_slots", [1, 2, 4, 16])
def test_greedy_answers_are_those_of_plain_decoding(num_slots, tiny_target):
    sampler = BatchSampler(tiny_target, num_slots=num_slots, max_prompt=8, max_new_tokens=20)
    answers = dict(sampler.run(requests(0.0)))
    assert sorted(answers) == list(range(len(PROMPTS)))
    for number, prompt in enumerate(PROMPTS):
        plain = generate(tiny_target, None, prompt, DecodeConfig(max_new_tokens=20))
        assert answers[number] == plain.token_ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_compiled_row_ops_give_plain_decodings_answers_too(dtype, tiny_folder):
    if not native_status()[0]:
        pytest.skip(f"the compiled row ops are not here: {native_status()[1]}")
    target = LeanDecoder.from_folder(tiny_folder, dtype=dtype, impl="native")
    sampler = BatchSampler(target, num_slots=3, max_prompt=8, max_new_tokens=20)
    # twice: a slot's earlier answer must leave nothing behind
    for _ in range(2):
        answers = dict(sampler.run(requests(0.0)))
        for number, prompt in enumerate(PROMPTS):
            assert answers[number] == generate(target, None, prompt, DecodeConfig(max_new_tokens=20)).token_ids


def test_sampled_answers_do_not_depend_on_the_batch(tiny_target):
    def answers(num_slots, chosen):
        sampler = BatchSampler(tiny_target, num_slots=num_slots, max_prompt=8, max_new_tokens=15, seed=4)
        found = dict(sampler.run([requests(1.0)[i] for i in chosen]))
        return {chosen[number]: ids for number, ids in found.items()}

    together = answers(4, [0, 1, 2, 3, 4, 5])
    assert answers(1, [2]) == {2: together[2]}
    assert answers(6, [5, 4, 3]) == {i: together[i] for i in (5, 4, 3)}
    other = BatchSampler(tiny_target, num_slots=4, max_prompt=8, max_new_tokens=15, seed=5)
    assert dict(other.run(requests(1.0))) != together


def test_first_tokens_follow_the_law(tiny_target):
    prompt, count = [5, 9, 30], 3000
    asked = [Request(request_id=str(i), prompt_ids=tuple(prompt), temperature=2.0) for i in range(count)]
    sampler = BatchSampler(tiny_target, num_slots=250, max_prompt=4, max_new_tokens=1)
    counts = np.bincount([ids[0] for _, ids in sampler.run(asked)], minlength=89) / count
    with torch.inference_mode():
        logits = tiny_target.session(capacity=8).extend(prompt, logit_rows=1).logits_JV
    expected = law(logits.clone(), SamplingConfig(temperature=2.0))[0].numpy()
    # the distance of 3000 draws from their own law is about sum sqrt(p / 2 pi n)
    assert 0.5 * np.abs(counts - expected).sum() < 2 * np.sqrt(expected / (2 * np.pi * count)).sum()
    assert expected.max() < 0.9, "the law must leave something to draw"


@pytest.mark.parametrize("layers", [(0, 2), ()])
def test_features_come_with_the_answers(layers, tiny_target):
    reader = TargetReader(tiny_target, layers)
    sampler = BatchSampler(tiny_target, num_slots=3, max_prompt=8, max_new_tokens=20, reader=reader)
    asked = requests(0.0)
    plain = dict(BatchSampler(tiny_target, num_slots=3, max_prompt=8, max_new_tokens=20).run(asked))
    ended = set()
    for number, answer in sampler.run(asked):
        assert answer == plain[number]
        ended.add(answer[-1] == 2)
        prompt = asked[number].prompt_ids
        got, read = sampler.take_features(number), reader.read([*prompt, *answer], len(prompt))
        for name in ("tapped_TF", "last_TD", "lse_T"):
            left, right = getattr(got, name), getattr(read, name)
            if left is None or right is None:
                assert left is right is None and not layers
                continue
            # the last bit of bf16 may fall either way
            torch.testing.assert_close(left.float(), right.float(), rtol=0.01, atol=0.02, msg=name)
        law = got.last_TD[len(prompt) :].float() @ tiny_target.head().T
        torch.testing.assert_close(got.lse_T[len(prompt) :], law.logsumexp(-1), rtol=0, atol=1e-4)
        assert (got.top_TX[len(prompt) :] == law.topk(8).indices).all() and (got.top_TX[: len(prompt)] == -1).all()
    assert ended == {True, False}, "answers that end by themselves and ones that are cut must both be seen"


def test_production_fills_the_store_that_training_reads(tiny_target, tmp_path):
    store = FeatureStore(TargetReader(tiny_target, (0, 1, 2)), tmp_path / "features")
    produce(plan(6), tiny_target, Letters(), SETTINGS, tmp_path / "r.parquet", store=store)
    responses = join_parts(tmp_path / "r.parquet", 89)
    sequences = build_sequences(responses, max_tokens=64, vocab_size=89).sequences
    source = CachedFeatures(store.reader, sequences, tmp_path / "features")
    source._reader = None
    for index, sequence in enumerate(sequences):
        assert source.get(index).last_TD.shape[0] == sequence.num_tokens


def test_answers_end_at_end_tokens_and_at_the_cap(tiny_target):
    sampler = BatchSampler(tiny_target, num_slots=4, max_prompt=8, max_new_tokens=25)
    prompts = [[i, i + 1] for i in range(3, 60, 3)]
    seen = 0
    for _, ids in sampler.run(requests(0.0, prompts)):
        assert 2 not in ids[:-1] and len(ids) <= 25 and (ids[-1] == 2 or len(ids) == 25)
        seen += ids[-1] == 2
    assert 0 < seen < len(prompts)


def test_bad_requests_are_named(tiny_target):
    with pytest.raises(ValueError, match="request x has an empty prompt"):
        Request(request_id="x", prompt_ids=(), temperature=0.0)
    sampler = BatchSampler(tiny_target, num_slots=2, max_prompt=3, max_new_tokens=4)
    with pytest.raises(ValueError, match="r0 has 4 tokens, at most 3"):
        list(sampler.run(requests(0.0)))
    with pytest.raises(ValueError, match="257"):
        BatchSampler(tiny_target, num_slots=2, max_prompt=200, max_new_tokens=57)


class Letters:
    """A tokenizer of single characters with a chat template; ids stay below the tiny vocabulary."""

    eos_token_id = 2

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [3 + ord(letter) % 80 for letter in text]}

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(ord("a") + token % 26) for token in ids)

    def apply_chat_template(self, messages, *, add_generation_prompt=False, tokenize=True, return_dict=True):
        ids = []
        for message in messages:
            ids += [1 if message["role"] == "user" else 0, *self(message["content"])["input_ids"], 2]
        ids += [0] if add_generation_prompt else []
        return {"input_ids": ids} if return_dict else ids


def plan(count=40):
    return [TrainPrompt("chat", "test", (f"ask {i}",) if i % 3 else (f"ask {i}", "and then?")) for i in range(count)]


SETTINGS = ResponseConfig(max_new_tokens=10, max_prompt=40, num_slots=6, temperatures=(0.0, 1.0))


def made(path, target, *, workers=1, prompts=None):
    for worker in range(workers):
        produce(prompts or plan(), target, Letters(), SETTINGS, path, worker=worker, num_workers=workers)
    join_parts(path, target.vocab_size)
    return [(r.temperature, r.prompt_ids.tolist(), r.response_ids.tolist()) for r in read_responses(path)]


def test_production_answers_every_turn_in_order(tiny_target, tmp_path):
    rows = made(tmp_path / "r.parquet", tiny_target)
    assert len(rows) == 40 + 14
    first, second = rows[0], rows[1]
    assert second[1][: len(first[1])] != second[1] and second[1][: len(first[1]) - 1] == first[1][:-1]
    reply = Letters().decode(first[2])
    assert second[1][len(first[1]) :][: len(reply)] == Letters()(reply)["input_ids"], (
        "turn 2 must hold the answer to turn 1"
    )
    assert [row[0] for row in rows[:5]] == [0.0, 0.0, 1.0, 0.0, 1.0]


def test_an_interrupted_production_goes_on(tiny_target, tmp_path, monkeypatch):
    monkeypatch.setattr(production, "ROWS_PER_PART", 7)
    whole = made(tmp_path / "whole.parquet", tiny_target)
    real, calls = production._write_part, []

    def cut_short(*arguments):
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append(1)
        real(*arguments)

    monkeypatch.setattr(production, "_write_part", cut_short)
    with pytest.raises(KeyboardInterrupt):
        made(tmp_path / "cut.parquet", tiny_target)
    monkeypatch.setattr(production, "_write_part", real)
    # a part without its keys was cut while it was written, and does not count
    lost = sorted(parts_folder(tmp_path / "cut.parquet").glob("*.json"))[1]
    lost.unlink()
    before = [json.loads(p.read_text()) for p in parts_folder(tmp_path / "cut.parquet").glob("part-*.json")]
    assert sum(map(len, before)) == 14
    assert made(tmp_path / "cut.parquet", tiny_target) == whole


def test_workers_share_the_work(tiny_target, tmp_path):
    assert made(tmp_path / "two.parquet", tiny_target, workers=2) == made(tmp_path / "one.parquet", tiny_target)


def test_parts_of_another_plan_are_refused(tiny_target, tmp_path):
    made(tmp_path / "r.parquet", tiny_target)
    with pytest.raises(ValueError, match="another plan .other prompts, count"):
        made(tmp_path / "r.parquet", tiny_target, prompts=plan(8))
