"""The manifest of a model folder: what it is, where it came from, and a hash of every file."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dspec_lab.core.files import read_json, write_json

MANIFEST = "dspec_manifest.json"
MANIFEST_FORMAT = 1
PIECE_BYTES = 16 * 2**20  # hashed on all cores: 269 MB take about 0.2 s on two


def hash_pieces(path: Path) -> list[str]:
    """SHA-256 of each piece of `PIECE_BYTES` bytes, in order; an empty file has no pieces."""
    size = path.stat().st_size
    if size == 0:
        return []
    starts = range(0, size, PIECE_BYTES)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        view = memoryview(mapped)
        try:
            with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
                return list(pool.map(lambda start: _piece_hash(view, start), starts))
        finally:
            view.release()


def _piece_hash(view: memoryview, start: int) -> str:
    with view[start : start + PIECE_BYTES] as piece:
        return hashlib.sha256(piece).hexdigest()


def write_manifest(folder: Path, about: dict[str, Any]) -> Path:
    """Path of the manifest just written: `about` and the size and hash of every file now in `folder`."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256_pieces": hash_pieces(path)}
        for path in sorted(folder.iterdir())
        if path.name != MANIFEST
    }
    return write_json(folder / MANIFEST, {"format": MANIFEST_FORMAT, **about, "files": files})


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of `folder`; one of another format or without files raises ValueError."""
    path = folder / MANIFEST
    manifest = read_json(path)
    if not isinstance(manifest, dict) or manifest.get("format") != MANIFEST_FORMAT:
        raise ValueError(f"{path} is not a manifest of format {MANIFEST_FORMAT}")
    if not isinstance(manifest.get("files"), dict) or not manifest["files"]:
        raise ValueError(f"{path} lists no files")
    return manifest


def check_folder(folder: Path) -> dict[str, Any]:
    """The manifest of `folder` after every file in it was compared with its size and hash.

    The first file that differs raises ValueError that names it. Files the manifest does not list are not looked at.
    """
    manifest = read_manifest(folder)
    for name, expected in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{path} is missing")
        size = path.stat().st_size
        if size != expected["bytes"]:
            raise ValueError(f"{path} is corrupt: {size} bytes where the manifest says {expected['bytes']}")
        pieces = hash_pieces(path)
        if pieces != expected["sha256_pieces"]:
            bad = next(i for i, (a, b) in enumerate(zip(pieces, expected["sha256_pieces"], strict=True)) if a != b)
            start, end = bad * PIECE_BYTES, min(size, (bad + 1) * PIECE_BYTES)
            raise ValueError(f"{path} is corrupt: bytes {start} to {end} do not match their hash in {MANIFEST}")
    return manifest


def weight_dtypes(path: Path) -> dict[str, str]:
    """Tensor name to dtype (safetensors names, for example BF16) from the header of `path` alone."""
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
        if not 0 < length <= path.stat().st_size - 8:
            raise ValueError(f"{path} is not a safetensors file: its header length is {length}")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise ValueError(f"{path} is not a safetensors file: {error}") from error
    return {name: entry["dtype"] for name, entry in header.items() if name != "__metadata__"}
