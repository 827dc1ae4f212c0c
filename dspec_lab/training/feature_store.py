"""Features of training sequences on disk: made once, found by their text, shared by runs, drafters and processes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspec_lab.core.files import write_json
from dspec_lab.training.target_reader import SequenceFeatures, TargetReader, fingerprint

SPARE_BYTES = 2**30  # left free on the disk
SHARD_BYTES = 2**27  # features are written in files of about this size
FORMAT = 2


class FeatureStore:
    """A folder of shards for one target and one set of tapped layers.

    A shard appears whole or not at all, and is never changed. Any number of processes may add shards; a store looks
    for new ones when it misses something. Features not yet flushed are lost with the process, and can be made again.
    """

    def __init__(self, reader: TargetReader, parent: Path | str) -> None:
        self.reader = reader
        about = {
            "format": FORMAT,
            "target": reader.target.name,
            "weights": fingerprint(reader.target),
            "layers": list(reader.taps.layers),
        }
        if reader.target.dtype != torch.float32:
            about["dtype"] = str(reader.target.dtype).removeprefix("torch.")
        key = hashlib.blake2b(json.dumps(about, sort_keys=True).encode(), digest_size=8).hexdigest()
        self.folder = Path(parent) / key
        self._about = about
        self._shards: dict[str, Any] = {}
        self._places: dict[bytes, tuple[str, int, int]] = {}
        self._waiting: dict[bytes, SequenceFeatures] = {}
        self._waiting_bytes = 0
        self._scan()

    def has(self, key: bytes) -> bool:
        """Whether the features of a sequence are here."""
        return key in self._waiting or key in self._places

    def find(self, key: bytes) -> bool:
        """`has`, after a look for shards that other processes have added."""
        if not self.has(key):
            self._scan()
        return self.has(key)

    def get(self, key: bytes) -> SequenceFeatures | None:
        """Features by `sequence_key`, or None."""
        if key in self._waiting:
            return self._waiting[key]
        if not self.find(key):
            return None
        name, start, end = self._places[key]
        shard = self._shards[name]
        hidden_TX = shard.get_slice("hidden")[start:end]
        width = self.reader.tapped_width
        return SequenceFeatures(
            tapped_TF=hidden_TX[:, :width] if width else None,
            last_TD=hidden_TX[:, width:],
            lse_T=shard.get_slice("lse")[start:end],
            top_TX=shard.get_slice("top")[start:end],
        )

    def add(self, key: bytes, features: SequenceFeatures) -> None:
        """Keep features; they reach the disk when enough are together, or with `flush`."""
        if self.has(key):
            return
        self._waiting[key] = features
        self._waiting_bytes += features.last_TD.shape[0] * self.reader.bytes_per_token()
        if self._waiting_bytes >= SHARD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what waits into a shard of its own."""
        if not self._waiting:
            return
        from safetensors.torch import save_file

        self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.folder / "about.json").is_file():
            write_json(self.folder / "about.json", self._about)
        parts = list(self._waiting.values())
        lengths = [part.last_TD.shape[0] for part in parts]
        keys = np.frombuffer(b"".join(self._waiting), dtype=np.uint8).copy()
        tensors = {
            "hidden": torch.cat([_joined(part) for part in parts]),
            "lse": torch.cat([part.lse_T.cpu() for part in parts]),
            "top": torch.cat([part.top_TX.cpu() for part in parts]),
            "starts": torch.tensor([0, *np.cumsum(lengths).tolist()]),
            "keys": torch.from_numpy(keys).view(len(parts), -1),
        }
        handle, temporary = tempfile.mkstemp(prefix=".shard.", suffix=".tmp", dir=self.folder)
        os.close(handle)
        try:
            save_file(tensors, temporary)
            os.chmod(temporary, 0o644)
            # the temporary name is unique in the folder, and so is the final one
            os.replace(temporary, self.folder / f"{Path(temporary).name.split('.')[2]}.safetensors")
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        self._waiting.clear()
        self._waiting_bytes = 0
        self._scan()

    def missing_bytes(self, keys_and_lengths: Sequence[tuple[bytes, int]]) -> int:
        """Disk space of those sequences that are not here."""
        each = self.reader.bytes_per_token()
        return sum(length * each for key, length in keys_and_lengths if not self.has(key))

    def _scan(self) -> None:
        from safetensors import SafetensorError, safe_open

        for path in sorted(self.folder.glob("*.safetensors")):
            if path.name in self._shards:
                continue
            try:
                shard = safe_open(path, framework="pt").__enter__()
                starts, keys = shard.get_tensor("starts").tolist(), shard.get_tensor("keys").numpy()
            except SafetensorError as error:
                raise ValueError(f"{path} is damaged ({error}); remove it, its features will be made again") from error
            self._shards[path.name] = shard
            for row, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
                self._places[keys[row].tobytes()] = (path.name, start, end)


def sequence_key(ids_T: np.ndarray, num_prompt: int) -> bytes:
    """16 bytes that stand for a sequence and where its response begins."""
    digest = hashlib.blake2b(np.int64([num_prompt]).tobytes(), digest_size=16)
    digest.update(np.ascontiguousarray(ids_T, dtype=np.int32).tobytes())
    return digest.digest()


def check_free_space(needed_bytes: int, folder: Path) -> None:
    """Raise `ValueError` with both sizes if `needed_bytes` and a reserve do not fit where `folder` lies."""
    free = free_bytes(folder)
    if needed_bytes + SPARE_BYTES > free:
        raise ValueError(
            f"features need {needed_bytes / 1e9:.2f} GB more in {folder.parent}, which has {free / 1e9:.2f} GB free "
            f"({SPARE_BYTES / 1e9:.1f} GB stay untouched); use fewer responses, another folder, or features: stream"
        )


def free_bytes(folder: Path) -> int:
    """Free disk space where `folder` lies or would lie."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _joined(part: SequenceFeatures) -> Tensor:
    parts = [part.last_TD] if part.tapped_TF is None else [part.tapped_TF, part.last_TD]
    return torch.cat(parts, dim=-1).cpu()
