"""Features of training sequences: what they are, on disk and off, and when a cache is refused."""

from __future__ import annotations

import shutil
from collections import namedtuple

import numpy as np
import pytest
import torch

from dspec_lab.training import feature_store
from dspec_lab.training.data import build_sequences
from dspec_lab.training.feature_source import CachedFeatures, StreamedFeatures, collate
from dspec_lab.training.feature_store import FeatureStore, sequence_key
from dspec_lab.training.read_ahead import read_ahead
from dspec_lab.training.target_reader import NUM_TOP, TargetReader


@pytest.fixture
def sequences(tiny_responses):
    every = build_sequences(tiny_responses, max_tokens=40, vocab_size=89).sequences
    # greedy and sampled answers to a prompt may be the same text, which would be one entry
    return tuple({sequence.ids_T.tobytes(): sequence for sequence in every}.values())[:8]


@pytest.fixture
def reader(tiny_target):
    return TargetReader(tiny_target, (0, 2))


def test_features_are_the_targets_own(reader, sequences, tiny_target):
    sequence = sequences[0]
    features = reader.read(sequence.ids_T.tolist(), sequence.num_prompt)
    session = tiny_target.session(capacity=64, taps=reader.taps)
    rows = session.extend(sequence.ids_T.tolist())
    torch.testing.assert_close(features.last_TD.float(), rows.features.last_ND, rtol=0.01, atol=0.01)
    torch.testing.assert_close(features.tapped_TF.float(), rows.features.tapped_NF, rtol=0.01, atol=0.01)
    first = sequence.num_prompt
    assert not features.lse_T[:first].any() and (features.top_TX[:first] == -1).all()
    rounded = features.last_TD[first:].float() @ tiny_target.head().T
    torch.testing.assert_close(features.lse_T[first:], rounded.logsumexp(-1), rtol=0, atol=1e-4)
    assert (features.top_TX[first:] == rounded.topk(NUM_TOP).indices).all()


FIELDS = ("tapped_TF", "last_TD", "lse_T", "top_TX")


def test_disk_gives_the_same_bits_as_the_target(reader, sequences, tmp_path):
    streamed = StreamedFeatures(reader, sequences)
    cached = CachedFeatures(reader, sequences, tmp_path)
    for index in (3, 0, 3):
        for name in FIELDS:
            assert torch.equal(getattr(streamed.get(index), name), getattr(cached.get(index), name)), name
    cached.flush()
    assert len(list(cached.store.folder.glob("*.safetensors"))) == 1
    reopened = CachedFeatures(reader, sequences, tmp_path)

    def must_not_read(*_):
        raise AssertionError("the target was asked for what is on disk")

    reopened._reader = type("Reader", (), {"read": must_not_read})()
    for index in (0, 3):
        for name in FIELDS:
            assert torch.equal(getattr(streamed.get(index), name), getattr(reopened.get(index), name)), name
    with pytest.raises(AssertionError, match="the target was asked"):
        reopened.get(1)


def test_shards_of_other_processes_are_found(reader, sequences, tmp_path):
    ours, theirs = (CachedFeatures(reader, sequences, tmp_path) for _ in range(2))
    theirs.get(5)
    theirs.flush()
    ours._reader = None
    assert torch.equal(ours.get(5).last_TD, theirs.get(5).last_TD)


def test_many_features_go_to_several_shards(reader, sequences, tmp_path, monkeypatch):
    monkeypatch.setattr(feature_store, "SHARD_BYTES", 2 * sequences[0].num_tokens * reader.bytes_per_token())
    cached = CachedFeatures(reader, sequences, tmp_path)
    for index in range(len(sequences)):
        cached.get(index)
    assert len(list(cached.store.folder.glob("*.safetensors"))) > 1
    assert not list(cached.store.folder.glob(".*")), "temporary files must not stay"


def test_a_damaged_shard_is_named(reader, sequences, tmp_path):
    cached = CachedFeatures(reader, sequences, tmp_path)
    cached.get(0)
    cached.flush()
    (path,) = cached.store.folder.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(ValueError, match="is damaged.*remove it"):
        CachedFeatures(reader, sequences, tmp_path)


def test_entries_belong_to_a_text_a_target_and_layers(reader, sequences, tiny_target, tmp_path):
    cached = CachedFeatures(reader, sequences, tmp_path)
    cached.get(0)
    cached.flush()
    assert FeatureStore(reader, tmp_path).folder == cached.store.folder
    assert FeatureStore(TargetReader(tiny_target, (1,)), tmp_path).folder != cached.store.folder
    first = sequences[0]
    assert cached.store.has(sequence_key(first.ids_T, first.num_prompt))
    assert not cached.store.has(sequence_key(first.ids_T, first.num_prompt + 1))
    assert not cached.store.has(sequence_key(first.ids_T[:-1], first.num_prompt))


