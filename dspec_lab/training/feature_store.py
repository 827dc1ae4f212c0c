"""Features of training sequences: read from the target each time, or kept on disk from the first use on."""

from __future__ import annotations

import hashlib
import json
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from dspec_lab.core.files import write_json
from dspec_lab.training.data import Batch, TrainSequence
from dspec_lab.training.target_reader import NUM_TOP, SequenceFeatures, TargetReader, fingerprint

SPARE_BYTES = 2**30  # left free on the disk
FORMAT = 1


@runtime_checkable
class FeatureSource(Protocol):
    """Gives the features of a sequence by its number."""

    def get(self, index: int) -> SequenceFeatures: ...


class StreamedFeatures:
    """Features read from the target at each use; nothing is stored."""

    def __init__(self, reader: TargetReader, sequences: Sequence[TrainSequence]) -> None:
        self._reader, self._sequences = reader, sequences

    def get(self, index: int) -> SequenceFeatures:
        """Features of sequence `index`, from a pass of the target."""
        sequence = self._sequences[index]
        return self._reader.read(sequence.ids_T.tolist(), sequence.num_prompt)


class CachedFeatures:
    """Features kept in a folder, filled in at first use. Several processes may share it.

    An entry counts once its checksum is there and right, so a run that is killed while writing leaves nothing false.
    The files have holes where nothing was used yet: disk space is taken as entries are made.
    """

    def __init__(self, reader: TargetReader, sequences: Sequence[TrainSequence], parent: Path | str) -> None:
        self._reader, self._sequences = reader, sequences
        lengths = np.array([sequence.num_tokens for sequence in sequences], dtype=np.int64)
        self._starts = np.concatenate([[0], lengths.cumsum()])
        self.folder = Path(parent) / self._key()
        missing_bytes = cache_bytes(reader, sequences) - _stored_bytes(self.folder)
        check_free_space(missing_bytes, self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        total, width = int(self._starts[-1]), reader.tapped_width + reader.target.hidden_size
        write_json(self.folder / "about.json", json.loads(self._about()))
        self._hidden = _mapped(self.folder / "hidden.bin", np.uint16, (total, width))
        self._lse = _mapped(self.folder / "lse.bin", np.float32, (total,))
        self._top = _mapped(self.folder / "top.bin", np.int32, (total, NUM_TOP))
        self._sums = _mapped(self.folder / "checksum.bin", np.uint32, (len(sequences),))

    def get(self, index: int) -> SequenceFeatures:
        """Features of sequence `index`, from disk or else from the target."""
        rows = slice(int(self._starts[index]), int(self._starts[index + 1]))
        stored = self._sums[index]
        if stored and stored == self._checksum(rows):
            return self._entry(rows)
        sequence = self._sequences[index]
        fresh = self._reader.read(sequence.ids_T.tolist(), sequence.num_prompt)
        parts = [fresh.last_TD] if fresh.tapped_TF is None else [fresh.tapped_TF, fresh.last_TD]
        self._hidden[rows] = torch.cat(parts, dim=-1).cpu().view(torch.int16).numpy().view(np.uint16)
        self._lse[rows] = fresh.lse_T.cpu().numpy()
        self._top[rows] = fresh.top_TX.cpu().numpy()
        self._sums[index] = self._checksum(rows)
        return fresh

    def has(self, index: int) -> bool:
        """Whether sequence `index` is on disk."""
        return bool(self._sums[index])

    def _entry(self, rows: slice) -> SequenceFeatures:
        hidden_TX = torch.from_numpy(self._hidden[rows].view(np.int16).copy()).view(torch.bfloat16)
        width = self._reader.tapped_width
        return SequenceFeatures(
            tapped_TF=hidden_TX[:, :width] if width else None,
            last_TD=hidden_TX[:, width:],
            lse_T=torch.from_numpy(self._lse[rows].copy()),
            top_TX=torch.from_numpy(self._top[rows].copy()),
        )

    def _checksum(self, rows: slice) -> int:
        value = zlib.crc32(np.ascontiguousarray(self._hidden[rows]).view(np.uint8).data)
        value = zlib.crc32(self._lse[rows].view(np.uint8).data, value)
        return zlib.crc32(np.ascontiguousarray(self._top[rows]).view(np.uint8).data, value) or 1

    def _about(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for sequence in self._sequences:
            digest.update(np.int64([sequence.num_prompt, sequence.num_tokens]).tobytes())
            digest.update(sequence.ids_T.tobytes())
        about = {
            "format": FORMAT,
            "target": self._reader.target.name,
            "weights": fingerprint(self._reader.target),
            "layers": list(self._reader.taps.layers),
            "sequences": digest.hexdigest(),
        }
        return json.dumps(about, sort_keys=True)

    def _key(self) -> str:
        return hashlib.blake2b(self._about().encode(), digest_size=8).hexdigest()


class JoinedFeatures:
    """Several sources, one after the other: each file of responses has its own cache."""

    def __init__(self, sources: Sequence[FeatureSource], counts: Sequence[int]) -> None:
        self._sources = sources
        self._starts = np.concatenate([[0], np.cumsum(counts)])

    def get(self, index: int) -> SequenceFeatures:
        """Features of sequence `index`, counted through all sources."""
        which = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self._sources[which].get(index - int(self._starts[which]))


def cache_bytes(reader: TargetReader, sequences: Sequence[TrainSequence]) -> int:
    """Disk space of the features of all `sequences`."""
    return sum(sequence.num_tokens for sequence in sequences) * reader.bytes_per_token() + 4 * len(sequences)


def check_free_space(needed_bytes: int, folder: Path) -> None:
    """Raise `ValueError` with both sizes if `needed_bytes` and a reserve do not fit where `folder` lies."""
    place = folder
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed_bytes + SPARE_BYTES > free:
        raise ValueError(
            f"features need {needed_bytes / 1e9:.2f} GB more in {folder.parent}, which has {free / 1e9:.2f} GB free "
            f"({SPARE_BYTES / 1e9:.1f} GB stay untouched); use fewer responses, another folder, or features: stream"
        )


def collate(
    sequences: Sequence[TrainSequence], features: Sequence[SequenceFeatures], width: int | None = None
) -> Batch:
    """A batch of sequences with their features, right-padded to the longest or to `width`."""
    length = max(sequence.num_tokens for sequence in sequences) if width is None else width
    count, first = len(sequences), features[0]
    ids_BT = torch.zeros(count, length, dtype=torch.int64)
    mask_BT = torch.zeros(count, length, dtype=torch.bool)
    lse_BT = torch.zeros(count, length)
    top_BTX = torch.full((count, length, NUM_TOP), -1, dtype=torch.int64)
    last_BTD = torch.zeros(count, length, first.last_TD.shape[1])
    tapped_BTF = None if first.tapped_TF is None else torch.zeros(count, length, first.tapped_TF.shape[1])
    for row, (sequence, features_T) in enumerate(zip(sequences, features, strict=True)):
        end = sequence.num_tokens
        ids_BT[row, :end] = torch.from_numpy(sequence.ids_T.astype(np.int64))
        mask_BT[row, sequence.num_prompt : end] = True
        lse_BT[row, :end] = features_T.lse_T.cpu()
        top_BTX[row, :end] = features_T.top_TX.cpu().long()
        last_BTD[row, :end] = features_T.last_TD.cpu()
        if tapped_BTF is not None:
            tapped_BTF[row, :end] = features_T.tapped_TF.cpu()
    lengths_B = torch.tensor([sequence.num_tokens for sequence in sequences])
    return Batch(ids_BT, mask_BT, lengths_B, tapped_BTF, last_BTD, lse_BT, top_BTX)


def _mapped(path: Path, dtype: type, shape: tuple[int, ...]) -> np.ndarray:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if not path.exists():
        path.touch()
    if path.stat().st_size != size:
        with path.open("r+b") as file:
            file.truncate(size)
    return np.memmap(path, dtype=dtype, mode="r+", shape=shape)


def _stored_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.glob("*.bin")) if folder.is_dir() else 0
