"""Features of training sequences: what they are, on disk and off, and when a cache is refused."""

from __future__ import annotations

import shutil
from collections import namedtuple

import numpy as np
import pytest
import torch

from dspec_lab.training import feature_store
from dspec_lab.training.data import build_sequences
from dspec_lab.training.feature_store import CachedFeatures, StreamedFeatures, collate
from dspec_lab.training.target_reader import NUM_TOP, TargetReader


@pytest.fixture
def sequences(tiny_responses):
    return build_sequences(tiny_responses[:8], max_tokens=40, vocab_size=89).sequences


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


def test_disk_gives_the_same_bits_as_the_target(reader, sequences, tmp_path):
    streamed = StreamedFeatures(reader, sequences)
    cached = CachedFeatures(reader, sequences, tmp_path)
    for index in (3, 0, 3):
        fresh, kept = streamed.get(index), cached.get(index)
        for name in ("tapped_TF", "last_TD", "lse_T", "top_TX"):
            assert torch.equal(getattr(fresh, name), getattr(kept, name)), name
    reopened = CachedFeatures(reader, sequences, tmp_path)
    assert reopened.has(3) and not reopened.has(1)

    def must_not_read(*_):
        raise AssertionError("the target was asked for what is on disk")

    reopened._reader = type("Reader", (), {"read": must_not_read, "tapped_width": reader.tapped_width})()
    assert torch.equal(reopened.get(3).last_TD, streamed.get(3).last_TD)


def test_a_torn_entry_is_made_again(reader, sequences, tmp_path):
    cached = CachedFeatures(reader, sequences, tmp_path)
    good = cached.get(2).last_TD
    cached._hidden[int(cached._starts[2]) + 1, -1] ^= 1
    assert torch.equal(cached.get(2).last_TD, good)


def test_other_sequences_or_layers_are_another_cache(reader, sequences, tiny_target, tmp_path):
    folder = CachedFeatures(reader, sequences, tmp_path).folder
    assert CachedFeatures(reader, sequences[:-1], tmp_path).folder != folder
    assert CachedFeatures(TargetReader(tiny_target, (1,)), sequences, tmp_path).folder != folder
    assert CachedFeatures(TargetReader(tiny_target, (0, 2)), sequences, tmp_path).folder == folder


def test_a_cache_that_does_not_fit_is_refused_before_anything_is_written(reader, sequences, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    needed = feature_store.cache_bytes(reader, sequences)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, needed + feature_store.SPARE_BYTES - 1))
    with pytest.raises(ValueError, match=r"features need .* GB more .* features: stream"):
        CachedFeatures(reader, sequences, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, needed + feature_store.SPARE_BYTES))
    CachedFeatures(reader, sequences, tmp_path / "cache")


def test_size_is_what_the_files_take(reader, sequences, tmp_path):
    cached = CachedFeatures(reader, sequences, tmp_path)
    size = sum(path.stat().st_size for path in cached.folder.glob("*.bin"))
    assert size == feature_store.cache_bytes(reader, sequences)


def test_batches_are_padded_and_masked(reader, sequences):
    streamed = StreamedFeatures(reader, sequences)
    batch = collate(sequences[:3], [streamed.get(i) for i in range(3)])
    assert batch.input_ids_BT.shape[1] == max(s.num_tokens for s in sequences[:3])
    for row, sequence in enumerate(sequences[:3]):
        mask = batch.loss_mask_BT[row].numpy()
        expected = (np.arange(len(mask)) >= sequence.num_prompt) & (np.arange(len(mask)) < sequence.num_tokens)
        assert (mask == expected).all()
        assert not batch.last_BTD[row, sequence.num_tokens :].any()
