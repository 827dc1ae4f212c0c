"""Where the notebooks are, and the list of them with the question each one asks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspec_lab.core.files import read_json

NAME = re.compile(r"\d\d_[a-z0-9_]+\.ipynb")


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One notebook of the list."""

    path: Path
    title: str  # first heading
    question: str  # first sentence of the first cell that ends in a question mark


def notebooks_dir(given: Path | None = None) -> Path:
    """The folder of notebooks: `given`, else the one beside the package, else `notebooks/` of the current folder."""
    if given is not None:
        if not given.is_dir():
            raise FileNotFoundError(f"{given} is not a folder of notebooks")
        return given.resolve()
    beside = Path(__file__).resolve().parents[2] / "notebooks"
    for folder in (beside, Path.cwd() / "notebooks"):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"no folder of notebooks at {beside}; name one with --folder")


def find_notebooks(folder: Path, names: list[str] | None = None) -> list[Path]:
    """Notebooks of `folder` in reading order, or those that `names` mean: number, name, or file name.

    A name that means none, or no notebook at all, raises ValueError.
    """
    found = sorted(path for path in folder.glob("*.ipynb"))
    if not found:
        raise ValueError(f"{folder} holds no notebook")
    if not names:
        return found
    chosen: list[Path] = []
    for name in names:
        stem = Path(name).name.removesuffix(".ipynb")
        fits = [path for path in found if path.stem == stem or path.stem.split("_")[0] == stem]
        if not fits:
            raise ValueError(f"no notebook {name!r} in {folder}; there are {', '.join(path.stem for path in found)}")
        chosen += [path for path in fits if path not in chosen]
    return sorted(chosen)


def load_notebook(path: Path) -> Any:
    """The notebook in `path` as it stands, nothing repaired; a file that is none raises ValueError that names it."""
    import nbformat
    from nbformat.v4.rwbase import rejoin_lines
    from nbformat.validator import iter_validate

    try:
        content = read_json(path)
    except ValueError as error:
        raise ValueError(f"{path} is not a notebook: {error}") from error
    if not isinstance(content, dict) or content.get("nbformat") != 4:
        raise ValueError(f"{path} is not a notebook of format 4")
    fault = next(iter_validate(content), None)
    if fault is not None:
        raise ValueError(f"{path} is not a notebook: {' '.join(str(fault).split())[:200]}")
    return rejoin_lines(nbformat.from_dict(content))


def contents(folder: Path) -> list[Entry]:
    """Every notebook of `folder` with its title and question; empty text where one is missing."""
    entries = []
    for path in find_notebooks(folder):
        cells = load_notebook(path)["cells"]
        text = cells[0]["source"] if cells and cells[0]["cell_type"] == "markdown" else ""
        entries.append(Entry(path=path, title=first_heading(text), question=first_question(text)))
    return entries


def first_heading(text: str) -> str:
    """The first markdown heading of `text`, without its marks."""
    match = re.search(r"^#+\s*(.+?)\s*#*\s*$", text, re.MULTILINE)
    return match.group(1) if match else ""


def first_question(text: str) -> str:
    """The first sentence of `text` that ends in a question mark; headings come last."""
    lines = text.splitlines()
    body = " ".join(line.strip() for line in lines if not line.startswith("#"))
    heads = " ".join(line.strip("# ") for line in lines if line.startswith("#"))
    for part in (body, heads):
        match = re.search(r"[^.!?]*[^.!?\s][^.!?]*\?", part)
        if match:
            return match.group(0).strip(" *_>-")
    return ""
