"""Where a run takes features from (the target each time, or a store filled at first use), and batches of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from dspec_lab.training.data import Batch, TrainSequence
from dspec_lab.training.feature_store import FeatureStore, check_free_space, sequence_key
from dspec_lab.training.target_reader import NUM_TOP, SequenceFeatures, TargetReader


@runtime_checkable
class FeatureSource(Protocol):
    """Gives the features of a sequence by its number."""

    def get(self, index: int) -> SequenceFeatures: ...

    def flush(self) -> None: ...


class StreamedFeatures:
    """Features read from the target at each use; nothing is stored."""

    def __init__(self, reader: TargetReader, sequences: Sequence[TrainSequence]) -> None:
        self._reader, self._sequences = reader, sequences

    def get(self, index: int) -> SequenceFeatures:
        """Features of sequence `index`, from a pass of the target."""
        sequence = self._sequences[index]
        return self._reader.read(sequence.ids_T.tolist(), sequence.num_prompt)

    def flush(self) -> None:
        """Nothing to do."""


class CachedFeatures:
    """Features from a store; what it lacks is read from the target and added."""

    def __init__(self, reader: TargetReader, sequences: Sequence[TrainSequence], parent: Path | str) -> None:
        self._reader, self._sequences = reader, sequences
        self._keys = [sequence_key(sequence.ids_T, sequence.num_prompt) for sequence in sequences]
        self.store = FeatureStore(reader, parent)
        lengths = [sequence.num_tokens for sequence in sequences]
        check_free_space(self.store.missing_bytes(list(zip(self._keys, lengths, strict=True))), self.store.folder)

    def get(self, index: int) -> SequenceFeatures:
        """Features of sequence `index`."""
        held = self.store.get(self._keys[index])
        return self._read(index) if held is None else held

    def fill(self, index: int) -> bool:
        """See to it that the store has sequence `index`; whether the target had to be read for it."""
        missing = not self.store.find(self._keys[index])
        if missing:
            self._read(index)
        return missing

    def _read(self, index: int) -> SequenceFeatures:
        sequence = self._sequences[index]
        made = self._reader.read(sequence.ids_T.tolist(), sequence.num_prompt)
        self.store.add(self._keys[index], made)
        return made

    def flush(self) -> None:
        """Put on disk what is not there yet."""
        self.store.flush()


def collate(
    sequences: Sequence[TrainSequence], features: Sequence[SequenceFeatures], columns: Sequence[slice] = ()
) -> Batch:
    """A batch of sequences with their features, right-padded to the longest; of the tapped ones only `columns`."""
    length = max(sequence.num_tokens for sequence in sequences)
    count, first = len(sequences), features[0]
    ids_BT = torch.zeros(count, length, dtype=torch.int64)
    mask_BT = torch.zeros(count, length, dtype=torch.bool)
    lse_BT = torch.zeros(count, length)
    top_BTX = torch.full((count, length, NUM_TOP), -1, dtype=torch.int64)
    last_BTD = torch.zeros(count, length, first.last_TD.shape[1])
    width = sum(part.stop - part.start for part in columns)
    tapped_BTF = torch.zeros(count, length, width) if width else None
    for row, (sequence, features_T) in enumerate(zip(sequences, features, strict=True)):
        end = sequence.num_tokens
        ids_BT[row, :end] = torch.from_numpy(sequence.ids_T.astype(np.int64))
        mask_BT[row, sequence.num_prompt : end] = True
        lse_BT[row, :end] = features_T.lse_T.cpu()
        top_BTX[row, :end] = features_T.top_TX.cpu().long()
        last_BTD[row, :end] = features_T.last_TD.cpu()
        at = 0
        for part in columns:
            tapped_BTF[row, :end, at : at + part.stop - part.start] = features_T.tapped_TF[:, part].cpu()
            at += part.stop - part.start
    lengths_B = torch.tensor([sequence.num_tokens for sequence in sequences])
    return Batch(ids_BT, mask_BT, lengths_B, tapped_BTF, last_BTD, lse_BT, top_BTX)
