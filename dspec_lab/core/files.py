"""Files written whole or not at all, and where the program's data and cache lie."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def write_bytes(path: Path | str, content: bytes) -> Path:
    """Path of a file that now holds `content`: the old file stays until the new one is complete."""
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder, cannot write a file there")
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes private files; a result is as readable as any file the user makes
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def write_text(path: Path | str, text: str) -> Path:
    """Path of a UTF-8 file that now holds `text`."""
    return write_bytes(path, text.encode("utf-8"))


def write_json(path: Path | str, value: Any) -> Path:
    """Path of a file that now holds `value` as strict JSON (no NaN, keys in the order given)."""
    return write_text(path, json_text(value))


def json_text(value: Any) -> str:
    """`value` as indented strict JSON with a final newline; NaN and infinity raise ValueError."""
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def read_json(path: Path | str) -> Any:
    """The JSON value in `path`; a file that is not JSON raises ValueError that names it."""
    path = Path(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


@contextmanager
def new_folder(final: Path | str) -> Iterator[Path]:
    """A temporary folder that takes the name `final` when the block ends well, and vanishes when it does not.

    A folder that stood at `final` is replaced as a whole.
    """
    final = Path(final)
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{final.name}.", suffix=".tmp", dir=final.parent))
    try:
        os.chmod(temporary, 0o777 & ~_umask())
        yield temporary
        if final.is_symlink() or final.is_file():
            raise NotADirectoryError(f"{final} is not a folder, cannot replace it by one")
        if final.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{final.name}.", suffix=".old", dir=final.parent))
            os.replace(final, old)  # onto the empty folder just made
            os.replace(temporary, final)
            shutil.rmtree(old)
        else:
            os.replace(temporary, final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_leftovers(final: Path | str) -> list[Path]:
    """Folders of interrupted `new_folder(final)` calls, now removed. Only for the holder of the folder's lock."""
    final = Path(final)
    left = [path for end in ("tmp", "old") for path in final.parent.glob(f".{final.name}.*.{end}") if path.is_dir()]
    for path in left:
        shutil.rmtree(path)
    return left


def cache_dir() -> Path:
    """Folder for what can be fetched or made again: DSPEC_CACHE, else ~/.cache/dspec_lab. It need not exist yet."""
    given = os.environ.get("DSPEC_CACHE", "")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "dspec_lab"


def data_dir() -> Path:
    """The project's `data/` folder: DSPEC_DATA, else the one beside the package, else one above the current folder."""
    given = os.environ.get("DSPEC_DATA", "")
    if given:
        folder = Path(given).expanduser()
        if not folder.is_dir():
            raise FileNotFoundError(f"DSPEC_DATA={given} is not a folder")
        return folder
    beside = Path(__file__).resolve().parents[2] / "data"
    here = Path.cwd().resolve()
    for folder in (beside, *(up / "data" for up in (here, *here.parents) if (up / "dspec_lab").is_dir())):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"no data folder at {beside}; set DSPEC_DATA to the project's data folder")


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def file_hash(path: Path | str) -> str:
    """sha256 of a file's bytes."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