def test_a_cache_that_does_not_fit_is_refused_before_anything_is_written(reader, sequences, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    needed = sum(sequence.num_tokens for sequence in sequences) * reader.bytes_per_token()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, needed + feature_store.SPARE_BYTES - 1))
    with pytest.raises(ValueError, match=r"features need .* GB more .* features: stream"):
        CachedFeatures(reader, sequences, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, needed + feature_store.SPARE_BYTES))
    cached = CachedFeatures(reader, sequences, tmp_path / "cache")
    cached.get(0)
    cached.flush()
    # what is there already needs no room
    less = needed - sequences[0].num_tokens * reader.bytes_per_token()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, less + feature_store.SPARE_BYTES))
    CachedFeatures(reader, sequences, tmp_path / "cache")


def test_size_is_what_the_files_take(reader, sequences, tmp_path):
    cached = CachedFeatures(reader, sequences, tmp_path)
    for index in range(len(sequences)):
        cached.get(index)
    cached.flush()
    size = sum(path.stat().st_size for path in cached.store.folder.glob("*.safetensors"))
    expected = sum(sequence.num_tokens for sequence in sequences) * reader.bytes_per_token()
    assert expected < size < expected + 2000


def test_batches_are_padded_and_masked(reader, sequences):
    streamed = StreamedFeatures(reader, sequences)
    features = [streamed.get(i) for i in range(3)]
    batch = collate(sequences[:3], features, [slice(32, 64)])
    assert torch.equal(batch.tapped_BTF[0, : sequences[0].num_tokens], features[0].tapped_TF[:, 32:].float())
    assert collate(sequences[:3], features).tapped_BTF is None
    assert batch.input_ids_BT.shape[1] == max(s.num_tokens for s in sequences[:3])
    for row, sequence in enumerate(sequences[:3]):
        mask = batch.loss_mask_BT[row].numpy()
        expected = (np.arange(len(mask)) >= sequence.num_prompt) & (np.arange(len(mask)) < sequence.num_tokens)
        assert (mask == expected).all()
        assert not batch.last_BTD[row, sequence.num_tokens :].any()


def test_reading_ahead_fills_the_cache_for_the_run(tiny_config, tiny_corpus, tmp_path):
    config = tiny_config("mtp", steps=3, features="cache")
    corpus = tiny_corpus(config, tmp_path)
    order = corpus.order(config)
    needed = {corpus.training[i] for step in range(3) for i in order.step(step)}
    others = [index for index in corpus.training if index not in needed]
    # one of them is on disk already, by another process
    theirs = tiny_corpus(config, tmp_path)
    first = corpus.training[order.step(0)[0]]
    theirs.features.get(first)
    theirs.features.flush()
    said = []
    tokens = read_ahead(corpus, config, lambda step, count: said.append((step, count)))
    keys = {corpus.features._keys[index] for index in needed}
    held = {corpus.features._keys[index]: corpus.sequences[index].num_tokens for index in needed - {first}}
    held.pop(corpus.features._keys[first], None)
    assert tokens == sum(held.values()) and tokens == said[-1][1]
    assert [step for step, _ in said] == sorted((step for step, _ in said), reverse=True) and said[0][0] == 2
    reopened = tiny_corpus(config, tmp_path).features.store
    assert all(reopened.has(key) for key in keys)
    untouched = {corpus.features._keys[index] for index in others} - keys
    assert untouched and not any(reopened.has(key) for key in untouched)
    assert read_ahead(tiny_corpus(config, tmp_path), config) == 0


def test_reading_ahead_needs_a_cache(tiny_config, tiny_corpus):
    config = tiny_config("mtp")
    with pytest.raises(ValueError, match="'stream'"):
        read_ahead(tiny_corpus(config), config)


def test_a_later_stage_reads_on_where_the_one_before_stopped(tiny_config, tiny_corpus, tmp_path):
    corpus = tiny_corpus(tiny_config("mtp", steps=3), tmp_path)
    whole, later = (corpus.order(tiny_config("mtp", steps=3, first_step=first)) for first in (0, 2))
    assert [later.step(i) for i in range(3)] == [whole.step(i) for i in range(2, 5)]
    assert later.step(0) != whole.step(0)
